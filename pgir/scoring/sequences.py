"""From any telling of how an answer came about to one sequence with its spans.

A score reads what the model had read. Either the run's own template asked, or the
prompt that was really used is told; both end in the same ids and spans.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from extract.generate.prompts import (
    apply_template,
    build_prompt,
    check_text,
    encode_text,
    token_span,
)
from extract.generate.templates import PromptTemplate
from extract.records import Answer, Passage
from extract.signals.plan import AnswerSpan, sequence_of
from pgir.scoring.given import Asked, GivenAnswer, Prepared, Range


@dataclasses.dataclass(frozen=True)
class _Text:
    """A prompt as text and ids; offsets are None where the text makes other ids."""

    text: str
    ids: tuple[int, ...]
    offsets: Sequence[Range] | None
    begin: int  # character at which what was asked begins, if nothing tells


def _prompt_text(tokenizer: Any, given: GivenAnswer) -> _Text:
    """Return the prompt that was really used."""
    begin, has_own = 0, True
    if given.messages is not None:
        text = apply_template(tokenizer, given.messages)
        begin = max(0, text.rfind(given.messages[-1]["content"].strip()))
    elif given.prompt is not None:
        text, bos = given.prompt, tokenizer.bos_token
        has_own = bos is not None and text.startswith(bos)
    else:
        ids = given.prompt_ids
        _check_ids(tokenizer, ids, "prompt_ids")
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    check_text(text, "the prompt")
    encoded = tokenizer(
        text, return_offsets_mapping=True, add_special_tokens=not has_own
    )
    found = tuple(encoded["input_ids"])
    offsets: Sequence[Range] | None = encoded["offset_mapping"]
    if given.prompt_ids is not None and found != given.prompt_ids:
        found, offsets = given.prompt_ids, None
    return _Text(text, found, offsets, begin)


def _check_ids(tokenizer: Any, ids: Sequence[int], name: str) -> None:
    """Refuse an empty list and ids that the model does not have."""
    wrong = [i for i in ids if not 0 <= i < len(tokenizer)]
    if wrong or not ids:
        found = wrong[0] if wrong else "none"
        raise ValueError(
            f"{name}: expected token ids from 0 to {len(tokenizer) - 1}, found {found}"
        )


def _find_context(text: str, passages: Sequence[Passage]) -> Range | None:
    """Find passages one after another; from the first one's begin to the last's end."""
    edges: list[int] = []
    for number, passage in enumerate(passages, start=1):
        check_text(passage.text, f"passage {number}")
        part, after = passage.text.strip(), edges[-1] if edges else 0
        at = text.find(part, after)
        if at < 0:
            raise ValueError(
                f"passage {number} is not in the prompt's text behind the one before; "
                "give its exact words in the prompt's order, or tell context_range"
            )
        if not edges and text.find(part, at + 1) >= 0:
            raise ValueError(
                f"passage {number} is in the prompt's text twice; tell context_range"
            )
        edges += [at, at + len(part)]
    return (edges[0], edges[-1]) if edges else None


def _find_question(text: str, question: str, after: int) -> Range:
    """Find the last place of the question behind the context."""
    check_text(question, "the question")
    at = text.rfind(question.strip(), after)
    if at < 0:
        raise ValueError(
            "the question is not in the prompt's text behind the context, where the "
            "detector reads it; give its exact words, or tell question_range"
        )
    return at, at + len(question.strip())


def _places(prompt: _Text, given: GivenAnswer) -> tuple[Range | None, Range | None]:
    """Return the characters of context and question, where they are told or found."""
    context = given.context_range or _find_context(prompt.text, given.passages)
    after = context[1] if context else 0
    question = given.question_range
    if question is None and given.question is not None:
        question = _find_question(prompt.text, given.question, after)
    for name, place in (("context", context), ("question", question)):
        if place is not None and place[1] > len(prompt.text):
            raise ValueError(
                f"{name}_range: expected at most {len(prompt.text)}, the length of the "
                f"prompt's text, found {place[1]}"
            )
    if question is not None and question[0] < after:
        raise ValueError(
            f"question_range begins at {question[0]}, before the context's end at "
            f"{after}; the detector reads a question behind its context"
        )
    if prompt.offsets is None and (context or question):
        raise ValueError(
            "prompt_ids are not those that the tokenizer makes of their own text, so "
            "no character of it can be placed in them; give the prompt's text instead"
        )
    return context, question


def _ask_exactly(tokenizer: Any, template: PromptTemplate, given: GivenAnswer) -> Asked:
    """Return the prompt that was really used, with the spans that are told or found.

    The question span begins where the question does if that is known; else as in
    training, behind the context, or closed-book with the last message or the prompt.
    """
    prompt = _prompt_text(tokenizer, given)
    context, question = _places(prompt, given)
    own = None
    if question is not None:
        cut = [Passage(title="", text=prompt.text[slice(*context)])] if context else []
        try:
            own = build_prompt(
                tokenizer,
                template,
                prompt.text[slice(*question)],
                given.passages or cut,
            )
        except ValueError:
            pass  # the template cannot make it, so it is not the template's
    start = None
    if own is not None and own.ids == prompt.ids:
        span = own.context_span
    elif prompt.offsets is None:
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
            "context and question lie before the last token of the prompt, at which "
            "the answer begins; give the whole prompt, with what follows the question"
        )
    return Asked(
        ids=prompt.ids,
        context_span=span,
        question_start=None if start is None else max(start, span[1]),
        is_own=own is not None and own.ids == prompt.ids,
        parts=[("the prompt", prompt.ids)],
        text=prompt.text,
    )


def _ask_own(tokenizer: Any, template: PromptTemplate, given: GivenAnswer) -> Asked:
    """Return the prompt that the run's own template makes."""
    question = str(given.question)
    prompt = build_prompt(tokenizer, template, question, given.passages)
    named = [("the question", question)]
    named += [
        (f"passage {i}", f"{one.title} {one.text}".strip())
        for i, one in enumerate(given.passages, start=1)
    ]
    return Asked(
        ids=prompt.ids,
        context_span=prompt.context_span,
        question_start=None,
        is_own=True,
        parts=[(what, _continue(tokenizer, f" {text}")[0]) for what, text in named],
        text=" ".join(text for _, text in named),
    )


