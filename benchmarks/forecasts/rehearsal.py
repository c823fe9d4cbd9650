"""A backend that is asked everything, does ten rows, and says what all would cost.

The stage itself decides what it would ask and what it has already, so a dry run cannot
forecast anything else than the stage would do.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.stages.forecast import N_PROBED, Forecast
from extract.generate.generator import (
    Generated,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
)

_BYTES_PER_ID = 7  # of a token id in JSON, with its comma
_BYTES_PER_ROW = 260  # of a stored text: key, names of fields, counts
_BYTES_PER_LOG_PROB = 22


class Rehearsed(Exception):
    """Carries the forecast out of the stage that was rehearsed."""

    def __init__(self, forecast: Forecast) -> None:
        """Take the forecast."""
        super().__init__(forecast.as_text())
        self.forecast = forecast


def spread(sizes: Sequence[int], n: int) -> list[int]:
    """Return up to `n` indices whose sizes are spread evenly over all."""
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    if len(order) <= n:
        return order
    return [order[(2 * k + 1) * len(order) // (2 * n)] for k in range(n)]


class Rehearsal:
    """Plays a generator's role until it is asked for texts; then forecasts them.

    Args:
      generator: does the probe.
      stage: whose forecast it is.
      load_seconds: that loading it took.
      gpu_bytes: what it needs, or None.
    """

    def __init__(
        self,
        generator: Generator,
        stage: str,
        *,
        load_seconds: float = 0.0,
        gpu_bytes: int | None = None,
    ) -> None:
        """Stand in for a generator."""
        self._generator = generator
        self._stage = stage
        self._load_seconds = load_seconds
        self._gpu_bytes = gpu_bytes

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return the generator's own."""
        return self._generator.identity

    @property
    def max_length(self) -> int | None:
        """Return the generator's own."""
        return self._generator.max_length

    def count_tokens(self, prompt: GeneratorPrompt) -> int | None:
        """Return the generator's own count."""
        return self._generator.count_tokens(prompt)

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Raise the forecast of what is not done.

        Raises:
          Rehearsed: always.
        """
        todo = [prompt for i, prompt in enumerate(prompts) if i not in done]
        raise Rehearsed(self.forecast(todo, config))

    def forecast(
        self, prompts: Sequence[GeneratorPrompt], config: SamplingConfig
    ) -> Forecast:
        """Return what these texts would need, after doing ten of them."""
        sizes = [_size(prompt) for prompt in prompts]
        probed = [prompts[i] for i in spread(sizes, N_PROBED)]
        # One first, untimed: a first call allocates and compiles what later ones use.
        list(self._generator.stream(probed[:1], config))
        began = time.monotonic()
        found = [reply for _, reply in self._generator.stream(probed, config)]
        seconds = time.monotonic() - began
        n_prompt, how = self._prompt_tokens(prompts, probed, found)
        most_new = config.max_new_tokens
        # Reading and writing both count: a batch writes as long as its longest text.
        work = sum(sizes) / max(1, sum(map(_size, probed)))
        return Forecast(
            stage=self._stage,
            n_rows=len(prompts),
            n_requests=len(prompts),
            n_prompt_tokens=n_prompt,
            n_new_tokens=len(prompts) * most_new,
            gpu_bytes=self._gpu_bytes,
            disk_bytes=len(prompts)
            * (_BYTES_PER_ROW + most_new * (_BYTES_PER_ID + _BYTES_PER_LOG_PROB + 6)),
            seconds=self._load_seconds + seconds * work,
            basis=(
                f"time from {len(probed)} rows in {seconds:.2f} s (after one to warm "
                "up), scaled by the "
                f"length of the prompts, and {self._load_seconds:.1f} s of loading; "
                f"{how}"
            ),
        )

    def _prompt_tokens(
        self,
        prompts: Sequence[GeneratorPrompt],
        probed: Sequence[GeneratorPrompt],
        found: Sequence[Generated],
    ) -> tuple[int | None, str]:
        """Return how many tokens the model reads, and how that is known."""
        counts = [self.count_tokens(prompt) for prompt in prompts]
        if None not in counts:
            return sum(n or 0 for n in counts), "prompt tokens are counted"
        said = [reply.n_prompt_tokens for reply in found]
        if not said or None in said:
            return None, "the server tells no numbers of tokens"
        per_character = sum(n or 0 for n in said) / max(1, sum(map(_size, probed)))
        n_tokens = round(sum(map(_size, prompts)) * per_character)
        return n_tokens, "prompt tokens from the server's count of the probe"


def _size(prompt: GeneratorPrompt) -> int:
    """Return what a prompt's share of the work is measured by."""
    return len(prompt.text) if prompt.ids is None else len(prompt.ids)
