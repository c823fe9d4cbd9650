"""The question behind each stored row, and the rows that encoders are trained on.

Training rows are kept on the device, or streamed from the store during training.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from beatrice.extract.records import IN_DOMAIN, Example, Label, Setting
from beatrice.extract.store.spec import Dtype
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.config import usual_jax
from beatrice.jaxprobe.families import (
    FamilyDims,
    Standardizer,
    fit_standardizer,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.tokens import (
    FamilyTokens,
    empty_span,
    family_dims,
    read_features,
    read_tokens,
    stored_dtypes,
    stored_lengths,
    zero_span,
)

_MOST_ROWS, _MOST_BYTES = 1024, 1 << 29  # limits for encoding rows together
# Maps store indices `[n]`, and optionally padded widths of the spans, to tokens.
ReadRows = Callable[..., FamilyTokens]


class Bucket(NamedTuple):
    """Rows of similar length on the device."""

    indices: np.ndarray  # `[n]` indices into the training or the validation rows
    tokens: FamilyTokens  # tokens of these rows, `n` examples


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoreRows:
    """The rows of one setting's feature store, in its order."""

    setting: Setting
    ids: np.ndarray  # `[n_rows]` example ids, shared by original and rewritten contexts
    datasets: np.ndarray  # `[n_rows]`
    splits: np.ndarray  # `[n_rows]`
    variants: np.ndarray  # `[n_rows]`
    labels: np.ndarray  # `[n_rows]` bool; False if `is_labelled` is False
    is_labelled: np.ndarray  # `[n_rows]` bool; False if the judges disagreed

    def _chosen(self, split: str, dataset: str) -> np.ndarray:
        is_split = self.splits == split
        return (
            is_split if dataset == IN_DOMAIN else is_split & (self.datasets == dataset)
        )

    def where(self, split: str, dataset: str = IN_DOMAIN) -> np.ndarray:
        """Return the indices of a split's labelled rows, in one dataset or in all.

        With context, rows of both wordings are included, as in the paper.
        """
        return np.flatnonzero(self._chosen(split, dataset) & self.is_labelled)

    def take(self, where: np.ndarray) -> "StoreRows":
        """Select rows by indices, `[n]`."""
        arrays = {
            field.name: getattr(self, field.name)[where]
            for field in dataclasses.fields(self)
            if field.name != "setting"
        }
        return dataclasses.replace(self, **arrays)

    def fields_of(self, dataset: str, split: str) -> dict[str, Any]:
        """Return the fields shared by all result rows on an evaluated set."""
        chosen = self._chosen(split, dataset)
        return {
            "setting": self.setting,
            "dataset": dataset,
            "split": split,
            "n": int((chosen & self.is_labelled).sum()),
            "n_failed": int((chosen & ~self.is_labelled).sum()),
        }

    def evaluated_sets(self) -> list[tuple[str, str]]:
        """Return the evaluated (dataset, split) pairs, in-domain first.

        A split's datasets together come before single ones, except for held-out ones.
        """
        pairs = dict.fromkeys(zip(self.datasets, self.splits, strict=True))
        # Rows that were left out have no split.
        single = [(str(d), str(s)) for d, s in pairs if s not in ("train", "")]
        splits = dict.fromkeys(split for _, split in single if split != "ood")
        return [*((IN_DOMAIN, split) for split in splits), *single]


def rows_of(
    store: FeatureStore, examples: Iterable[Example], labels: Iterable[Label]
) -> StoreRows:
    """Return the question of each row of a store, and whether its answer is right."""
    by_id = {example.id: example for example in examples}
    by_key: dict[tuple[str, ...], Label] = {
        (x.example_id, x.setting, x.variant): x for x in labels
    }
    keys = store.spec.keys
    if unknown := [key[0] for key in keys if key[0] not in by_id]:
        raise ValueError(
            f"{store.url} has signals for question {unknown[0]!r}, which is not among "
            "the questions; delete the store and run `beatrice extract` again"
        )
    if unlabelled := [key for key in keys if key not in by_key]:
        raise ValueError(
            f"{store.url} has signals for {unlabelled[0]}, which has no label; run "
            "`beatrice label` again"
        )
    verdicts = [by_key[key].label for key in keys]
    return StoreRows(
        setting=by_key[keys[0]].setting,
        ids=np.array([key[0] for key in keys]),
        datasets=np.array([by_id[key[0]].dataset for key in keys]),
        splits=np.array([by_id[key[0]].split for key in keys]),
        variants=np.array([key[2] for key in keys]),
        labels=np.array([label is True for label in verdicts]),
        is_labelled=np.array([label is not None for label in verdicts]),
    )


