"""The fifteen non-empty subsets of the four signal families, in one fixed order.

The order is that of a binary counter with the first family as its lowest bit:
H, P, HP, R, HR, PR, HPR, A, HA, PA, HPA, RA, HRA, PRA, HPRA. Row `i` of `SUBSETS` reads
family `f` exactly when bit `f` of `i + 1` is set.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np

FAMILIES = ("hidden", "prob", "resid", "attn")
N_FAMILIES = len(FAMILIES)
LETTERS = "HPRA"
FLOATS = ("float32",) * N_FAMILIES  # types of the families, widened
N_SUBSETS = 2**N_FAMILIES - 1

SUBSETS: np.ndarray = (
    (np.arange(1, N_SUBSETS + 1)[:, None] >> np.arange(N_FAMILIES)[None, :]) & 1
).astype(bool)
"""`[15, 4]` bool, True where the subset (row) reads the family (column)."""


def subset_name(family_mask: Iterable[bool]) -> str:
    """Name a subset by its letters, as in "HPA"."""
    return "".join(
        letter for letter, on in zip(LETTERS, family_mask, strict=True) if on
    )


SUBSET_NAMES: tuple[str, ...] = tuple(subset_name(row) for row in SUBSETS)


def subset_index(name: str) -> int:
    """Row of a subset given its letters in any order.

    Raises:
      ValueError: if a letter is unknown, repeated, or there is none.
    """
    if not name or len(set(name)) != len(name) or not set(name) <= set(LETTERS):
        raise ValueError(
            f"unknown subset {name!r}: expected distinct letters of {LETTERS} for "
            f"{', '.join(FAMILIES)}"
        )
    return sum(1 << LETTERS.index(letter) for letter in name) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDims:
    """Channels of each family, in the order in which they lie in a token's vector.

    Attributes:
      hidden_spans: spans whose hidden states are read, all or the answer's alone.
    """

    hidden: int
    prob: int
    resid: int
    attn: int
    hidden_spans: Literal["all", "answer"] = "all"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels per family, `[n_families]`."""
        return (self.hidden, self.prob, self.resid, self.attn)

    @property
    def total(self) -> int:
        """Channels of a whole token vector, `d_total`."""
        return sum(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where each family lies within `d_total`."""
        stops = np.cumsum(self.sizes).tolist()
        return tuple(
            slice(stop - size, stop)
            for stop, size in zip(stops, self.sizes, strict=True)
        )
