"""Prompts: chat templates, context spans, control tokens; and a run's requests.

The context's span comes from the tokenizer's offsets over the exact ids that the model
reads, never from tokenising a substring, which may split differently.
"""

import contextlib
import dataclasses
import functools
import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from beatrice.extract.generate.generator import THINKING, Generated, SamplingConfig
from beatrice.extract.generate.templates import PromptConfig, PromptTemplate
from beatrice.extract.records import (
    SETTINGS,
    Answer,
    Example,
    Passage,
    Record,
    Setting,
    Variant,
)
from beatrice.extract.run.directory import Preset


@functools.lru_cache(maxsize=8)
def control_tokens(tokenizer: Any, n_words: int) -> dict[int, str]:
    """Return the tokens that steer a model, such as the end of a turn, by id.

    Some tokenizers have thousands, so they are listed once per number of words.
    """
    added = {
        index: str(token.content)
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    tokens = added | dict(named)
    unknown = tokenizer.unk_token_id
    if unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        tokens.pop(unknown, None)  # it steers nothing, and is counted elsewhere
    return tokens


class Encoded(NamedTuple):
    """The ids of a text, and the characters `[start, stop)` that each stands for."""

    ids: tuple[int, ...]
    offsets: list[tuple[int, int]]


def encode_any(
    tokenizer: Any,
    text: str,
    *,
    add_special_tokens: bool,
    split_special_tokens: bool = False,
) -> Encoded:
    """Return the ids of a text that the model is to go on from.

    Some tokenizers, as those of a training, add an end to every text; it is left out.
    """
    encoded = tokenizer(
        text,
        return_offsets_mapping=True,
        add_special_tokens=add_special_tokens,
        split_special_tokens=split_special_tokens,
    )
    ids, offsets = tuple(encoded["input_ids"]), list(encoded["offset_mapping"])
    if ids and ids[-1] == tokenizer.eos_token_id and offsets[-1][0] == offsets[-1][1]:
        ids, offsets = ids[:-1], offsets[:-1]
    return Encoded(ids, offsets)


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Encoded:
    """Return the ids of a text that holds no control tokens of its own.

    What looks like a control token in it is split like any other word.
    """
    options = {"add_special_tokens": add_special_tokens, "split_special_tokens": True}
    encoded = encode_any(tokenizer, text, **options)
    _check_control_tokens(tokenizer, text, encoded, (0, len(text)))
    return encoded


def _check_control_tokens(
    tokenizer: Any, text: str, encoded: Encoded, characters: tuple[int, int]
) -> None:
    """Check that no character of `[start, stop)` became a control token.

    A chat template writes control tokens around a message as text, so the message's
    cannot be told from them before the ids are made.
    """
    control = control_tokens(tokenizer, len(tokenizer))
    for token, (start, stop) in zip(*encoded, strict=True):
        if token not in control or stop <= characters[0] or start >= characters[1]:
            continue
        # Where one token means both unknown and end, it may stand for other text.
        if text[start:stop].strip() == control[token].strip() != "":
            raise _control_error(control[token])


def _control_error(token: str) -> ValueError:
    return ValueError(
        f"the text holds {token!r}, which the model reads as a control token; take it "
        "out of the question, its passages or the answer"
    )


def template_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of a chat template's tokens that are no special tokens.

    As Qwen's <think>: no option splits it. What is added to a vocabulary beside them
    (Gemma's <b>) are words as any.
    """
    template = str(getattr(tokenizer, "chat_template", None))
    return _template_tokens(tokenizer, len(tokenizer), template)


@functools.lru_cache(maxsize=8)
def _template_tokens(tokenizer: Any, n_words: int, template: str) -> tuple[str, ...]:
    added = tokenizer.added_tokens_decoder.values()
    texts = (token.content for token in added if not token.special)
    return tuple(text for text in texts if text[:1] in ("<", "[") and text in template)


@functools.lru_cache(maxsize=8)
def special_texts(tokenizer: Any, n_words: int) -> tuple[str, ...]:
    """Return the texts of a tokenizer's special tokens, the unknown one's included.

    Those of letters alone are left out: they stand in words.
    """
    named = control_tokens(tokenizer, n_words).values(), tokenizer.all_special_tokens
    texts = dict.fromkeys(text.strip() for texts in named for text in texts)
    return tuple(text for text in texts if text and not text.isalnum())


@functools.lru_cache(maxsize=8)
def special_pattern(tokenizer: Any, n_words: int) -> re.Pattern[str]:
    """Return what finds special tokens in a text, where there may be thousands."""
    texts = sorted(special_texts(tokenizer, n_words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def escape_control_tokens(tokenizer: Any, text: str) -> str:
    """Return a text in which a blank parts every word that is a control token.

    For passages of a search, which a user cannot edit.
    """
    tokens = control_tokens(tokenizer, len(tokenizer)).values()
    for token in (*tokens, *template_tokens(tokenizer)):
        word = token.strip()
        if word and word in text:
            text = text.replace(word, f"{word[0]} {word[1:]}")
    return text


# Templates would write today's date, and a run that is continued tomorrow ask its
# questions differently. This is the default of Llama's, spelled out: what `strftime`
# makes of a date is in the language of the process.
_TODAY = "a=Fri A=Friday b=Jul B=July d=26 j=208 m=07 y=24 H=00 M=00 S=00 Y=2024"
_PARTS = ("replace('%{}', '{}')".format(*x.split("=")) for x in _TODAY.split())
# Before a template that asks for it (Granite's, gpt-oss's): it takes data, no function.
_STRFTIME = (
    f"{{% macro strftime_now(f) %}}{{{{ f | {' | '.join(_PARTS)} }}}}{{% endmacro %}}"
)
# What templates are told beside the message, here and by a server.
TEMPLATE_FIELDS: dict[str, Any] = {
    "enable_thinking": False,  # Qwen, Gemma
    "thinking": False,  # Granite, DeepSeek
    "date_string": "26 Jul 2024",  # Llama
}


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A message in a chat template, at the characters `[start, stop)` of the text."""

    text: str  # special tokens included, as text
    start: int
    stop: int
    n_trimmed: int  # characters the template cut off the message's beginning


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after a time; in the main thread alone, which gets signals."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it is not done after {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)  # maybe a caller's own
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, is_open: bool
) -> str:
    """Return messages in the chat template, ready for a reply if it is open."""
    with _within(seconds=10):  # far above any that is meant
        template = tokenizer.get_chat_template()
        if "strftime_now" in template:
            template = _STRFTIME + template
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=is_open,
            chat_template=template,
            **TEMPLATE_FIELDS,
        )


