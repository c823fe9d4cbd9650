"""Prompts (chat templates, context spans, control tokens) and the requests of a run.

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
    """Return a tokenizer's control tokens, such as the end of a turn, by id.

    Some have thousands, so the result is cached for each tokenizer size `n_words`.
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
        tokens.pop(unknown, None)  # it controls nothing, and is counted elsewhere
    return tokens


class Encoded(NamedTuple):
    """The token ids of a text, and the characters `[start, stop)` of each token."""

    ids: tuple[int, ...]
    offsets: list[tuple[int, int]]


def encode_any(
    tokenizer: Any,
    text: str,
    *,
    add_special_tokens: bool,
    split_special_tokens: bool = False,
) -> Encoded:
    """Return the ids of a text that the model is to continue.

    Some tokenizers end every text with an end-of-text token; it is removed.
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
    """Return the ids of a text in which nothing is meant as a control token.

    What looks like one is split like any other word, or is a ValueError.
    """
    options = {"add_special_tokens": add_special_tokens, "split_special_tokens": True}
    encoded = encode_any(tokenizer, text, **options)
    _check_control_tokens(tokenizer, text, encoded, (0, len(text)))
    return encoded


def _check_control_tokens(
    tokenizer: Any, text: str, encoded: Encoded, characters: tuple[int, int]
) -> None:
    """Check that no character of `[start, stop)` became a control token.

    A chat template writes control tokens around a message as text, so those in the
    message can be told apart only by their offsets.
    """
    control = control_tokens(tokenizer, len(tokenizer))
    for token, (start, stop) in zip(*encoded, strict=True):
        if token not in control or stop <= characters[0] or start >= characters[1]:
            continue
        # If one token means both unknown and end, it may stand for other text.
        if text[start:stop].strip() == control[token].strip() != "":
            raise _control_error(control[token])


def _control_error(token: str) -> ValueError:
    return ValueError(
        f"the text holds {token!r}, which the model reads as a control token; take it "
        "out of the question, its passages or the answer"
    )


def template_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the added tokens in a chat template that are not special tokens, as text.

    An example is Qwen's <think>, which no tokenizer option splits. Added tokens not in
    the template (Gemma's <b>) are ordinary words.
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

    Those of letters and digits only are left out: they also occur within words.
    """
    named = control_tokens(tokenizer, n_words).values(), tokenizer.all_special_tokens
    texts = dict.fromkeys(text.strip() for texts in named for text in texts)
    return tuple(text for text in texts if text and not text.isalnum())