def _continue(tokenizer: Any, text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids of a text as it follows another, and the text piece by piece."""
    encoded = encode_text(tokenizer, text, add_special_tokens=False)
    stops = [stop for _, stop in encoded["offset_mapping"]]
    pieces = (text[a:b] for a, b in itertools.pairwise([0, *stops]))
    return tuple(encoded["input_ids"]), tuple(pieces)


def _answered(
    tokenizer: Any, template: PromptTemplate, given: GivenAnswer, stop: int | None
) -> tuple[tuple[int, ...], tuple[str, ...], int | None]:
    """Return the answer's ids, its text piece by piece, and the stop token."""
    if given.answer_ids is None:
        check_text(str(given.answer), "the answer")
        text = str(given.answer)
        if given.is_own:  # as the run's own answers begin; a chat's begins a line
            text = ("" if template.chat else " ") + text.strip()
        return (*_continue(tokenizer, text), stop)
    ids = given.answer_ids
    _check_ids(tokenizer, ids, "answer_ids")
    if ids[-1] == stop or ids[-1] in tokenizer.all_special_ids:
        ids, stop = ids[:-1], ids[-1]
    return ids, tuple(tokenizer.decode([i]) for i in ids), stop


def prepare(
    tokenizer: Any,
    template: PromptTemplate,
    given: GivenAnswer,
    *,
    answer_span: AnswerSpan = "emitting",
    stop_id: int | None = None,
) -> Prepared:
    """Make the sequence of an answer that exists.

    Args:
      tokenizer: a fast one, of the model that is to read it.
      template: the run's own.
      given: what a person tells.
      answer_span: as in training.
      stop_id: what ended the answers in training; None takes the tokenizer's.

    Raises:
      ValueError: a text is empty or no text, holds control tokens, or is not where it
        is said to be.
    """
    ask = _ask_own if given.is_own else _ask_exactly
    asked = ask(tokenizer, template, given)
    usual = tokenizer.eos_token_id if stop_id is None else stop_id
    ids, pieces, stop = _answered(tokenizer, template, given, usual)
    answer = Answer(
        example_id="given",
        setting=asked.setting,
        variant="original",
        text="".join(pieces),
        prompt_ids=asked.ids,
        token_ids=ids,
        stop_id=stop,
        context_span=asked.context_span,
    )
    sequence = sequence_of(answer, answer_span=answer_span)
    if asked.question_start is not None:
        spans = sequence.spans.copy()
        spans[1, 0] = asked.question_start
        sequence = dataclasses.replace(sequence, spans=spans)
    return Prepared(
        asked=asked,
        sequence=sequence,
        parts=[*asked.parts, ("the answer", ids)],
        pieces=pieces,
        text=f"{asked.text} {answer.text}",
    )