_PLAIN = (
    "ask with plain prompts (prompt= for messages=; of `beatrice data`, without --chat)"
)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages in the model's chat template, up to where its reply begins.

    Thinking is switched off, under the names that templates know it by, and by words
    that a template writes before a reply and leaves to the model (gpt-oss's channel).
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"the tokenizer has no chat template; {_PLAIN}, or use a model that is "
            "tuned to follow instructions"
        )
    n_characters = sum(len(str(message.get("content"))) for message in messages)
    try:
        text = _render(tokenizer, messages, is_open=True)
    # A template is a program of the checkpoint's authors, so any error can come of it.
    except Exception as error:
        raise ValueError(
            f"the chat template fails ({type(error).__name__}: {str(error)[:200]}); "
            f"leave a system message out, {_PLAIN}, or mend tokenizer_config.json"
        ) from error
    if len(text) > 1_000_000 + 10 * n_characters:
        raise ValueError(
            f"the chat template makes {len(text)} characters of a message of "
            f"{n_characters}; {_PLAIN}"
        )
    before = _around_reply(tokenizer, str(tokenizer.chat_template))[0]
    # The end of thoughts that the prompt has begun is the model's: that is refused.
    is_end = before.lstrip().startswith(tuple(end for _, end in THINKING))
    return text if is_end or not before.strip() else text + before