@functools.lru_cache(maxsize=8)
def special_pattern(tokenizer: Any, n_words: int) -> re.Pattern[str]:
    """Return a pattern that finds any of a tokenizer's special tokens in a text."""
    texts = sorted(special_texts(tokenizer, n_words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def escape_control_tokens(tokenizer: Any, text: str) -> str:
    """Split control tokens by a blank, for retrieved passages that no user can edit."""
    tokens = control_tokens(tokenizer, len(tokenizer)).values()
    for token in (*tokens, *template_tokens(tokenizer)):
        word = token.strip()
        if word and word in text:
            text = text.replace(word, f"{word[0]} {word[1:]}")
    return text


# A fixed date, the default of Llama's templates: with today's date, a run that is
# continued tomorrow would ask its questions differently. It is spelled out because
# `strftime` writes in the language of the process.
_TODAY = "a=Fri A=Friday b=Jul B=July d=26 j=208 m=07 y=24 H=00 M=00 S=00 Y=2024"
_PARTS = ("replace('%{}', '{}')".format(*x.split("=")) for x in _TODAY.split())
# A macro before templates that call it (Granite's, gpt-oss's): they take only data.
_STRFTIME = (
    f"{{% macro strftime_now(f) %}}{{{{ f | {' | '.join(_PARTS)} }}}}{{% endmacro %}}"
)
# What templates get besides the messages, both here and on a server.
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
    n_trimmed: int  # characters that the template trimmed from the message's start


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after a time; only in the main thread, which gets signals."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it is not done after {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    # Raised each second, since Jinja goes on after an error in a constant expression.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # perhaps of a caller
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, is_open: bool
) -> str:
    """Return messages in the chat template, ready for a reply if `is_open`."""
    with _time_limit(seconds=10):  # far more than any sound template needs
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
    "use plain prompts (instead of messages=, question and context, or to score also "
    "prompt=; `beatrice data` without --chat)"
)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages in the model's chat template, up to where its reply begins.

    Thinking is switched off by options of templates (`TEMPLATE_FIELDS`), and by adding
    the words that precede past replies but not a new one (such as gpt-oss's channel).
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"the tokenizer has no chat template; {_PLAIN}, or use an "
            "instruction-tuned model"
        )
    n_characters = sum(len(str(message.get("content"))) for message in messages)
    try:
        text = _render(tokenizer, messages, is_open=True)
    # A template is a program of the checkpoint's authors, and may raise any error.
    except Exception as error:
        raise ValueError(
            f"the chat template fails ({type(error).__name__}: {str(error)[:200]}); "
            f"leave out any system message, {_PLAIN}, or mend tokenizer_config.json"
        ) from error
    if len(text) > 1_000_000 + 10 * n_characters:
        raise ValueError(
            f"the chat template writes {len(text)} characters for a message of "
            f"{n_characters}; {_PLAIN}"
        )
    before = _around_reply(tokenizer, str(tokenizer.chat_template))[0]
    # Thinking that the prompt opens is the model's to end; `render_message` refuses it.
    is_end = before.lstrip().startswith(tuple(end for _, end in THINKING))
    return text if is_end or not before.strip() else text + before


def usual_stop_id(
    tokenizer: Any, prompt: PromptConfig, stop_ids: Sequence[int]
) -> int | None:
    """Return the token with which a model usually ends its answers to such prompts.

    An answer after worked examples ends as theirs do; in a chat, as the template ends a
    turn; otherwise with one of `stop_ids`, if any are known.
    """
    usual = tokenizer.eos_token_id
    if prompt.usual_stop and not prompt.chat:
        # The next example's words affect how the end of an example is tokenised.
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
    """Return the control token that a chat template puts after a reply, or None."""
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
    """Return the tokens that end a text, from generation defaults or else the config.

    The chat template's end of turn is added if it is missing: fine-tuned models keep
    the config of their base, which ends its texts differently.
    """
    stop = defaults.eos_token_id
    stop = config.eos_token_id if stop is None else stop
    if stop is None:
        raise ValueError(
            f"{name} has no end-of-text token, so its answers would never end; add "
            "eos_token_id to its generation_config.json"
        )
    ids = (stop,) if isinstance(stop, int) else tuple(stop)
    end = end_of_turn(tokenizer)
    return ids if end is None or end in ids else (*ids, end)


@functools.lru_cache(maxsize=8)
def _around_reply(tokenizer: Any, chat_template: str) -> tuple[str, str]:
    """Return what a tokenizer's chat template writes before and after a reply.

    The part before starts where a prompt that is ready for a reply ends: white space
    that the model writes itself, or words that precede its answer.
    """
    mark = "BEATRICE-REPLY"
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": mark},
    ]
    with contextlib.suppress(Exception):  # a template may raise any error
        ready = _render(tokenizer, turns[:1], is_open=True)
        text = _render(tokenizer, turns, is_open=False)
        before, _, behind = text.partition(mark)
        return before.removeprefix(ready) if before.startswith(ready) else "", behind
    return "", ""


