"""The longest sequence a model reads the same way at every length."""

from typing import Any


def _switches(rope: Any) -> list[int]:
    """Return the lengths at which a config's rotary positions change, if they do."""
    if not isinstance(rope, dict):
        return []
    if rope.get("rope_type") == "longrope":
        return [int(rope["original_max_position_embeddings"])]
    return [n for part in rope.values() for n in _switches(part)]  # one per layer type


def window_of(config: Any) -> int | None:
    """Return the longest sequence in tokens, or None where there is no limit.

    Longrope (Phi-3's long models) has two sets of frequencies, and Transformers takes
    the long one for a whole batch as soon as its longest sequence is longer than
    `original_max_position_embeddings`: what is read of a short example would depend on
    its company, and a text would be generated with one set and read with the other. So
    the window ends where the short set does. Rotary scaling called dynamic changes
    only beyond `max_position_embeddings`, where nothing is read.

    Args:
      config: a text model's, as Transformers completes it.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += _switches(getattr(config, "rope_parameters", None))
    known = [n for n in limits if n is not None]
    return min(known) if known else None
