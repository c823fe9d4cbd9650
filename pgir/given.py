"""Turns an existing answer, however it is described, into one sequence with its spans.

An answer is scored in the context in which it was written. That is either the run's own
prompt template, or a prompt that the caller gives; both yield token ids and spans.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from beatrice.extract.generate.generator import decode_ids
from beatrice.extract.generate.prompts import (
    Prompt,
    apply_template,
    blank_before_answer,
    build_prompt,
    check_text,
    control_tokens,
    encode_after,
    encode_any,
    encode_text,
    special_texts,
    token_span,
)
from beatrice.extract.generate.templates import PromptTemplate
from beatrice.extract.records import Answer, AnswerSpan, Passage, Setting
from beatrice.extract.signals.sequence import TokenSequence, sequence_of
from beatrice.pgir.arguments import (
    argument_error,
    as_ids,
    as_messages,
    as_passages,
    as_range,
    as_text,
)

Range = tuple[int, int]
_PROMPTS = ("prompt", "messages", "prompt_ids")
# Version of how texts become ids. In version 1 every answer began with a blank.
READING = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerToScore:
    """An answer, and the prompt that the model was asked with.

    Without `prompt`, `messages` and `prompt_ids`, the run's own template asks
    `question` with the passages in `context`. At most one of the three may be given: it
    is the prompt that was really used. `question` and `context` are then searched for
    in its text, unless `question_range` and `context_range` say where they are.

    Attributes:
      question: the question that the model was asked.
      answer: its answer, or anybody's. After a given prompt it is the exact text,
        including the white space at its beginning. Ignored if `answer_ids` are given.
      context: the passages that the model was shown, see `as_passages`; stored as
        `Passage` records. None, or no passage, is closed-book.
      prompt: text that was sent for completion. Its control tokens are read as such;
        the tokenizer's own are put in front unless it begins with them.
      messages: mappings with `role` and `content`, of all that came before the answer,
        put through the model's chat template with thinking switched off if it can be.
      prompt_ids: the ids that the model read.
      answer_ids: the ids that it wrote; a special one at the end is the stop token.
        `()` if the model has yet to answer. Without them `answer` is tokenised, and
        taken as ended by the stop token.
      context_range: characters `[start, stop)` of the context in the prompt's text,
        which is `prompt`, `Scorer.render(messages)` or the decoded `prompt_ids`.
      question_range: likewise of the question, which must follow the context.
    """

    question: str | None = None
    answer: str | None = None
    context: Any = ()
    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    prompt_ids: Sequence[int] | None = None
    answer_ids: Sequence[int] | None = None
    context_range: Range | None = None
    question_range: Range | None = None

    def __post_init__(self) -> None:
        """Check and convert every argument."""
        prompts = [name for name in _PROMPTS if getattr(self, name) is not None]
        if len(prompts) > 1:
            raise ValueError(f"expected one prompt, found {' and '.join(prompts)}")
        object.__setattr__(self, "context", as_passages(self.context, "context"))
        for name, convert in _CONVERTED.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, convert(value, name))
        for name in ("context_range", "question_range"):
            if not prompts and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} refers to the text of a prompt; give prompt, messages or "
                    "prompt_ids too"
                )
        needed = ["answer"] if self.answer_ids is None else []
        for name in [*needed, *([] if prompts else ["question"])]:
            if getattr(self, name) is None:
                raise argument_error(name, "a text (str)", None)

    @property
    def uses_template(self) -> bool:
        """Whether the prompt is made by the run's own template."""
        return all(getattr(self, name) is None for name in _PROMPTS)


_CONVERTED = {
    "question": as_text,
    "answer": as_text,
    "prompt": as_text,
    "messages": as_messages,
    "prompt_ids": as_ids,
    "answer_ids": as_ids,
    "context_range": as_range,
    "question_range": as_range,
}
ARGUMENTS = tuple(field.name for field in dataclasses.fields(AnswerToScore))


