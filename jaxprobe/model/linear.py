"""The linear part of an encoder: a regression on pooled signals.

Of the answer span the mean, the least and the largest value of each channel are read,
of every other span the mean. An encoder that has a linear part keeps it in a collection
of its own beside the network's weights, so that no training step touches it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprobe.features.families import FamilyTokens
from jaxprobe.kernels.stored import values_of

COLLECTION = "linear"


class LinearPart(NamedTuple):
    """Weights on pooled signals.

    Attributes:
      kernels: per family `[n_parts * d_family]` float32; zero where it is not read.
      bias: scalar float32.
    """

    kernels: tuple[Any, ...]
    bias: Any

    @classmethod
    def of(cls, collection: Mapping[str, Any]) -> "LinearPart":
        """Return what `variables` laid down."""
        n_families = len(collection) - 1
        kernels = (collection[f"kernel_{f}"] for f in range(n_families))
        return cls(tuple(kernels), collection["bias"])

    def variables(self) -> dict[str, Any]:
        """Return the part as a collection of an encoder's variables."""
        named = {f"kernel_{f}": kernel for f, kernel in enumerate(self.kernels)}
        return {COLLECTION: {**named, "bias": self.bias}}


def pooled_signals(features: FamilyTokens) -> tuple[jax.Array, ...]:
    """Pool every family over the spans.

    Args:
      features: standardised signals, families apart; the answer is the last span.

    Returns:
      Per family `[n_parts * d_family, n_examples]`: mean, least and largest of the
      answer, then the mean of each other span; zeros where a span is empty.
    """
    return tuple(_pooled(values_of(family), features) for family in features.tokens)


def _pooled(tokens: jax.Array, features: FamilyTokens) -> jax.Array:
    means, extremes = [], []
    for mask, at in zip(features.masks, features.span_slices, strict=True):
        own, is_real = tokens[at], mask[..., None]
        count = jnp.maximum(mask.sum(axis=0, dtype=own.dtype), 1.0)[:, None]
        means.append(jnp.where(is_real, own, 0.0).sum(axis=0) / count)
    own, is_real = tokens[features.span_slices[-1]], features.masks[-1][..., None]
    is_empty = ~features.masks[-1].any(axis=0)[:, None]
    for sign in (-1.0, 1.0):
        most = jnp.where(is_real, sign * own, -jnp.inf).max(axis=0, initial=-jnp.inf)
        extremes.append(jnp.where(is_empty, 0.0, sign * most))
    return jnp.concatenate([means[-1], *extremes, *means[:-1]], axis=1).T


def linear_logits(part: LinearPart, pooled: tuple[jax.Array, ...]) -> jax.Array:
    """Return the logits of pooled signals, `[n_examples]`."""
    products = (k @ x for k, x in zip(part.kernels, pooled, strict=True))
    return sum(products, start=jnp.asarray(part.bias))
