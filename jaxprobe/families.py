"""Families of signals, their subsets, and batches of padded tokens.

Subset number k reads family f exactly when bit f of k + 1 is set, whatever the number
of families. The order is thus that of a binary counter whose lowest bit is the first
family. For the paper's four families: H, P, HP, R, HR, PR, HPR, A, HA, PA, HPA, RA,
HRA, PRA, HPRA.

An example has two spans closed-book (question, answer) and three with context (context,
question, answer); the answer is always the last. Each span is padded to a length of its
own, and a mask tells which positions are real. The vector at each position concatenates
the families in the order of `FamilyDims`. A span that is left out is made empty in
every example and then pools to zeros. Shapes do not change, so every choice of spans
uses the executable compiled for the full grid.

The order of axes changes several times between the store and a fusion head:

| array                     | axes                                  | why              |
| ------------------------- | ------------------------------------- | ---------------- |
| rows of a stored family   | n_tokens_total, channels              | ragged           |
| `Features.tokens`         | n_examples, n_span_tokens, d_total    | padded spans     |
| `FamilyTokens.tokens`     | n_tokens, n_examples, d_family        | one gather each  |
| activations of an encoder | d, n_span_tokens, n_examples          | see `encoder`    |
| `MemberOutputs.pooled`    | n_members, n_examples, d_pooled       | stored by row    |
| `PoolOutputs.outputs`     | n_seeds, n_pool, d_output, n_examples | sliced batches   |
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

MOST_FAMILIES = 8  # 255 encoders per seed


@functools.lru_cache
def subset_masks(n_families: int) -> np.ndarray:
    """Return `[n_subsets, n_families]` bool, True where a subset reads a family."""
    numbers = np.arange(1, 2**n_families)
    return ((numbers[:, None] >> np.arange(n_families)[None, :]) & 1).astype(bool)


def slices_of(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return where parts of such sizes lie, end to end."""
    edges = np.cumsum([0, *sizes]).tolist()
    return tuple(map(slice, edges, edges[1:]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDims:
    """Families and their numbers of channels, in the order of a token's vector.

    `spans` tells which spans a family has, all or only the answer; empty means all.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    spans: tuple[Spans, ...] = ()

    def __post_init__(self) -> None:
        """Check that names are distinct, and that each has a size and spans."""
        spans = self.spans or ("all",) * len(self.names)
        object.__setattr__(self, "spans", tuple(spans))
        n = len(self.names)
        if not 1 <= n <= MOST_FAMILIES or len(set(self.names)) != n:
            raise ValueError(
                f"expected 1 to {MOST_FAMILIES} families with distinct names, got "
                f"{', '.join(self.names) or 'none'}"
            )
        if len(self.sizes) != n or len(self.spans) != n:
            raise ValueError(
                "expected equally many families, sizes and choices of spans, got "
                f"{n}, {len(self.sizes)} and {len(self.spans)}"
            )

    def in_words(self) -> str:
        """Return each family with its number of channels and its spans."""
        families = zip(self.names, self.sizes, self.spans, strict=True)
        return ", ".join(f"{name} of {n} ({spans})" for name, n, spans in families)

    @property
    def n_families(self) -> int:
        """Number of families."""
        return len(self.names)

    @property
    def n_subsets(self) -> int:
        """Number of subsets, and so of encoders per seed."""
        return 2**self.n_families - 1

    @property
    def letters(self) -> str:
        """One letter per family, from which the names of subsets are built.

        They are the capital initials, such as "HPRA" for the paper's families, or A, B,
        C and so on if the initials are not distinct letters.
        """
        initials = "".join(name[:1].upper() for name in self.names)
        is_clear = set(initials) <= set(string.ascii_uppercase)
        if is_clear and len(set(initials)) == len(self.names):
            return initials
        return string.ascii_uppercase[: len(self.names)]

    @property
    def subset_masks(self) -> np.ndarray:
        """`[n_subsets, n_families]` bool."""
        return subset_masks(self.n_families)

    @property
    def subset_names(self) -> tuple[str, ...]:
        """Names of all subsets, such as "HPA", in order."""
        masks = self.subset_masks
        return tuple("".join(itertools.compress(self.letters, x)) for x in masks)

    def subset_index(self, name: str) -> int:
        """Return the number of a subset, whose letters may be in any order."""
        letters = self.letters
        if not name or len(set(name)) != len(name) or not set(name) <= set(letters):
            raise ValueError(
                f"unknown subset {name!r}: expected distinct letters out of {letters}"
            )
        return sum(1 << letters.index(letter) for letter in name) - 1

    @property
    def total(self) -> int:
        """Number of channels of a token's vector, `d_total`."""
        return sum(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where each family lies within `d_total`."""
        return slices_of(self.sizes)

    @property
    def of_answers(self) -> tuple[int, ...]:
        """Indices of the families that have signals of the answer span only."""
        return tuple(f for f, spans in enumerate(self.spans) if spans == "answer")

    def read_in(self, span: int, n_spans: int) -> tuple[bool, ...]:
        """Return whether each family has signals of a span; the last is the answer."""
        return tuple(x == "all" or span == n_spans - 1 for x in self.spans)


FAMILIES = ("hidden", "prob", "resid", "attn")  # the paper's
N_FAMILIES = len(FAMILIES)
_PAPER = FamilyDims(names=FAMILIES, sizes=(1,) * N_FAMILIES)
LETTERS = _PAPER.letters
SUBSETS = _PAPER.subset_masks
SUBSET_NAMES = _PAPER.subset_names
N_SUBSETS = len(SUBSETS)
subset_index = _PAPER.subset_index
FLOATS: tuple[Dtype, ...] = ("float32",) * N_FAMILIES  # types if held in float32


def paper_dims(hidden_spans: Spans = "all", **sizes: int) -> FamilyDims:
    """Return the paper's four families: `hidden`, `prob`, `resid` and `attn`."""
    ordered = tuple(sizes[name] for name in FAMILIES)
    spans: tuple[Any, ...] = (hidden_spans, *["all"] * (N_FAMILIES - 1))
    return FamilyDims(names=FAMILIES, sizes=ordered, spans=spans)


SPAN_NAMES = ("context", "question", "answer")  # in the order of the store
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
        """Number of answers."""
        return self.masks[0].shape[0]

    @property
    def n_spans(self) -> int:
        """Number of spans: 2 closed-book, 3 with context, 1 for answers alone."""
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
    std: Any  # `[d_total]` float32; 1 for a channel that was constant


def check_features(features: Features, dims: FamilyDims) -> None:
    """Raise `ValueError` if spans, masks and widths do not fit together."""
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


_LEAST_DEVIATION = 1e-30  # dividing by it stays finite in float32


def divisors_of(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return divisors that standardise `[..., n_channels]`: 1 for constant channels.

    A channel is constant if its deviation is at most a millionth of its mean, or of the
    smaller of 1 and the largest deviation: gradients of 1e-8 are signals.
    """
    largest = std.max(axis=-1, keepdims=True, initial=0.0)
    least = 1e-6 * np.maximum(np.abs(mean), np.minimum(1.0, largest))
    return np.where(std <= np.maximum(least, _LEAST_DEVIATION), 1.0, std)


def fit_standardizer(batches: Iterable[Features], dims: FamilyDims) -> Standardizer:
    """Fit mean and deviation of every channel over the real tokens, in one pass.

    Batches need not fit in memory together. Families stored only for the answer span
    are fitted on that span: the zeros in place of the others would shrink the mean.
    """
    # Imported here: it takes a second to load, and most stages do not need it.
    from sklearn.preprocessing import StandardScaler

    scalers = [StandardScaler() for _ in dims.names]
    for features in batches:
        spans = zip(features.tokens, features.masks, strict=True)
        of_spans = [np.asarray(x)[np.asarray(mask)] for x, mask in spans]
        every = np.concatenate(of_spans)
        for f, (scaler, channels) in enumerate(zip(scalers, dims.slices, strict=True)):
            rows = (of_spans[-1] if f in dims.of_answers else every)[:, channels]
            if len(rows):
                # Channels may vary by a hundredth of their mean or less.
                scaler.partial_fit(rows.astype(np.float64))
    if not all(hasattr(scaler, "mean_") for scaler in scalers):
        raise ValueError("cannot standardise: no span has a real token")
    pairs = [(np.asarray(x.mean_), np.sqrt(np.asarray(x.var_))) for x in scalers]
    mean = np.concatenate([mean for mean, _ in pairs])
    std = np.concatenate([divisors_of(*pair) for pair in pairs])
    return Standardizer(mean.astype(np.float32), std.astype(np.float32))


def used_spans(spans: np.ndarray) -> tuple[int, ...]:
    """Return the spans that some example has; the answer is always one of them.

    `spans` are `[n_examples, 3, 2]`. Returned are indices into `SPAN_NAMES`; for
    answers of a model, those of `SPANS`.
    """
    is_used = np.any(spans[..., 1] > spans[..., 0], axis=0)
    return tuple(s for s in range(len(SPAN_NAMES)) if is_used[s] or s == ANSWER)


def span_lengths(spans: np.ndarray, read: Sequence[int]) -> np.ndarray:
    """Return the lengths of the spans that are read, `[n_examples, n_spans]`.

    `spans` are `[n_examples, 3, 2]`, and `read` indices into `SPAN_NAMES`.
    """
    return np.diff(spans[:, list(read)])[..., 0]


def assemble(
    families: Mapping[str, np.ndarray],
    starts: np.ndarray,
    spans: np.ndarray,
    read: Sequence[int],
) -> Features:
    """Concatenate the channels of families, and cut and pad their spans with zeros.

    Families are ragged rows `[n_rows, ...]` in the order of `FamilyDims`, `starts`
    `[n_examples]` the rows where each example's token 0 is or would be, `spans`
    `[n_examples, 3, 2]` (see the glossary in `extract/store/store.py`), and `read`
    indices into `SPAN_NAMES`. Each span that is read is padded to its longest.
    """
    channels = [
        np.asarray(values).reshape(len(values), -1).astype(np.float32)
        for values in families.values()
    ]
    rows, tokens, masks = np.concatenate(channels, axis=1), [], []
    for s, width in zip(read, widths_of(span_lengths(spans, read)), strict=True):
        positions = spans[:, s, :1] + np.arange(width)
        mask = positions < spans[:, s, 1:]
        index = np.where(mask, starts[:, None] + positions, 0)
        tokens.append(np.where(mask[..., None], rows[index], np.float32(0.0)))
        masks.append(mask)
    return Features(tuple(tokens), tuple(masks))


_WORTH = 1.5  # least ratio of padded tokens, one group to several, that is worth it
_MOST_GROUPS = 4  # each has a shape of its own, which has to be compiled


def width_groups(lengths: np.ndarray, n_batch: int) -> list[np.ndarray]:
    """Split rows by length if that saves at least a third of the padded tokens.

    The longest rows form a group of one batch, the next ones groups of two and of four
    batches, and the rest one group. A rest smaller than a batch joins the group before
    it, since any group takes at least one step. Batches then need hardly any padding.

    Args:
      lengths: `[n_rows, n_spans]` tokens.
      n_batch: rows of a batch.

    Returns:
      Positions of rows, ascending within each group, group of the shortest rows first;
      a single group if splitting does not pay.
    """
    n_rows = len(lengths)
    order = np.argsort(lengths.sum(axis=1), kind="stable")
    sizes = [n_batch << i for i in range(_MOST_GROUPS - 1)]
    edges = np.cumsum(sizes)
    cuts = n_rows - edges[n_rows - edges >= n_batch][::-1]
    groups = [np.sort(group) for group in np.split(order, cuts)]
    padded = sum(len(group) * sum(widths_of(lengths[group])) for group in groups)
    if n_rows * sum(widths_of(lengths)) < _WORTH * padded:
        return [np.arange(n_rows)]
    return groups


def widths_of(lengths: np.ndarray) -> tuple[int, ...]:
    """Return the padded length of each span, at least 1, of `[n_rows, n_spans]`."""
    longest: Sequence[int] = lengths.max(axis=0).tolist()
    return tuple(max(1, n) for n in longest)