def as_answer(row: Any) -> AnswerToScore:
    """Return a row's answer: a mapping of `score`'s arguments, or a tuple in order."""
    if isinstance(row, AnswerToScore):
        return row
    if isinstance(row, Mapping):
        if unknown := sorted(map(str, row.keys() - set(ARGUMENTS))):
            raise ValueError(
                f"unknown argument {unknown[0]!r}; expected {', '.join(ARGUMENTS)}"
            )
        return AnswerToScore(**row)
    if isinstance(row, (tuple, list)) and 2 <= len(row) <= 3:
        return AnswerToScore(**dict(zip(ARGUMENTS, row, strict=False)))
    raise argument_error(
        "the row",
        "a mapping with 'question' and 'answer' (and perhaps 'context'), or a tuple in "
        "this order",
        row,
    )


class TextPart(NamedTuple):
    """A text in a prompt, or the answer."""

    what: str  # in words, such as "the question"
    text: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTokens(Prompt):
    """The prompt that the model had read when it began to answer."""

    is_templates: bool  # whether the run's own template makes the same ids
    parts: list[TextPart]  # question and passages, or the whole of another prompt

    @property
    def setting(self) -> Setting:
        """The setting: closed-book if no token belongs to a context."""
        has_context = self.context_span[0] < self.context_span[1]
        return "with_context" if has_context else "closed_book"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringInput:
    """An answer prepared for scoring."""

    prompt: PromptTokens
    answer: Answer
    pieces: tuple[str, ...]  # the answer's text, one piece per token
    sequence: TokenSequence  # prompt and answer with their spans

    @property
    def parts(self) -> list[TextPart]:
        """The texts in the prompt, followed by the answer."""
        answer = TextPart("the answer", self.answer.text, self.answer.token_ids)
        return [*self.prompt.parts, answer]


@dataclasses.dataclass(frozen=True)
class _PromptText:
    """A prompt as text and ids; offsets are None if the text has other ids."""

    text: str
    ids: tuple[int, ...]
    offsets: Sequence[Range] | None
    begin: int  # character at which the question begins if its range is not known
    end: int | None = None  # character at which a chat's last message ends


def _prompt_text(tokenizer: Any, given: AnswerToScore) -> _PromptText:
    begin, end, has_special = 0, None, True
    if given.messages is not None:
        text = apply_template(tokenizer, given.messages)
        first, end = _last_message(tokenizer, given.messages, text)
        words = given.messages[-1]["content"].strip()
        begin = max(first, text.rfind(words, first, end))
    elif given.prompt is not None:
        text, bos = given.prompt, tokenizer.bos_token
        has_special = bos is not None and text.startswith(bos)
    else:
        prompt_ids = tuple(given.prompt_ids or ())
        _check_ids(tokenizer, prompt_ids, "prompt_ids")
        text = tokenizer.decode(prompt_ids, clean_up_tokenization_spaces=False)
    check_text(text, "the prompt")
    encoded = encode_any(tokenizer, text, add_special_tokens=not has_special)
    ids: tuple[int, ...] = encoded.ids
    offsets: Sequence[Range] | None = encoded.offsets
    if given.prompt_ids is not None and ids != given.prompt_ids:
        ids, offsets = tuple(given.prompt_ids), None
    return _PromptText(text, ids, offsets, begin, end)


def _last_message(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str
) -> Range:
    """Return the characters of the last message in the text of all messages.

    Searching for it is not enough, since the template's own words after it may contain
    a message such as "a". If those words depend on the message, return the whole text.
    """
    mark = "BEATRICE-MESSAGE"  # as in `render_message`
    marked = [*messages[:-1], {**messages[-1], "content": mark}]
    before, _, after = apply_template(tokenizer, marked).partition(mark)
    start, stop = len(before), len(text) - len(after)
    is_around = text.startswith(before) and text.endswith(after)
    return (start, stop) if is_around and start <= stop else (0, len(text))


def _check_ids(tokenizer: Any, ids: Sequence[int], name: str) -> None:
    n = len(tokenizer)  # slow for some tokenizers
    wrong = [i for i in ids if not 0 <= i < n]
    if wrong or not ids:
        shown = wrong[0] if wrong else "none"
        raise ValueError(f"{name}: expected token ids from 0 to {n - 1}, found {shown}")


