"""Rows of similar length together, so that padding costs little.

Spans are padded to the longest of their group. One passage of a thousand tokens among
hundreds of a hundred would make every row a thousand tokens long.
"""

from collections.abc import Sequence

import numpy as np

_WORTH = 1.5  # padded tokens of one group, over those of several, from which they pay
_MOST_GROUPS = 4  # each is a shape of its own, to be compiled


def width_groups(lengths: np.ndarray, n_batch: int) -> list[np.ndarray]:
    """Part rows by length, where that spares at least a third of the padded tokens.

    The longest rows are a batch of their own, the next two batches, the next four; the
    rest is one group. A group's batches are then hardly ever filled up with nothing.

    Args:
      lengths: `[n_rows, n_spans]` tokens.
      n_batch: rows of a batch.

    Returns:
      Positions of rows, ascending within each group, shortest group first; all of them
      in one group where the rows are alike.
    """
    n_rows = len(lengths)
    order = np.argsort(lengths.sum(axis=1), kind="stable")
    sizes = [n_batch << i for i in range(_MOST_GROUPS - 1)]
    edges = np.cumsum(sizes)
    cuts = n_rows - edges[edges < n_rows][::-1]
    groups = [np.sort(part) for part in np.split(order, cuts)]
    padded = sum(len(part) * _width(lengths[part]) for part in groups)
    if n_rows * _width(lengths) < _WORTH * padded:
        return [np.arange(n_rows)]
    return groups


def widths_of(lengths: np.ndarray) -> tuple[int, ...]:
    """Return the padded length of each span, at least one token.

    Args:
      lengths: `[n_rows, n_spans]` tokens.
    """
    longest: Sequence[int] = lengths.max(axis=0).tolist()
    return tuple(max(1, n) for n in longest)


def _width(lengths: np.ndarray) -> int:
    """Return the padded tokens of a row of a group."""
    return sum(widths_of(lengths))
