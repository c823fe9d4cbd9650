"""Units of work: the ranges that one worker reads together.

Ranges are what is committed. A range is as small as its files: with every layer of a
wide model it holds a single example, and so would batches inside it. A unit is several
consecutive ranges, so that batches of the token budget can be filled, with examples of
similar length.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from extract.store.family import Family
from extract.store.spec import StoreSpec

_BATCHES_PER_UNIT = 16
_WANTED_UNITS = 16
_UNIT_BYTES = 8 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """What one worker reads without looking up: some ranges and their batches.

    Attributes:
      ranges: consecutive; each is committed by itself.
      batches: of example indices; every example of the ranges once.
    """

    ranges: range
    batches: tuple[tuple[int, ...], ...]


def bytes_per_token(
    families: Mapping[str, Family], n_tokens: int, n_answer: int | None
) -> list[int]:
    """Return each family's bytes per token, whether or not that token has a row."""
    n_kept = {"all": n_tokens, "answer": n_tokens if n_answer is None else n_answer}
    return [
        family.row_bytes * n_kept[family.spans] // n_tokens
        for family in families.values()
    ]


def tokens_per_unit(
    lengths: np.ndarray,
    families: Mapping[str, Family],
    tokens_per_batch: int,
    n_answer: int | None = None,
) -> int:
    """Choose the tokens of a unit, from the answers alone.

    Sixteen batches' worth: sorted by length, they waste a few percent on padding. But
    few enough for 16 units (of at least one batch), so that workers share the load
    and an interruption costs little; and at most 8 GiB as they are stored, which
    wait in the host's memory, see `extract.signals.extraction.run_plan`.

    Args:
      lengths: `[n_examples]` tokens.
      families: what is stored.
      tokens_per_batch: the budget of a batch.
      n_answer: as in `extract.signals.plan.n_rows_of`.
    """
    n_tokens = int(lengths.sum())
    shared = max(tokens_per_batch, n_tokens // _WANTED_UNITS)
    held = sum(bytes_per_token(families, n_tokens, n_answer))
    return min(
        _BATCHES_PER_UNIT * tokens_per_batch, shared, _UNIT_BYTES // max(1, held)
    )


def unit_edges(spec: StoreSpec, n_tokens: int) -> list[int]:
    """Join consecutive ranges up to so many tokens; at least one range each."""
    rows = np.diff(spec.offsets[spec.range_examples]).tolist()
    edges, used = [0], 0
    for range_id, n_rows in enumerate(rows):
        if range_id > edges[-1] and used + n_rows > n_tokens:
            edges.append(range_id)
            used = 0
        used += n_rows
    return [*edges, spec.n_ranges]


def _batches(
    lengths: np.ndarray, examples: range, tokens_per_batch: int
) -> tuple[tuple[int, ...], ...]:
    """Group one unit's examples by length, padding included in the budget."""
    order = sorted(examples, key=lambda example: (-lengths[example], example))
    batches: list[list[int]] = []
    for example in order:
        # The first of a batch is its longest, so it sets the padded width.
        is_full = not batches or (
            (len(batches[-1]) + 1) * lengths[batches[-1][0]] > tokens_per_batch
        )
        if is_full:
            batches.append([])
        batches[-1].append(example)
    return tuple(map(tuple, batches))


def make_units(
    spec: StoreSpec, edges: Sequence[int], tokens_per_batch: int
) -> tuple[Unit, ...]:
    """Return the units between edges, with their batches."""
    units = []
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        examples = range(*spec.range_examples[[first, last]].tolist())
        batches = _batches(spec.lengths, examples, tokens_per_batch)
        units.append(Unit(ranges=range(first, last), batches=batches))
    return tuple(units)