def _find_context(text: str, passages: Sequence[Passage]) -> Range | None:
    """Return the range from the first passage to the last, found one after another."""
    edges: list[int] = []
    for number, passage in enumerate(passages, start=1):
        check_text(passage.text, f"passage {number}")
        words, after = passage.text.strip(), edges[-1] if edges else 0
        at = text.find(words, after)
        if at < 0:
            raise ValueError(
                f"passage {number} is not in the prompt's text after the one before; "
                "give its exact words in the prompt's order, or a context_range"
            )
        if not edges and text.find(words, at + 1) >= 0:
            raise ValueError(
                f"passage {number} is in the prompt's text twice; give a context_range"
            )
        edges += [at, at + len(words)]
    return (edges[0], edges[-1]) if edges else None


def _find_question(text: str, question: str, after: int, end: int | None) -> Range:
    """Return the last range of the question after the context, as given or trimmed."""
    check_text(question, "the question")
    for words in (question, question.strip()):
        if (at := text.rfind(words, after, end)) >= 0:
            return at, at + len(words)
    raise ValueError(
        "the question is not in the prompt's text after the context, where the "
        "detector reads it; give its exact words, or a question_range"
    )


def _ranges(
    prompt: _PromptText, given: AnswerToScore
) -> tuple[Range | None, Range | None]:
    """Return the ranges of context and question, as given or as found in the text."""
    context = given.context_range or _find_context(prompt.text, given.context)
    after = context[1] if context else 0
    question = given.question_range
    if question is None and given.question is not None:
        question = _find_question(prompt.text, given.question, after, prompt.end)
    for name, char_range in (("context", context), ("question", question)):
        if char_range is not None and char_range[1] > len(prompt.text):
            raise ValueError(
                f"{name}_range: expected at most {len(prompt.text)}, the length of the "
                f"prompt's text, found {char_range[1]}"
            )
    if question is not None and question[0] < after:
        raise ValueError(
            f"question_range begins at {question[0]}, before the context's end at "
            f"{after}; the detector reads a question after its context"
        )
    if prompt.offsets is None and (context or question):
        raise ValueError(
            "prompt_ids differ from those that the tokenizer makes of their own text, "
            "so question and context cannot be placed in them; give prompt instead"
        )
    return context, question


def _prompt_as_given(
    tokenizer: Any, template: PromptTemplate, given: AnswerToScore
) -> PromptTokens:
    """Return a prompt given by the caller, with its spans."""
    prompt = _prompt_text(tokenizer, given)
    context, question = _ranges(prompt, given)
    if question is not None:
        cut = [Passage(title="", text=prompt.text[slice(*context)])] if context else []
        words, passages = prompt.text[slice(*question)], given.context or cut
        # A prompt that the template cannot make is not the template's.
        with contextlib.suppress(ValueError):
            of_template = _prompt_from_template(tokenizer, template, words, passages)
            if of_template.ids == prompt.ids:
                return of_template
    start = None
    if prompt.offsets is None:
        special = set(tokenizer.all_special_ids)
        first = next((i for i, x in enumerate(prompt.ids) if x not in special), 0)
        span = (first, first)
    else:
        begin = question[0] if question else prompt.begin
        span = token_span(prompt.offsets, context or (0, 0), begin)
        if question is not None:
            start = token_span(prompt.offsets, question, begin)[0]
    last = len(prompt.ids) - 1
    if span[1] > last or (start or 0) > last:
        raise ValueError(
            "context and question must lie before the last token of the prompt, at "
            "which the answer begins; give what follows the question too"
        )
    return PromptTokens(
        ids=prompt.ids,
        context_span=span,
        text=prompt.text,
        question_start=None if start is None else max(start, span[1]),
        is_templates=False,
        parts=[TextPart("the prompt", prompt.text, prompt.ids)],
    )


def _prompt_from_template(
    tokenizer: Any, template: PromptTemplate, question: str, passages: Sequence[Passage]
) -> PromptTokens:
    prompt = build_prompt(tokenizer, template, question, passages)
    texts = {"the question": question}
    for i, passage in enumerate(passages, start=1):
        texts[f"passage {i}"] = f"{passage.title} {passage.text}".strip()
    plain = {"add_special_tokens": False}
    parts = [
        TextPart(what, text, encode_text(tokenizer, f" {text}", **plain).ids)
        for what, text in texts.items()
    ]
    return PromptTokens(**vars(prompt), is_templates=True, parts=parts)


