"""What texts a stage would ask a model for, counted instead of asked.

The stage itself decides what it would ask and what it has already, so a dry run cannot
forecast anything else than the stage would do.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from extract.generate.generator import (
    Generated,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
)
from extract.run.stages import Forecast

if TYPE_CHECKING:
    from extract.backbone.loading import Backbone


class Counted(Exception):
    """Carries the forecast out of the stage that would have asked."""

    def __init__(self, forecast: Forecast) -> None:
        """Take the forecast."""
        super().__init__(forecast.as_text())
        self.forecast = forecast


def forecast_requests(
    stage: str,
    prompts: Sequence[GeneratorPrompt],
    config: SamplingConfig,
    *,
    generator: Generator | None = None,
    model_bytes: int | None = None,
) -> Forecast:
    """Return what texts would need.

    Args:
      stage: whose forecast it is.
      prompts: what a model would be asked.
      config: how.
      generator: counts the tokens of prompts without ids; a server's may not.
      model_bytes: what the model needs, or None.
    """
    counts = [
        len(prompt.ids)
        if prompt.ids is not None
        else generator and generator.count_tokens(prompt)
        for prompt in prompts
    ]
    is_known = None not in counts
    return Forecast(
        stage=stage,
        n_rows=len(prompts),
        n_requests=len(prompts),
        n_prompt_tokens=sum(n or 0 for n in counts) if is_known else None,
        n_new_tokens=len(prompts) * config.max_new_tokens,
        model_bytes=model_bytes,
        basis=(
            "what is there already is not counted; retries are not foreseen"
            if is_known
            else "the server does not count prompt tokens; retries are not foreseen"
        ),
    )


class CountingGenerator:
    """Plays a generator's role until it is asked for texts; then counts them.

    Everything but its texts is the generator's own.

    Args:
      generator: whose identity and tokens these are.
      stage: whose forecast it is.
    """

    def __init__(self, generator: Generator, stage: str) -> None:
        """Stand in for a generator."""
        self._generator = generator
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        """Return the generator's own identity, window or count of tokens."""
        return getattr(self._generator, name)

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Raise the forecast of what is not done.

        Raises:
          Counted: always.
        """
        todo = [prompt for i, prompt in enumerate(prompts) if i not in done]
        raise Counted(
            forecast_requests(self._stage, todo, config, generator=self._generator)
        )


def weight_bytes(backbone: "Backbone") -> int:
    """Return the bytes of the weights; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in backbone.model.parameters())


def cache_bytes(backbone: "Backbone", n_tokens: int) -> int:
    """Return the bytes of the keys and values of so many tokens, at most.

    Where layers differ (Gemma 4), all count as the largest.
    """
    from extract.backbone.checkpoint import layer_values

    config, n_heads = backbone.model.config.get_text_config(), backbone.n_heads
    n_kv = max(layer_values(config, "num_key_value_heads"), default=n_heads)
    d_head = max(layer_values(config, "head_dim"), default=backbone.d_model // n_heads)
    per_token = 2 * len(backbone.attention_layers) * n_kv * d_head
    return n_tokens * per_token * backbone.dtype.itemsize


def generation_bytes(backbone: "Backbone", tokens_per_batch: int) -> int:
    """Return the bytes of weights and cache of the largest batch.

    Activations and what the framework keeps for itself come on top.
    """
    return weight_bytes(backbone) + cache_bytes(backbone, tokens_per_batch)
