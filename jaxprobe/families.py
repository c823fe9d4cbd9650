"""Families of signals, their subsets, and a batch of their tokens.

Subset number k reads family f exactly when bit f of k + 1 is set, whatever the number
of families. So the order is that of a binary counter with the first family as its
lowest bit. For the paper's four families: H, P, HP, R, HR, PR, HPR, A, HA, PA, HPA, RA,
HRA, PRA, HPRA.

An example is two spans closed-book (question, answer) and three with context
(context, question, answer); the answer is always the last one. Every span is padded to
its own length, and a mask says which positions are real. At each position the families
lie side by side in one vector, in the order of `FamilyDims`. A span that is left out is
made empty in every example, and an empty span pools to zeros: no shape changes, so that
every choice of spans trains in the executable of the full grid.

The order of axes changes four times between the store and a fusion head:

| array                     | axes                                  | why              |
| ------------------------- | ------------------------------------- | ---------------- |
| rows of a stored family   | n_tokens_total, channels              | ragged           |
| `Features.tokens`         | n_examples, n_span_tokens, d_total    | padded spans     |
| `FamilyTokens.tokens`     | n_tokens, n_examples, d_family        | one gather each  |
| activations of an encoder | d, n_span_tokens, n_examples          | `encoder`        |
| `MemberOutputs.pooled`    | n_members, n_examples, d_pooled       | rows of the disk |
| `PoolOutputs.outputs`     | n_seeds, n_pool, d_output, n_examples | batches: slices  |
"""

import dataclasses
import functools
import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.records import Setting
from beatrice.extract.store.spec import Dtype, Spans

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


def subset_names(letters: str) -> tuple[str, ...]:
    """Name all subsets by their letters, as in "HPA", in order."""
    masks = subset_masks(len(letters))
    return tuple("".join(itertools.compress(letters, mask)) for mask in masks)


SUBSET_NAMES = subset_names(LETTERS)


def subset_index(name: str, letters: str = LETTERS) -> int:
    """Return the number of a subset given its letters in any order."""
    if not name or len(set(name)) != len(name) or not set(name) <= set(letters):
        raise ValueError(
            f"unknown subset {name!r}: expected distinct ones of {letters}"
        )
    return sum(1 << letters.index(letter) for letter in name) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDims:
    """Families and their channels, in the order in which they lie in a token's vector.

    `spans` says of which each has signals: all, or the answer alone. Empty is all.
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
        return subset_names(self.letters)

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
    """Return the paper's four families: `hidden`, `prob`, `resid` and `attn`."""
    ordered = tuple(sizes[name] for name in FAMILIES)
    spans: tuple[Any, ...] = (hidden_spans, *["all"] * (N_FAMILIES - 1))
    return FamilyDims(names=FAMILIES, sizes=ordered, spans=spans)


SPAN_NAMES = ("context", "question", "answer")  # as they are stored
ANSWER = 2
SPANS: dict[Setting, tuple[int, ...]] = {
    "closed_book": (1, 2),
    "with_context": (0, 1, 2),
}


class Features(NamedTuple):
    """Signals of `n_examples` answers, one entry per span."""

    tokens: tuple[Any, ...]  # per span `[n_examples, n_span_tokens, d_total]` float32
    # Per span `[n_examples, n_span_tokens]` bool, True on real tokens. A span may be
    # empty (all False) for some examples.
    masks: tuple[Any, ...]

    @property
    def n_examples(self) -> int:
        """How many answers there are."""
        return self.masks[0].shape[0]

    @property
    def n_spans(self) -> int:
        """Two closed-book, three with context; one where answers stand alone."""
        return len(self.masks)

    def take(self, rows: np.ndarray | slice) -> "Features":
        """Select examples by index, slice or boolean mask."""
        return Features(
            tuple(tokens[rows] for tokens in self.tokens),
            tuple(mask[rows] for mask in self.masks),
        )


class Standardizer(NamedTuple):
    """Per-channel affine map, fitted on the training tokens of all spans."""

    mean: Any  # `[d_total]` float32
    std: Any  # `[d_total]` float32; 1 where the channel was constant


def check_features(features: Features, dims: FamilyDims) -> None:
    """Raise `ValueError` where spans, masks and widths do not fit together."""
    if not 1 <= features.n_spans <= 3 or len(features.tokens) != features.n_spans:
        raise ValueError(
            "expected 1 to 3 spans (2 closed-book, 3 with context), each with a mask; "
            f"got {len(features.tokens)} spans and {features.n_spans} masks"
        )
    for tokens, mask in zip(features.tokens, features.masks, strict=True):
        if tuple(tokens.shape) != (*mask.shape, dims.total):
            raise ValueError(
                f"span tokens have shape {tuple(tokens.shape)}, expected "
                f"{(*mask.shape, dims.total)} from the mask and {dims}"
            )


_LEAST_DEVIATION = 1e-30  # what is divided by it stays finite in float32