def check_groups_unsplit(groups: np.ndarray, splits: np.ndarray) -> None:
    """Check that no group is in two splits, and so both trained on and tested.

    Each answer has the name of its group, such as a question, and its split, which is
    empty if the answer is left out.
    """
    split_of: dict[str, str] = {}
    for name, split in zip(groups.tolist(), splits.tolist(), strict=True):
        if split and split_of.setdefault(name, split) != split:
            raise ValueError(
                f"splits: the answers of {name!r} are in {split_of[name]!r} and in "
                f"{split!r}; put all answers to a question into one group, and all "
                "answers of a group into one split"
            )


def first_id(example_id: str, known: Collection[str]) -> str:
    """Return the id under which a question was first asked.

    A repeated question has the first id, which is in `known`, plus a number.
    """
    first, _, number = example_id.rpartition("-")
    return first if first in known and number.isdigit() else example_id


def closed_book_ids(
    ids: Sequence[str] | np.ndarray, closed_book: Sequence[str] | np.ndarray
) -> np.ndarray:
    """Return the id of each question's closed-book answer, or its own if there is none.

    It is the answer of the same id, or else the first to the same question.
    """
    known, answered = {*ids, *closed_book}, {*closed_book}
    first: dict[str, str] = {}
    for example_id in closed_book:
        first.setdefault(first_id(example_id, known), example_id)
    names = (x if x in answered else first.get(first_id(x, known), x) for x in ids)
    return np.array([*names], str)