def render_message(tokenizer: Any, message: str, system: str = "") -> Rendered:
    """Return a user's message in the chat template, and where it lies in the text."""
    mark = "BEATRICE-MESSAGE"  # without white space, which many templates trim
    before = [{"role": "system", "content": system}] if system else []
    marked, text = (
        apply_template(tokenizer, [*before, {"role": "user", "content": content}])
        for content in (mark, message)
    )
    if system.strip() not in marked:
        raise ValueError(
            "the chat template leaves the system message out; put its text into the "
            "words around the question"
        )
    around = marked.split(mark)
    for shown in (message, message.strip(), message.rstrip(), message.lstrip()):
        if len(around) == 2 and text == around[0] + shown + around[1]:
            break
    else:
        raise ValueError(
            "the chat template changes the text of a message, so the context and the "
            "question cannot be found in it; use plain prompts"
        )
    for begin, end in THINKING:
        if around[1].count(begin) > around[1].count(end):
            raise ValueError(
                f"the chat template opens a thinking block ({begin}) although thinking "
                "is switched off, so the model's first words would not be an answer; "
                "use a model whose template can switch it off, or plain prompts"
            )
    start = len(around[0])
    return Rendered(text, start, start + len(shown), message.find(shown))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The ids the model reads and where the context lies in them."""

    ids: tuple[int, ...]  # special tokens included
    # `[start, stop)`; without a context, the empty span after the leading special
    # tokens, a chat's header and the worked examples.
    context_span: tuple[int, int]
    text: str = ""  # that the ids were made from, with the special tokens of a chat
    question_start: int | None = None  # of its span; None: where the context ends


# Ends of a prompt after which an answer begins without a blank: white space, an opening
# bracket or quote (a quote that closes in some languages, as in German, only after a
# blank or colon), and Chinese and Japanese, which unlike Korean have no blanks.
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


def encode_after(tokenizer: Any, prompt: Prompt, text: str) -> Encoded:
    """Return the ids of a text after a prompt, as the model would write them.

    Some tokenizers begin every text with a blank, which an answer must not have twice.
    So the text is tokenised together with the end of the prompt, or by itself if that
    would change the tokens of that end.
    """
    control = control_tokens(tokenizer, len(tokenizer)).get(prompt.ids[-1], "")
    at = prompt.text.rfind(control) if control else -1
    ends = [prompt.text[at:], "\n"]
    if at >= 0:  # the prompt ends with a control token; ones in the text stay text
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
            f"{lone.start()}, which is not valid text; decode the source as UTF-8"
        )


def token_span(
    offsets: Sequence[tuple[int, int]], characters: tuple[int, int], begin: int
) -> tuple[int, int]:
    """Return the tokens that overlap a range of characters.

    An empty range gives the empty span at the first token after character `begin`.
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
    """Return the prompt of one question; without passages it is closed-book.

    The tokenizer must be a fast one, which has offsets. A ValueError names a text that
    is empty, invalid or holds control tokens, or a fault of the chat template.
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
    """How answers are generated, always greedily."""

    max_new_tokens: int = 16
    tokens_per_batch: int = 16_384  # prompt and answer tokens, padding included
    stop: tuple[str, ...] = ()  # texts that end an answer, see `SamplingConfig`

    @property
    def greedy(self) -> SamplingConfig:
        """The settings of greedy decoding."""
        return SamplingConfig(max_new_tokens=self.max_new_tokens, stop=self.stop)


@dataclasses.dataclass(frozen=True)
class Request:
    """One answer to be generated."""

    example_id: str
    setting: Setting
    variant: Variant
    prompt: Prompt
    dropped: tuple[int, ...] = ()  # indices of passages left out of the prompt

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
                f"the server returned no token ids for question {self.example_id!r}; "
                "use vLLM with the dialect 'vllm' (return_token_ids), or answer on "
                "this machine"
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
        """Return a fast tokenizer, which has offsets."""

    @property
    def max_length(self) -> int | None:
        """Return the window in tokens, or None if the model has no limit."""

    @property
    def name(self) -> str:
        """Return the model's name, for messages."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenizerOnly:
    """A `PromptModel` without weights, for prompts that a server answers."""

    tokenizer: Any
    max_length: int | None = None
    name: str = "the model"


