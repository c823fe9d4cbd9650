"""What is asked of a model, and which requests are answered together; without Torch."""

import dataclasses
from collections.abc import Sequence

from extract.generate.prompts import Prompt
from extract.records import Setting, Variant


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