def closed_book_rows(
    ids: Sequence[str] | np.ndarray, closed_book: Sequence[str] | np.ndarray
) -> np.ndarray:
    """Return each row's closed-book row of the same question, `[n_rows]`."""
    index = {example_id: i for i, example_id in enumerate(closed_book)}
    ids = closed_book_ids(ids, closed_book)
    if missing := [example_id for example_id in ids if example_id not in index]:
        raise ValueError(
            f"question {str(missing[0])!r} has no closed-book answer; answer it "
            "closed-book too, and extract the signals"
        )
    return np.array([index[example_id] for example_id in ids], dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSet:
    """A setting's rows as encoders read them, and which of them are trained on."""

    rows: StoreRows  # the questions and labels of the rows
    # Entry of the resid axis for the hidden family (0 is the embedding).
    layer: int | None
    dims: FamilyDims  # widths of the families
    standardizer: Standardizer  # fitted on the training rows
    device_dtypes: tuple[Dtype, ...]  # types of the families on the device
    n_batch: int  # rows in a training batch, used to group rows by length
    # Reads tokens of store rows, padded to the longest spans or to given widths.
    read: ReadRows
    read_train: ReadRows  # the same for training rows
    lengths: np.ndarray  # `[n_rows, n_spans]` span lengths of all rows of the store
    where: tuple[np.ndarray, np.ndarray]  # store indices: training and validation rows
    # Tokens of these rows on the device, in groups of similar length; None if streamed.
    in_memory: tuple[tuple[Bucket, ...], tuple[Bucket, ...]] | None

    def splits(self) -> list[Iterable[tuple[np.ndarray, FamilyTokens]]]:
        """Return training and validation rows, each in groups or as `batches`."""
        if self.in_memory is not None:
            return list(self.in_memory)
        return list(map(self.batches, self.where, (self.read_train, self.read)))

    def batches(
        self, where: np.ndarray, read: ReadRows | None = None, n_copies: int = 1
    ) -> Iterator[tuple[np.ndarray, FamilyTokens]]:
        """Yield batches of rows of similar length.

        All batches of a length group have one shape, so that one executable serves
        them; the last batch repeats its last row. `n_copies` is the memory that the
        work on a batch takes, in multiples of its tokens.

        Yields:
          Indices into `where`, `[n]`, and the tokens of at least `n` examples.
        """
        lengths, read = self.lengths[where], read or self.read
        for group in width_groups(lengths, self.n_batch):
            widths = widths_of(lengths[group])
            most = max(1, rows_at_once(widths, self.dims) // n_copies)
            size = -(-len(group) // -(-len(group) // most))
            for indices in _split(group, size):
                padded = np.pad(indices, (0, size - len(indices)), "edge")
                yield indices, read(where[padded], widths)

    def without(self, span: int) -> "TrainingSet":
        """Return a copy with a span left out; see `empty_span`."""
        empty = partial(empty_span, span=span)
        return self._changed(empty, empty)

    def with_zeroed(self, span: int) -> "TrainingSet":
        """Return a copy with a span's signals set to zero, but only in training."""
        return self._changed(partial(zero_span, span=span), lambda tokens: tokens)

    def _changed(
        self,
        in_training: Callable[[FamilyTokens], FamilyTokens],
        elsewhere: Callable[[FamilyTokens], FamilyTokens],
    ) -> "TrainingSet":
        """Return a copy whose training rows, and all other rows, have other tokens."""
        changes = in_training, elsewhere
        in_memory = self.in_memory and tuple(
            tuple(Bucket(i, change(tokens)) for i, tokens in split)
            for split, change in zip(self.in_memory, changes, strict=True)
        )
        return dataclasses.replace(
            self,
            read=lambda *where: elsewhere(self.read(*where)),
            read_train=lambda *where: in_training(self.read_train(*where)),
            in_memory=in_memory,
        )


@usual_jax()
def training_set(
    store: FeatureStore,
    rows: StoreRows,
    *,
    layer: int | None,
    n_batch: int,
    streamed: bool = False,
    device_dtypes: tuple[Dtype, ...] | None = None,
) -> TrainingSet:
    """Fit the standardisation on the training rows, and read the rows unless streamed.

    `layer` is the entry of the resid axis for the hidden family (0 is the embedding),
    or None if no family is stored by layer. Rows are grouped by length for batches of
    `n_batch`. `device_dtypes` (see `read_tokens`) default to the stored types.
    """
    dims, lengths = family_dims(store), stored_lengths(store)
    where = rows.where("train"), rows.where("validation")
    check_classes(rows, where)
    longest = widths_of(lengths)
    groups = [width_groups(lengths[split], n_batch) for split in where]
    # In float32 rows take many times their stored size, so read a few at a time.
    n_at_once = rows_at_once(longest, dims)
    shards = [x for group in groups[0] for x in _split(where[0][group], n_at_once)]
    batches = (read_features(store, layer, x, widths_of(lengths[x])) for x in shards)
    standardizer = fit_standardizer(batches, dims)
    device_dtypes = device_dtypes or stored_dtypes(store)
    fixed = {"standardizer": standardizer, "device_dtypes": device_dtypes}

    def read(some: np.ndarray, widths: tuple[int, ...] = longest) -> FamilyTokens:
        rows, start = None, 0
        for shard in _split(some, rows_at_once(widths, dims)):
            part = read_tokens(store, layer, shard, widths, **fixed)
            if len(shard) == len(some):
                return jax.device_put(part)
            rows = rows or part.of_examples(partial(_empty_rows, len(some)))
            rows = rows.of_examples(partial(_written, start), part)
            start += len(shard)
            del part  # before the next is read: memory holds the rows and one part
        return jax.device_put(rows)

    def buckets(split: np.ndarray, groups: Sequence[np.ndarray]) -> tuple[Bucket, ...]:
        return tuple(
            Bucket(group, read(split[group], widths_of(lengths[split[group]])))
            for group in groups
        )

    return TrainingSet(
        rows=rows,
        layer=layer,
        dims=dims,
        standardizer=standardizer,
        device_dtypes=device_dtypes,
        n_batch=n_batch,
        read=read,
        read_train=read,
        lengths=lengths,
        where=where,
        in_memory=None
        if streamed
        else (buckets(where[0], groups[0]), buckets(where[1], groups[1])),
    )


def _empty_rows(n_rows: int, part: np.ndarray) -> np.ndarray:
    """Return room for rows, aligned: JAX on a CPU copies what 64 does not divide."""
    shape = len(part), n_rows, *part.shape[2:]
    n_bytes = math.prod(shape) * part.dtype.itemsize
    room = np.empty(n_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + n_bytes].view(part.dtype).reshape(shape)


def _written(start: int, rows: np.ndarray, part: np.ndarray) -> np.ndarray:
    rows[:, start : start + part.shape[1]] = part
    return rows


def check_classes(rows: StoreRows, where: tuple[np.ndarray, np.ndarray]) -> None:
    """Check that training and validation rows (`where`) each have both classes."""
    for split, indices in zip(("training", "validation"), where, strict=True):
        if not len(indices):
            raise ValueError(
                f"{rows.setting}: there are no labelled {split} answers; label answers "
                "to more questions, in more groups, or of that split"
            )
        n_right = int(rows.labels[indices].sum())
        if n_right in (0, len(indices)):
            raise ValueError(
                f"{rows.setting}: {n_right} of {len(indices)} labelled {split} answers "
                "are correct, but both classes are needed; compare the answers with "
                "their golds, use more questions or another prompt, or leave this "
                "setting out (for a run, with --settings)"
            )


def rows_at_once(widths: Sequence[int], dims: FamilyDims) -> int:
    """Return how many examples to encode together, a power of two.

    `widths` are padded span lengths. At the paper's sizes each takes eight megabytes.
    """
    fitting = _MOST_BYTES // (4 * sum(widths) * dims.total)
    return 1 << (max(1, min(fitting, _MOST_ROWS)).bit_length() - 1)


def _split(where: np.ndarray, size: int) -> list[np.ndarray]:
    return [where[i : i + size] for i in range(0, len(where), size)]