def usual_stop_id(
    tokenizer: Any, prompt: PromptConfig, stop_ids: Sequence[int]
) -> int | None:
    """Return the token with which a model ends its answers to such prompts.

    An answer to worked examples ends as theirs do, in a chat as the template ends a
    turn; else by one of the tokens at which generation ends, if any are known.
    """
    usual = tokenizer.eos_token_id
    if prompt.usual_stop and not prompt.chat:
        # After an example comes the next one, whose words decide how ends are cut.
        after = f"\n\n{prompt.prompt_template().closed_book}"
        end = after if prompt.shots else prompt.usual_stop[0]
        encoded = encode_any(tokenizer, f"a{end}", add_special_tokens=False)
        ids = (i for i, (_, stop) in zip(*encoded, strict=True) if stop > 1)
        return next(ids, usual)
    usual = usual if usual in stop_ids or not stop_ids else stop_ids[0]
    if prompt.chat:
        end = _around_reply(tokenizer, str(tokenizer.chat_template))[1]
        ids = encode_any(tokenizer, end, add_special_tokens=False).ids
        return next((i for i in ids if i in stop_ids), usual)
    return usual


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the control token that a chat template puts behind a reply, if it does."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    behind = _around_reply(tokenizer, str(tokenizer.chat_template))[1].strip()
    control = control_tokens(tokenizer, len(tokenizer)).items()
    texts = ((text.strip(), i) for i, text in control)
    ends = [(len(text), i) for text, i in texts if text and behind.startswith(text)]
    return max(ends, default=(0, None))[1]


def stop_ids_of(
    defaults: Any, config: Any, tokenizer: Any, name: str
) -> tuple[int, ...]:
    """Return the tokens that end a text: of generation defaults, else of the config.

    Last the end of a turn that neither names: fine-tuned models keep the config of
    their base, which ends its texts otherwise.
    """
    stop = defaults.eos_token_id
    stop = config.eos_token_id if stop is None else stop
    if stop is None:
        raise ValueError(
            f"{name} names no end-of-text token, so no answer would ever "
            "end; add eos_token_id to its generation_config.json"
        )
    ids = (stop,) if isinstance(stop, int) else tuple(stop)
    end = end_of_turn(tokenizer)
    return ids if end is None or end in ids else (*ids, end)


@functools.lru_cache(maxsize=8)
def _around_reply(tokenizer: Any, chat_template: str) -> tuple[str, str]:
    """Return what a tokenizer's chat template writes before and behind a reply.

    Before is what stands behind a prompt that is ready for a reply: white space that
    the model writes itself, or words that its answer begins behind.
    """
    mark = "BEATRICE-REPLY"
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": mark},
    ]
    with contextlib.suppress(Exception):  # a template is the authors' program
        ready = _render(tokenizer, turns[:1], is_open=True)
        text = _render(tokenizer, turns, is_open=False)
        before, _, behind = text.partition(mark)
        return before.removeprefix(ready) if before.startswith(ready) else "", behind
    return "", ""


