"""What a run asks its model: every setting and variant of every question, as prompts.

A prompt that does not fit the model's window is refused before anything is generated,
or, if that is asked for, its last passages are left out whole. Which ones went stands
in the answer; a question of which no passage fits is not asked with context, but
listed.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, get_args

from extract.generate.prompts import (
    TEMPLATES,
    Prompt,
    PromptTemplate,
    TemplateName,
    build_prompt,
)
from extract.records import SETTINGS, Example, Passage, Setting, Variant
from extract.run.directory import RunDir
from extract.run.manifest import Preset


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers are generated; always greedily."""

    max_new_tokens: int = 16
    tokens_per_batch: int = 16_384  # prompt and answer tokens, padding included


@dataclasses.dataclass(frozen=True)
class Request:
    """One answer to be generated.

    Attributes:
      dropped: places of the passages that are not in the prompt, see `Answer`.
    """

    example_id: str
    setting: Setting
    variant: Variant
    prompt: Prompt
    dropped: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies the answer: example, setting, variant."""
        return (self.example_id, self.setting, self.variant)


def plan_batches(
    lengths: Sequence[int], config: GenerationConfig
) -> list[tuple[int, ...]]:
    """Return batches of request indices, by length, within the token budget.

    The plan depends on the lengths alone: a run that was killed makes the same
    batches again, so that its sums are rounded the same way.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for i in order:
        width = lengths[i] + config.max_new_tokens
        if current and (len(current) + 1) * width > config.tokens_per_batch:
            batches.append(tuple(current))
            current = []
        current.append(i)
    if current:
        batches.append(tuple(current))
    return batches


Overlong = Literal["refuse", "drop-passages"]


class PromptModel(Protocol):
    """What a prompt is made for: a loaded backbone, or a tokenizer with its window."""

    tokenizer: Any
    max_length: int | None
    name: str