HALF = "\N{REPLACEMENT CHARACTER}"  # stands for a character with bytes still to come


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each token adds to what the ids decode to.

    A character of several tokens comes with the last of them. Every token is decoded
    together with some before it, since some tokenizers drop a first token's space.
    """
    texts: list[str] = []
    first = done = 0  # `ids[first:done]` are decoded before the next token
    for n in range(1, len(ids) + 1):
        before = decode_ids(tokenizer, ids[first:done])
        text = decode_ids(tokenizer, ids[first:n])
        if text.endswith(HALF) and n < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first, done = done, n
    return tuple(texts)


def _check_ends(tokenizer: Any, answer: str) -> None:
    """Check that an answer neither begins nor ends with the text of a special token.

    The model would read it as letters, which it never writes, so P would mean nothing.
    """
    words, texts = answer.strip(), special_texts(tokenizer, len(tokenizer))
    for verb, meets in (("begins", words.startswith), ("ends", words.endswith)):
        if meets(texts):
            token = max(filter(meets, texts), key=len)
            raise ValueError(
                f"the answer {verb} with {token!r}, a special token of the model; "
                "remove it, as decoding with skip_special_tokens=True does"
            )


def _answer_tokens(
    tokenizer: Any,
    template: PromptTemplate,
    given: AnswerToScore,
    prompt: PromptTokens,
    stop: int | None,
) -> tuple[tuple[int, ...], tuple[str, ...], int | None]:
    """Return the answer's ids, its text piece by piece, and the stop token."""
    if given.answer_ids is None:
        text = str(given.answer)
        check_text(text, "the answer")
        _check_ends(tokenizer, text)
        if given.uses_template:  # begin as the run's own answers do
            blank = blank_before_answer(tokenizer, prompt, chat=template.chat)
            text = blank + text.strip()
        encoded = encode_after(tokenizer, prompt, text)
        # A character of several tokens comes with the last, as in `token_texts`. A
        # tokenizer that composes accents leaves the last one outside.
        starts = [start for start, _ in encoded.offsets[1:]]
        stops = [*map(min, (stop for _, stop in encoded.offsets), starts), len(text)]
        edges = itertools.pairwise([0, *stops][: len(encoded.ids) + 1])
        return encoded.ids, tuple(text[a:b] for a, b in edges), stop
    ids = tuple(given.answer_ids)
    _check_ids(tokenizer, ids, "answer_ids")
    is_whole = ids[-1] == stop or ids[-1] in control_tokens(tokenizer, len(tokenizer))
    ids, stop = (ids[:-1], ids[-1]) if is_whole else (ids, None)
    return ids, token_texts(tokenizer, ids), stop


def prompt_tokens(
    tokenizer: Any, template: PromptTemplate, given: AnswerToScore
) -> PromptTokens:
    """Return the prompt that the model has read, or will read, before it answers."""
    if not given.uses_template:
        return _prompt_as_given(tokenizer, template, given)
    question = str(given.question)
    return _prompt_from_template(tokenizer, template, question, given.context)


def prepare(
    tokenizer: Any,
    template: PromptTemplate,
    given: AnswerToScore,
    *,
    answer_span: AnswerSpan = "emitting",
    stop_id: int | None = None,
    example_id: str = "given",
) -> ScoringInput:
    """Return an existing answer as a sequence to score; needs a fast tokenizer.

    `template` and `answer_span` are those of the run; a `stop_id` of None takes the
    tokenizer's end-of-sequence token.
    """
    prompt = prompt_tokens(tokenizer, template, given)
    usual = tokenizer.eos_token_id if stop_id is None else stop_id
    ids, pieces, stop = _answer_tokens(tokenizer, template, given, prompt, usual)
    answer = Answer(
        example_id=example_id,
        setting=prompt.setting,
        variant="original",
        text="".join(pieces),
        prompt_ids=prompt.ids,
        token_ids=ids,
        stop_id=stop,
        context_span=prompt.context_span,
    )
    sequence = sequence_of(
        answer, answer_span=answer_span, question_start=prompt.question_start
    )
    return ScoringInput(prompt=prompt, answer=answer, pieces=pieces, sequence=sequence)