def divisors_of(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return what to divide channels `[..., n_channels]` by: 1 where one is constant.

    A channel is constant if its deviation is a millionth of its mean, of one, or of the
    largest deviation where that is below one: gradients of 1e-8 are signals.
    """
    largest = std.max(axis=-1, keepdims=True, initial=0.0)
    least = 1e-6 * np.maximum(np.abs(mean), np.minimum(1.0, largest))
    return np.where(std <= np.maximum(least, _LEAST_DEVIATION), 1.0, std)


def standardizer_of(
    batches: Iterable[Features], families: Sequence[slice] = (slice(None),)
) -> Standardizer:
    """Fit mean and deviation of every channel over the real tokens, in one pass.

    Constant channels are told by family, see `divisors_of`.
    """
    # Here, since it takes a second to load, and most stages only look at rows.
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    for features in batches:
        spans = zip(features.tokens, features.masks, strict=True)
        rows = np.concatenate([np.asarray(x)[np.asarray(mask)] for x, mask in spans])
        if len(rows):
            # Double precision: channels vary a hundredth of their mean, or less.
            scaler.partial_fit(rows.astype(np.float64))
    if not hasattr(scaler, "mean_"):
        raise ValueError("cannot standardise: no span has a real token")
    mean, std = np.asarray(scaler.mean_), np.sqrt(np.asarray(scaler.var_))
    for channels in families:
        std[channels] = divisors_of(mean[channels], std[channels])
    return Standardizer(mean.astype(np.float32), std.astype(np.float32))


def pad_span(
    rows: np.ndarray, starts: np.ndarray, spans: np.ndarray, n_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut one span out of ragged rows and pad it on the right with zeros.

    Args:
      rows: `[n_rows, d_total]`.
      starts: `[n_examples]`, the row of each example's token 0, or where it would be.
      spans: `[n_examples, 2]`, `[start, stop)` inside the example.
      n_tokens: padded length; no span is longer.

    Returns:
      `[n_examples, n_tokens, d_total]` float32 and its mask `[n_examples, n_tokens]`.
    """
    lengths = spans[:, 1] - spans[:, 0]
    check_width(lengths, n_tokens)
    mask = np.arange(n_tokens)[None, :] < lengths[:, None]
    first = starts + spans[:, 0]
    index = np.where(mask, first[:, None] + np.arange(n_tokens)[None, :], 0)
    tokens = rows[index].astype(np.float32, copy=False)
    tokens[~mask] = 0.0
    return tokens, mask


def check_width(lengths: np.ndarray, n_tokens: int) -> None:
    """Raise if a span is longer than it is padded to; nothing is cut."""
    if lengths.max(initial=0) > n_tokens:
        raise ValueError(
            f"a span has {lengths.max()} tokens, expected at most {n_tokens}; "
            "pad to a larger length"
        )


def used_spans(spans: np.ndarray) -> tuple[int, ...]:
    """Return the spans of which some example has a token; the answer is always one.

    Of `[n_examples, 3, 2]` places among `SPAN_NAMES`: `SPANS` for answers of a model.
    """
    is_used = np.any(spans[..., 1] > spans[..., 0], axis=0)
    return tuple(s for s in range(len(SPAN_NAMES)) if is_used[s] or s == ANSWER)


def span_lengths(spans: np.ndarray, read: Sequence[int]) -> np.ndarray:
    """Return the tokens of the spans that are read, `[n_examples, n_spans]`.

    Of spans `[n_examples, 3, 2]`; those that are read are places among `SPAN_NAMES`.
    """
    return np.diff(spans[:, list(read)])[..., 0]


def assemble(
    families: Mapping[str, np.ndarray],
    starts: np.ndarray,
    spans: np.ndarray,
    read: Sequence[int],
    n_tokens: Sequence[int] | None = None,
) -> Features:
    """Lay the families, `[n_rows, ...]` in `FamilyDims`' order, side by side; pad.

    `starts` as in `pad_span`, `spans` `[n_examples, 3, 2]`, see the glossary in
    `extract/store/store.py`, of which places among `SPAN_NAMES` are read, padded to
    `n_tokens` or to the longest of each.
    """
    channels = [
        np.asarray(values).reshape(len(values), -1).astype(np.float32)
        for values in families.values()
    ]
    rows = np.concatenate(channels, axis=1)
    widths = widths_of(span_lengths(spans, read)) if n_tokens is None else n_tokens
    padded = [
        pad_span(rows, starts, spans[:, s], width)
        for s, width in zip(read, widths, strict=True)
    ]
    tokens, masks = zip(*padded, strict=True)
    return Features(tokens, masks)


_WORTH = 1.5  # padded tokens of one group, over those of several, from which they pay
_MOST_GROUPS = 4  # each is a shape of its own, to be compiled


def width_groups(lengths: np.ndarray, n_batch: int) -> list[np.ndarray]:
    """Split rows by length, where that spares at least a third of the padded tokens.

    The longest rows are a batch of their own, the next two batches, the next four; the
    rest is one group, or joins the group before it where it fills no batch: a group
    takes a step of its own however few its rows. Batches are then hardly ever padded.

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
    cuts = n_rows - edges[n_rows - edges >= n_batch][::-1]
    groups = [np.sort(group) for group in np.split(order, cuts)]
    padded = sum(len(group) * _width(lengths[group]) for group in groups)
    if n_rows * _width(lengths) < _WORTH * padded:
        return [np.arange(n_rows)]
    return groups


def widths_of(lengths: np.ndarray) -> tuple[int, ...]:
    """Return the padded length of each span of `[n_rows, n_spans]`, at least 1."""
    longest: Sequence[int] = lengths.max(axis=0).tolist()
    return tuple(max(1, n) for n in longest)


def _width(lengths: np.ndarray) -> int:
    """Return the padded tokens of a row of a group."""
    return sum(widths_of(lengths))