@dataclasses.dataclass(frozen=True)
class TokenizerOnly:
    """A tokenizer alone, where requests are made and a server does the rest.

    Attributes:
      max_length: the model's window in tokens, or None where it sets no limit.
      name: of the model, for messages.
    """

    tokenizer: Any
    max_length: int | None = None
    name: str = "the model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """How questions are put.

    Attributes:
      template: the words around question and context.
      chat: send them through the tokenizer's chat template, thinking switched off.
      overlong: what happens to a prompt that does not fit.
      window: most tokens of prompt and answer together; None for the model's own.
    """

    template: TemplateName = "short"
    chat: bool = False
    overlong: Overlong = "refuse"
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse choices there are not.

        Raises:
          ValueError: names the field.
        """
        for name, allowed in (
            ("template", get_args(TemplateName)),
            ("overlong", get_args(Overlong)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: expected one of {', '.join(allowed)}, found "
                    f"{getattr(self, name)!r}"
                )
        if self.window is not None and self.window < 2:
            raise ValueError(f"window: expected at least 2 tokens, found {self.window}")

    def prompt_template(self) -> PromptTemplate:
        """Return the words around question and context."""
        return dataclasses.replace(TEMPLATES[self.template], chat=self.chat)

    def room(self, max_length: int | None, max_new_tokens: int) -> int | None:
        """Return the longest prompt in tokens, or None where there is no limit."""
        limits = [n for n in (self.window, max_length) if n is not None]
        return min(limits) - max_new_tokens if limits else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A question that is not asked in one setting, since no passage of it fits.

    Attributes:
      n_tokens: of the prompt with its first passage alone.
      room: of the longest prompt.
    """

    example_id: str
    setting: Setting
    variant: Variant
    n_tokens: int
    room: int


@dataclasses.dataclass(frozen=True)
class Requests:
    """What is asked, and what is not."""

    requests: list[Request]
    left_out: list[LeftOut]

    @property
    def n_cut(self) -> int:
        """Return how many prompts lack a passage."""
        return sum(bool(request.dropped) for request in self.requests)

    @property
    def note(self) -> str | None:
        """Say in words what was cut, or None if nothing was."""
        if not self.n_cut and not self.left_out:
            return None
        n_passages = sum(len(request.dropped) for request in self.requests)
        return (
            f"{self.n_cut} of {len(self.requests)} prompts lack passages that did not "
            f"fit ({n_passages} in all; `dropped` of each answer says which), "
            f"{len(self.left_out)} questions are not asked with context since not even "
            "one passage fits"
        )

    def left_out_lines(self) -> str:
        """Return what is not asked as JSON lines."""
        return "".join(
            json.dumps(dataclasses.asdict(one)) + "\n" for one in self.left_out
        )


def variants_of(
    setting: Setting, example: Example
) -> list[tuple[Variant, list[Passage]]]:
    """Return the variants of one question in one setting, with their passages."""
    if setting == "closed_book":
        return [("original", [])]
    variants: list[tuple[Variant, list[Passage]]] = []
    if example.passages:
        variants.append(("original", list(example.passages)))
    if example.rewritten:
        variants.append(("rewritten", list(example.rewritten)))
    return variants


def _fitting(
    build: Any, passages: Sequence[Passage], room: int | None
) -> tuple[Prompt, tuple[int, ...]]:
    """Return the prompt without its last passages, as many as must go; one stays."""
    prompt = build(passages)
    kept = len(passages)
    while room is not None and len(prompt.ids) > room and kept > 1:
        kept -= 1
        prompt = build(passages[:kept])
    return prompt, tuple(range(kept, len(passages)))


def make_requests(
    examples: Iterable[Example],
    speaker: PromptModel,
    config: PromptConfig,
    max_new_tokens: int,
) -> Requests:
    """Return what has to be answered: every setting and variant of every question.

    Args:
      examples: the questions.
      speaker: gives the tokenizer and the window.
      config: how they are put.
      max_new_tokens: longest answer, which has to fit too.

    Raises:
      ValueError: prompts do not fit, and passages must not or cannot be left out; or
        a text is none.
    """
    template, asked = config.prompt_template(), Requests([], [])
    room = config.room(speaker.max_length, max_new_tokens)
    too_long: list[tuple[int, str]] = []
    may_cut = config.overlong == "drop-passages"
    for setting in SETTINGS:
        for example in examples:
            for variant, passages in variants_of(setting, example):

                def build(kept: Sequence[Passage], example: Example = example):
                    return _prompt(speaker, template, example, kept)

                prompt, dropped = _fitting(build, passages, room if may_cut else None)
                n_tokens = len(prompt.ids)
                if room is None or n_tokens <= room:
                    made = Request(example.id, setting, variant, prompt, dropped)
                    asked.requests.append(made)
                elif may_cut and passages:
                    asked.left_out.append(
                        LeftOut(
                            example_id=example.id,
                            setting=setting,
                            variant=variant,
                            n_tokens=n_tokens,
                            room=room,
                        )
                    )
                else:
                    too_long.append((n_tokens, example.id))
    if too_long:
        raise _does_not_fit(too_long, speaker, max_new_tokens, room or 0)
    return asked


def _prompt(
    speaker: PromptModel,
    template: PromptTemplate,
    example: Example,
    passages: Sequence[Passage],
) -> Prompt:
    """Return one prompt; a text that is none is named with its question."""
    try:
        return build_prompt(speaker.tokenizer, template, example.question, passages)
    except ValueError as error:
        raise ValueError(f"question {example.id!r}: {error}") from None


def _does_not_fit(
    too_long: Sequence[tuple[int, str]], speaker: PromptModel, n_new: int, room: int
) -> ValueError:
    """Say how many prompts do not fit, and what can be done."""
    n_tokens, longest = max(too_long)
    return ValueError(
        f"{len(too_long)} prompts do not fit: the longest, question {longest!r}, has "
        f"{n_tokens} tokens, and beside an answer of {n_new} there is room for {room} "
        f"in the window of {speaker.name}; make the run with --overlong drop-passages "
        "(whole passages, listed and counted), or with fewer or shorter passages"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """The run's section `answer`: how questions are put, and answered greedily."""

    prompt: PromptConfig = PromptConfig()
    generation: GenerationConfig = GenerationConfig()


_SMALL = AnswerConfig(
    generation=GenerationConfig(max_new_tokens=10, tokens_per_batch=8192)
)
ANSWER_PRESETS: dict[Preset, AnswerConfig] = {
    "demo": _SMALL,
    "smoke": _SMALL,
    "paper": AnswerConfig(
        generation=GenerationConfig(max_new_tokens=32, tokens_per_batch=16_384)
    ),
}


def answer_config(run: RunDir, *, is_recorded: bool = True) -> AnswerConfig:
    """Return how a run's questions are put; a dry run settles nothing."""
    return run.settle("answer", ANSWER_PRESETS, is_recorded=is_recorded)