class UnaskedQuestion(Record, frozen=True):
    """A question that is not asked in one setting because none of its passages fits."""

    example_id: str
    setting: Setting
    variant: Variant
    n_tokens: int  # of the prompt with only its first passage
    room: int  # for a prompt, in tokens


@dataclasses.dataclass(frozen=True)
class Requests:
    """The answers to be generated, and the questions that are left out."""

    requests: list[Request]
    left_out: list[UnaskedQuestion]

    @property
    def note(self) -> str | None:
        """Return a sentence on what was left out, or None if nothing was."""
        n_dropped = [len(r.dropped) for r in self.requests if r.dropped]
        if not n_dropped and not self.left_out:
            return None
        return (
            f"prompts that lack passages which did not fit: {len(n_dropped)} of "
            f"{len(self.requests)} (passages: {sum(n_dropped)}, listed in `dropped` of "
            "each answer); prompts left out since not even one of their passages fits: "
            f"{len(self.left_out)}"
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
    """Return one request per setting and variant of every question.

    A prompt has to leave room for `max_new_tokens` in the window. One that does not is
    a ValueError, unless its last passages may be dropped; if not even one fits, the
    question is not asked, but listed in `left_out`. `places` names questions in errors.
    """
    limits = [n for n in (config.window, model.max_length) if n is not None]
    room = min(limits, default=math.inf) - max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in a window "
            f"of {min(limits)} tokens ({model.name}); allow fewer new tokens"
        )
    may_cut = config.overlong == "drop-passages"
    tokenizer, template = model.tokenizer, config.prompt_template()
    result, too_long = Requests([], []), []
    cells: Iterator[tuple[Example, Setting, Variant, tuple[Passage, ...]]] = (
        (example, setting, variant, passages)
        for setting in settings
        for example in examples
        for variant, passages in variants_of(setting, example)
    )
    for example, setting, variant, passages in cells:
        name = places[example.id] if places else f"question {example.id!r}"
        shown = list(passages)
        while True:
            try:
                prompt = build_prompt(tokenizer, template, example.question, shown)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            n_tokens = len(prompt.ids)
            if n_tokens <= room or not may_cut or len(shown) < 2:
                break
            shown.pop()
        key = example.id, setting, variant
        if n_tokens <= room:
            dropped = tuple(range(len(shown), len(passages)))
            result.requests.append(Request(*key, prompt, dropped))
        elif may_cut and passages:
            result.left_out.append(UnaskedQuestion(*key, n_tokens, int(room)))
        else:
            too_long.append((n_tokens, bool(passages), name))
    if too_long:
        n_tokens, has_passages, name = max(too_long)
        do = (
            "drop whole passages, which are listed and counted, with PromptConfig("
            "overlong='drop-passages') (`beatrice data --overlong drop-passages`), or "
            "give fewer or shorter passages"
            if has_passages
            else "even without passages these questions are too long, worked examples "
            "included: leave them out, or give another template (`beatrice data "
            "--template`)"
        )
        raise ValueError(
            f"prompts that do not fit: {len(too_long)}; the longest, {name}, has "
            f"{n_tokens} tokens, but besides an answer of {max_new_tokens} there is "
            f"room for only {room} in the window of {model.name}; {do}"
        )
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """The run's section `answer`: how questions are asked, and answered greedily."""

    # As requested; a run has those that its questions allow, see
    # `extract.run.contents.settings_of`.
    settings: tuple[Setting, ...] = SETTINGS
    prompt: PromptConfig = PromptConfig()  # how questions are put
    generation: GenerationConfig = GenerationConfig()  # limits of answers and batches


_SMALL = AnswerConfig(
    generation=GenerationConfig(max_new_tokens=10, tokens_per_batch=8192)
)
ANSWER_PRESETS: dict[Preset, AnswerConfig] = {
    **dict.fromkeys(("demo", "few", "smoke"), _SMALL),
    "paper": AnswerConfig(generation=GenerationConfig(max_new_tokens=32)),
}
