"""What a run asks its model: every setting and variant of every question, as prompts.

A prompt that does not fit the model's window is refused before anything is generated,
or, if that is asked for, its last passages are left out whole. Each answer says which;
a question of which no passage fits is not asked with context, but listed.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from beatrice.extract.generate.prompts import (
    Prompt,
    PromptConfig,
    PromptTemplate,
    build_prompt,
)
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

if TYPE_CHECKING:
    from beatrice.extract.generate.generator import Generated


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers are generated; always greedily."""

    max_new_tokens: int = 16
    tokens_per_batch: int = 16_384  # prompt and answer tokens, padding included
    stop: tuple[str, ...] = ()  # texts that end an answer, see `SamplingConfig`


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

    def answer(self, reply: "Generated") -> Answer:
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
) -> Requests:
    """Return what has to be answered: every setting and variant of every question.

    The longest answer, of `max_new_tokens`, has to fit into the window too: prompts
    that do not are a ValueError, unless passages may and can be left out.
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
        prompt = _prompt(model, template, example, passages)
        while len(prompt.ids) > room and may_cut and n_passages > 1:
            n_passages -= 1
            prompt = _prompt(model, template, example, passages[:n_passages])
        n_tokens = len(prompt.ids)
        if n_tokens <= room:
            dropped = tuple(range(n_passages, len(passages)))
            result.requests.append(
                Request(example.id, setting, variant, prompt, dropped)
            )
        elif may_cut and passages:
            result.left_out.append(
                LeftOut(example.id, setting, variant, n_tokens, int(room))
            )
        else:
            too_long.append((n_tokens, example.id))
    if too_long:
        n_tokens, example_id = max(too_long)
        raise ValueError(
            f"{len(too_long)} prompts do not fit: the longest, question "
            f"{example_id!r}, has {n_tokens} tokens, and beside an answer of "
            f"{max_new_tokens} there is room for {room} in the window of "
            f"{model.name}; make the run with --overlong drop-passages (whole "
            "passages, listed and counted), or with fewer or shorter passages"
        )
    return result


def _prompt(
    model: PromptModel,
    template: PromptTemplate,
    example: Example,
    passages: Sequence[Passage],
) -> Prompt:
    try:
        return build_prompt(model.tokenizer, template, example.question, passages)
    except ValueError as error:
        raise ValueError(f"question {example.id!r}: {error}") from None


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
    "demo": _SMALL,
    "few": _SMALL,
    "smoke": _SMALL,
    "paper": AnswerConfig(
        generation=GenerationConfig(max_new_tokens=32, tokens_per_batch=16_384)
    ),
}
