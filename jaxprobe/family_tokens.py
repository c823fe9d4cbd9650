"""The families of a batch apart, as the encoders read them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.jaxprobe.families import FamilyDims, Features, Standardizer
from beatrice.jaxprobe.kernels.stored import StoredTokens, moved


class FamilyTokens(NamedTuple):
    """The same signals with the families apart, as the encoders read them.

    The spans lie one after another, so that a family is gathered and projected in one
    piece; tokens come before examples (see `jaxprobe.encoder` for the reason).

    Attributes:
      tokens: per family `[n_tokens, n_examples, d_family]`, where `n_tokens` is the sum
        of the spans' widths: float32, standardised, or as they are stored.
      masks: per span `[n_span_tokens, n_examples]` bool.
    """

    tokens: tuple[Any, ...]
    masks: tuple[Any, ...]

    @property
    def n_examples(self) -> int:
        """How many answers there are."""
        return self.masks[0].shape[1]

    @property
    def span_slices(self) -> tuple[slice, ...]:
        """Where each span lies among the `n_tokens` positions."""
        stops = np.cumsum([mask.shape[0] for mask in self.masks]).tolist()
        return tuple(
            slice(stop - mask.shape[0], stop)
            for stop, mask in zip(stops, self.masks, strict=True)
        )

    def of_examples(
        self, change: Callable[..., Any], *others: "FamilyTokens"
    ) -> "FamilyTokens":
        """Change all arrays, whose axis 1 is that of examples, along with others'."""

        def change_family(x: Any, *rest: Any) -> Any:
            if isinstance(x, StoredTokens):
                return x.of_examples(change, *rest)
            return change(x, *rest)

        tokens = map(change_family, self.tokens, *(other.tokens for other in others))
        masks = map(change, self.masks, *(other.masks for other in others))
        return FamilyTokens(tuple(tokens), tuple(masks))

    def take(self, rows: jax.Array) -> "FamilyTokens":
        """Select examples by index, `[n_rows]`."""
        take = partial(jnp.take, indices=rows, axis=1)
        return self.of_examples(partial(moved, take))


def standardize_span(
    tokens: jax.Array, mask: jax.Array, standardizer: Standardizer
) -> jax.Array:
    """Standardise one span of one example; padding rows become exactly zero.

    Args:
      tokens: `[n_span_tokens, d_total]`.
      mask: `[n_span_tokens]` bool.
      standardizer: fitted on training tokens.

    Returns:
      `[n_span_tokens, d_total]` float32.
    """
    mean, std = jnp.asarray(standardizer.mean), jnp.asarray(standardizer.std)
    # The compiler divides by what many rows share in this way; so does NumPy elsewhere.
    scaled = (tokens.astype(jnp.float32) - mean[None, :]) * (1.0 / std)[None, :]
    return jnp.where(mask[:, None], scaled, 0.0)


@partial(jax.jit, static_argnames="dims")
def split_families(
    features: Features, dims: FamilyDims, standardizer: Standardizer
) -> FamilyTokens:
    """Standardise and lay the families apart, one contiguous array for each.

    Apart, an encoder that does not read a family neither gathers nor multiplies it.
    Signals of a span that is not read are exactly zero, so that a store of the answer
    span alone and a live pass, which has all spans, give the same. No mask is needed: a
    span has signals in every example or in none, and a convolution of its own.
    """
    standardized = jax.vmap(standardize_span, in_axes=(0, 0, None))
    spans = []
    for span, mask in zip(features.tokens, features.masks, strict=True):
        values = standardized(span, mask, standardizer)
        for f in dims.of_answers if len(spans) < features.n_spans - 1 else ():
            values = values.at[..., dims.slices[f]].set(0.0)
        spans.append(values.transpose(1, 0, 2))
    tokens = jnp.concatenate(spans)
    return FamilyTokens(
        tuple(tokens[..., s] for s in dims.slices),
        tuple(jnp.asarray(mask).T for mask in features.masks),
    )


def keep_spans(features: FamilyTokens, span_mask: np.ndarray) -> FamilyTokens:
    """Leave out whole spans.

    Args:
      features: families apart.
      span_mask: `[n_spans]` bool, True where the span is read. Two spans closed-book
        (question, answer), three with context (context, question, answer).

    Returns:
      The same tokens; the masks of spans that are left out are all False.
    """
    span_mask = np.asarray(span_mask)
    if span_mask.dtype != bool or span_mask.shape != (len(features.masks),):
        raise ValueError(
            f"expected one boolean for each of {len(features.masks)} spans, got "
            f"{span_mask.dtype} {span_mask.shape}"
        )
    if not span_mask.any():
        raise ValueError("every span is left out: nothing remains to be read")
    masks = tuple(
        mask if is_read else jnp.zeros_like(mask)
        for mask, is_read in zip(features.masks, span_mask, strict=True)
    )
    return FamilyTokens(features.tokens, masks)


def zero_span(features: FamilyTokens, span: int) -> FamilyTokens:
    """Set one span's signals to zero; unlike `keep_spans` its tokens stay."""
    at = features.span_slices[span]

    def zero(x: Any) -> Any:
        if not isinstance(x, StoredTokens):
            return jnp.asarray(x).at[at].set(0.0)
        is_kept = jnp.ones(x.shape[0], bool) if x.is_kept is None else x.is_kept
        return x._replace(is_kept=is_kept.at[at].set(False))

    return FamilyTokens(tuple(map(zero, features.tokens)), features.masks)


def all_but(span: int, n_spans: int) -> np.ndarray:
    """Return the mask that leaves out one span, `[n_spans]` bool."""
    return np.arange(n_spans) != span
