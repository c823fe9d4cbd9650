"""Which token spans an encoder sees: the axis of the span ablation.

A `[n_spans]` mask beside the family mask. A span that is left out is made empty in
every example, and an empty span pools to zeros: no shape changes, so that every choice
of spans trains in the executable of the full grid.
"""

import jax.numpy as jnp
import numpy as np

from jaxprobe.features.features import FamilyTokens


def keep_spans(features: FamilyTokens, span_mask: np.ndarray) -> FamilyTokens:
    """Leave out whole spans.

    Args:
      features: families apart.
      span_mask: `[n_spans]` bool, True where the span is read. Two spans closed-book
        (question, answer), three with context (context, question, answer).

    Returns:
      The same tokens; the masks of spans that are left out are all False.

    Raises:
      ValueError: not one flag for each span, or no span is left.
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
        mask if kept else jnp.zeros_like(mask)
        for mask, kept in zip(features.masks, span_mask, strict=True)
    )
    return FamilyTokens(features.tokens, masks)


def all_but(span: int, n_spans: int) -> np.ndarray:
    """Return the mask that leaves out one span, `[n_spans]` bool."""
    return np.arange(n_spans) != span