def render_message(tokenizer: Any, message: str, system: str = "") -> Rendered:
    """Return a user's message as `apply_template` does, and where it lies."""
    mark = "BEATRICE-MESSAGE"  # no white space: many templates trim what they are given
    before = [{"role": "system", "content": system}] if system else []
    marked, text = (
        apply_template(tokenizer, [*before, {"role": "user", "content": content}])
        for content in (mark, message)
    )
    if system.strip() not in marked:
        raise ValueError(
            "the chat template leaves the system message out; put its words into those "
            "around the question"
        )
    around = marked.split(mark)
    for shown in (message, message.strip(), message.rstrip(), message.lstrip()):
        if len(around) == 2 and text == around[0] + shown + around[1]:
            break
    else:
        raise ValueError(
            "the chat template changes the text of a message, so that the context "
            "cannot be told from the question in it; ask with plain prompts"
        )
    for begin, end in THINKING:
        if around[1].count(begin) > around[1].count(end):
            raise ValueError(
                f"the chat template opens a thinking block ({begin}) although thinking "
                "is switched off, so the model's first words would be no answer; use "
                "a model whose template can switch it off, or plain prompts"
            )
    start = len(around[0])
    return Rendered(text, start, start + len(shown), message.find(shown))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The ids the model reads and where the context lies in them."""

    ids: tuple[int, ...]  # special tokens included
    # `[start, stop)`; without a context equal numbers, after the leading special
    # tokens, a chat's header and the worked examples.
    context_span: tuple[int, int]
    text: str = ""  # of which the ids were made; a chat's special tokens are in it
    question_start: int | None = None  # of its span; None: where the context ends


# Ends behind which no blank begins an answer: white space, an opening bracket or quote
# (of those that close elsewhere, as in German, only behind a blank or colon), and
# Chinese and Japanese, whose words are not parted; Korean ones are.
_NO_BLANK_BEHIND = re.compile(
    r"""(\s|[(\[{„‚]|[\s:：]["'“‘«‹»›]|[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff]"""
    r"""|[\uff01-\uff9f\U00020000-\U0003ffff])\Z"""
)


def blank_before_answer(tokenizer: Any, prompt: Prompt, *, chat: bool) -> str:
    """Return the white space with which a model begins its answer to a prompt."""
    if chat:
        before = _around_reply(tokenizer, str(tokenizer.chat_template))[0]
        return "" if before.strip() else before
    return "" if _NO_BLANK_BEHIND.search(prompt.text[-2:]) else " "


def encode_behind(tokenizer: Any, prompt: Prompt, text: str) -> Encoded:
    """Return the ids of a text behind a prompt, as the model writes them.

    Some tokenizers begin every text with a blank, which no answer has twice. So the
    text is read with the prompt's end before it; by itself where that would change how
    the end is read.
    """
    control = control_tokens(tokenizer, len(tokenizer)).get(prompt.ids[-1], "")
    at = prompt.text.rfind(control) if control else -1
    ends = [prompt.text[at:], "\n"]
    if at >= 0:  # the prompt ends with a control token; one in the text stays letters
        is_plain = not special_pattern(tokenizer, len(tokenizer)).search(text)
        ends = ends[: int(is_plain)]
    options = {"add_special_tokens": False, "split_special_tokens": at < 0}
    for end in ends:
        before = encode_any(tokenizer, end, **options)
        whole = encode_any(tokenizer, end + text, **options)
        n, n_end = len(before.ids), len(end)
        if whole.ids[:n] == before.ids and whole.offsets[:n] == before.offsets:
            offsets = [(a - n_end, b - n_end) for a, b in whole.offsets[n:]]
            encoded = Encoded(whole.ids[n:], offsets)
            _check_control_tokens(tokenizer, text, encoded, (0, len(text)))
            return encoded
    return encode_text(tokenizer, text, add_special_tokens=False)


def check_text(text: str, what: str) -> None:
    """Check that a text is not empty and can be encoded."""
    if not text.strip():
        raise ValueError(f"{what} is empty; give at least one word")
    if lone := re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"{what} has the lone surrogate U+{ord(lone.group()):04X} at character "
            f"{lone.start()}, which is no text; decode the source as UTF-8"
        )


def token_span(
    offsets: Sequence[tuple[int, int]], characters: tuple[int, int], begin: int
) -> tuple[int, int]:
    """Return the tokens that overlap a range of characters.

    An empty range gives the empty span at the first token behind character `begin`.
    """
    first, last = characters
    inside = [i for i, (a, b) in enumerate(offsets) if max(a, first) < min(b, last)]
    if inside:
        return inside[0], inside[-1] + 1
    behind = (i for i, (a, b) in enumerate(offsets) if b > a and b > begin)
    at = next(behind, len(offsets))
    return at, at


def build_prompt(
    tokenizer: Any,
    template: PromptTemplate,
    question: str,
    passages: Sequence[Passage] = (),
) -> Prompt:
    """Return the prompt of one question, closed-book without passages.

    The tokenizer must be a fast one, which can tell offsets. A ValueError says which
    text is empty or no text, or becomes control tokens, or why the chat template cannot
    be used.
    """
    check_text(question, "the question")
    for number, passage in enumerate(passages, start=1):
        check_text(passage.text, f"passage {number}")
        check_text(template.passage_text(passage), f"the title of passage {number}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} has no offsets; "
            "use a model with a fast tokenizer (tokenizer.json)"
        )
    context = template.context_text(passages) if passages else None
    for token in template_tokens(tokenizer):
        if token in question or token in (context or ""):
            raise _control_error(token)
    text, characters = template.render(question, context)
    if template.chat:
        rendered = render_message(tokenizer, text, template.system)
        start, stop = (max(0, c - rendered.n_trimmed) for c in characters)
        characters = (start + rendered.start, stop + rendered.start)
        text = rendered.text
        # The template writes its own special tokens, as text.
        encoded = encode_any(tokenizer, text, add_special_tokens=False)
        _check_control_tokens(tokenizer, text, encoded, (rendered.start, rendered.stop))
    else:
        encoded = encode_text(tokenizer, text, add_special_tokens=True)
    return Prompt(
        ids=encoded.ids,
        context_span=token_span(encoded.offsets, characters, characters[0]),
        text=text,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers are generated; always greedily."""

    max_new_tokens: int = 16
    tokens_per_batch: int = 16_384  # prompt and answer tokens, padding included
    stop: tuple[str, ...] = ()  # texts that end an answer, see `SamplingConfig`

    @property
    def greedy(self) -> SamplingConfig:
        """How the likeliest tokens are chosen."""
        return SamplingConfig(max_new_tokens=self.max_new_tokens, stop=self.stop)


@dataclasses.dataclass(frozen=True)
class Request:
    """One answer to be generated."""

    example_id: str
    setting: Setting
    variant: Variant
    prompt: Prompt
    dropped: tuple[int, ...] = ()  # places of the passages that are not in the prompt

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies the answer: example, setting, variant."""
        return (self.example_id, self.setting, self.variant)

    def answer(self, reply: Generated) -> Answer:
        """Return a generated text as the answer to this request."""
        if reply.token_ids is None or (
            reply.finish == "stop" and reply.stop_id is None
        ):
            raise ValueError(
                f"the server tells no token ids for question {self.example_id!r}; use "
                "vLLM with the dialect 'vllm' (return_token_ids), or answer on this "
                "machine"
            )
        return Answer(
            example_id=self.example_id,
            setting=self.setting,
            variant=self.variant,
            text=reply.text,
            prompt_ids=self.prompt.ids,
            token_ids=reply.token_ids,
            stop_id=reply.stop_id,
            context_span=self.prompt.context_span,
            dropped=self.dropped,
        )


class PromptModel(Protocol):
    """What prompts are made with: a loaded `Backbone`, or a `TokenizerOnly`."""

    @property
    def tokenizer(self) -> Any:
        """Return a fast one, which has offsets."""

    @property
    def max_length(self) -> int | None:
        """Return the window in tokens; None where the model sets no limit."""

    @property
    def name(self) -> str:
        """Return the model's name, for messages."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenizerOnly:
    """A `PromptModel` without weights: prompts are made here, a server answers them."""

    tokenizer: Any
    max_length: int | None = None
    name: str = "the model"


class LeftOut(Record, frozen=True):
    """A question that is not asked in one setting, since no passage of it fits."""

    example_id: str
    setting: Setting
    variant: Variant
    n_tokens: int  # of the prompt with its first passage alone
    room: int  # most tokens that a prompt may have


@dataclasses.dataclass(frozen=True)
class Requests:
    """What is asked, and what is not."""

    requests: list[Request]
    left_out: list[LeftOut]

    @property
    def note(self) -> str | None:
        """Return what was cut as a sentence, or None if nothing was."""
        n_dropped = [len(r.dropped) for r in self.requests if r.dropped]
        if not n_dropped and not self.left_out:
            return None
        return (
            f"{len(n_dropped)} of {len(self.requests)} prompts lack passages that did "
            f"not fit ({sum(n_dropped)} in all; `dropped` of each answer says which), "
            f"{len(self.left_out)} questions are not asked with context since not even "
            "one passage fits"
        )


def variants_of(
    setting: Setting, example: Example
) -> list[tuple[Variant, tuple[Passage, ...]]]:
    """Return the variants of one question in one setting, with their passages."""
    if setting == "closed_book":
        return [("original", ())]
    variants: tuple[Variant, ...] = ("original", "rewritten")
    return [(v, example.context(v)) for v in variants if example.context(v)]


def make_requests(
    examples: Sequence[Example],
    model: PromptModel,
    config: PromptConfig,
    max_new_tokens: int,
    settings: Sequence[Setting] = SETTINGS,
    places: Mapping[str, str] | None = None,
) -> Requests:
    """Return what has to be answered: every setting and variant of every question.

    The longest answer, of `max_new_tokens`, has to fit into the window too: prompts
    that do not are a ValueError, unless their last passages may be left out. A question
    of which no passage fits is then not asked with context, but listed. `places` are
    what errors call questions, by their ids.
    """
    limits = [n for n in (config.window, model.max_length) if n is not None]
    room = min(limits, default=math.inf) - max_new_tokens
    may_cut = config.overlong == "drop-passages"
    template = config.prompt_template()
    result, too_long = Requests([], []), []
    cells: Iterator[tuple[Example, Setting, Variant, tuple[Passage, ...]]] = (
        (example, setting, variant, passages)
        for setting in settings
        for example in examples
        for variant, passages in variants_of(setting, example)
    )
    for example, setting, variant, passages in cells:
        n_passages = len(passages)
        name = places[example.id] if places else f"question {example.id!r}"
        prompt = _prompt(model, template, example, passages, name)
        while len(prompt.ids) > room and may_cut and n_passages > 1:
            n_passages -= 1
            prompt = _prompt(model, template, example, passages[:n_passages], name)
        n_tokens = len(prompt.ids)
        key = example.id, setting, variant
        if n_tokens <= room:
            dropped = tuple(range(n_passages, len(passages)))
            result.requests.append(Request(*key, prompt, dropped))
        elif may_cut and passages:
            result.left_out.append(LeftOut(*key, n_tokens, int(room)))
        else:
            too_long.append((n_tokens, bool(passages), name))
    if too_long:
        n_tokens, has_passages, name = max(too_long)
        do = (
            "drop whole passages, listed and counted, with PromptConfig(overlong="
            "'drop-passages') (of `beatrice data`, --overlong drop-passages), or give "
            "fewer or shorter passages"
            if has_passages
            else "such questions and the worked examples alone are too long: take "
            "these questions out, or give another template (of a verb, --template)"
        )
        raise ValueError(
            f"prompts that do not fit: {len(too_long)}; the longest, {name}, has "
            f"{n_tokens} tokens, and beside an answer of {max_new_tokens} there is "
            f"room for {room} in the window of {model.name}; {do}"
        )
    return result


def _prompt(
    model: PromptModel,
    template: PromptTemplate,
    example: Example,
    passages: Sequence[Passage],
    name: str,
) -> Prompt:
    try:
        return build_prompt(model.tokenizer, template, example.question, passages)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """The run's section `answer`: what is asked, how, and answered greedily."""

    # Those asked for; a run has the ones that its questions allow, see
    # `extract.run.contents.settings_of`.
    settings: tuple[Setting, ...] = SETTINGS
    prompt: PromptConfig = PromptConfig()  # how questions are put
    # How long answers and batches are.
    generation: GenerationConfig = GenerationConfig()


_SMALL = AnswerConfig(
    generation=GenerationConfig(max_new_tokens=10, tokens_per_batch=8192)
)
ANSWER_PRESETS: dict[Preset, AnswerConfig] = {
    **dict.fromkeys(("demo", "few", "smoke"), _SMALL),
    "paper": AnswerConfig(generation=GenerationConfig(max_new_tokens=32)),
}
