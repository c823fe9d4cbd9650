"""Families of signals, and their non-empty subsets in one fixed order.

Subset number k reads family f exactly when bit f of k + 1 is set, whatever the number
of families. So the order is that of a binary counter with the first family as its
lowest bit. For the paper's four families: H, P, HP, R, HR, PR, HPR, A, HA, PA, HPA, RA,
HRA, PRA, HPRA.
"""

import dataclasses
import functools
import string
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from beatrice.extract.store.families import Dtype, Spans

MOST_FAMILIES = 8  # 255 encoders a seed


@functools.lru_cache
def subset_masks(n_families: int) -> np.ndarray:
    """Return `[n_subsets, n_families]` bool, True where a subset reads a family."""
    numbers = np.arange(1, 2**n_families)
    return ((numbers[:, None] >> np.arange(n_families)[None, :]) & 1).astype(bool)


def letters_of(names: Sequence[str]) -> str:
    """Return one letter a family, which names of subsets are made of.

    They are the initials as capitals, such as "HPRA" of the paper's families; where
    these are not distinct letters, A, B, C and so on.
    """
    initials = "".join(name[:1].upper() for name in names)
    is_clear = set(initials) <= set(string.ascii_uppercase)
    if is_clear and len(set(initials)) == len(names):
        return initials
    return string.ascii_uppercase[: len(names)]


FAMILIES = ("hidden", "prob", "resid", "attn")  # the paper's
N_FAMILIES, LETTERS = len(FAMILIES), letters_of(FAMILIES)
SUBSETS = subset_masks(N_FAMILIES)
N_SUBSETS = len(SUBSETS)
FLOATS: tuple[Dtype, ...] = ("float32",) * N_FAMILIES  # their types, widened


def subset_name(family_mask: Iterable[bool], letters: str = LETTERS) -> str:
    """Name a subset by its letters, as in "HPA"."""
    return "".join(
        letter for letter, on in zip(letters, family_mask, strict=True) if on
    )


SUBSET_NAMES: tuple[str, ...] = tuple(subset_name(row) for row in SUBSETS)


def subset_index(name: str, letters: str = LETTERS) -> int:
    """Return the number of a subset given its letters in any order.

    Raises:
      ValueError: if a letter is unknown, repeated, or there is none.
    """
    if not name or len(set(name)) != len(name) or not set(name) <= set(letters):
        raise ValueError(
            f"unknown subset {name!r}: expected distinct ones of {letters}"
        )
    return sum(1 << letters.index(letter) for letter in name) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDims:
    """Families and their channels, in the order in which they lie in a token's vector.

    Attributes:
      names: of the families.
      sizes: channels of each.
      spans: of which each has signals: all, or the answer alone. Empty is all.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    spans: tuple[Spans, ...] = ()

    def __post_init__(self) -> None:
        """Check that the families are distinct, and that each has one of everything."""
        spans = self.spans or ("all",) * len(self.names)
        object.__setattr__(self, "spans", tuple(spans))
        n = len(self.names)
        if not 1 <= n <= MOST_FAMILIES or len(set(self.names)) != n:
            raise ValueError(
                f"expected 1 to {MOST_FAMILIES} families of distinct names, got "
                f"{', '.join(self.names) or 'none'}"
            )
        if len(self.sizes) != n or len(self.spans) != n:
            raise ValueError(
                f"{n} families have {len(self.sizes)} sizes and {len(self.spans)} "
                "choices of spans; give one of each a family"
            )

    @property
    def n_families(self) -> int:
        """How many families there are."""
        return len(self.names)

    @property
    def n_subsets(self) -> int:
        """How many encoders a seed has."""
        return 2**self.n_families - 1

    @property
    def letters(self) -> str:
        """One letter a family, see `letters_of`."""
        return letters_of(self.names)

    @property
    def subset_masks(self) -> np.ndarray:
        """`[n_subsets, n_families]` bool."""
        return subset_masks(self.n_families)

    @property
    def subset_names(self) -> tuple[str, ...]:
        """Names of all subsets, as in "HPA", in order."""
        return tuple(subset_name(row, self.letters) for row in self.subset_masks)

    def subset_index(self, name: str) -> int:
        """Return the number of a subset given its letters in any order."""
        return subset_index(name, self.letters)

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

    @property
    def of_answers(self) -> tuple[int, ...]:
        """The families that have signals of the answer span alone, by place."""
        return tuple(f for f, spans in enumerate(self.spans) if spans == "answer")


def paper_dims(hidden_spans: Spans = "all", **sizes: int) -> FamilyDims:
    """Return the paper's four families.

    Args:
      hidden_spans: spans whose hidden states are read.
      **sizes: channels of `hidden`, `prob`, `resid` and `attn`.
    """
    ordered = tuple(sizes[name] for name in FAMILIES)
    spans: tuple[Any, ...] = (hidden_spans, *["all"] * (N_FAMILIES - 1))
    return FamilyDims(names=FAMILIES, sizes=ordered, spans=spans)
