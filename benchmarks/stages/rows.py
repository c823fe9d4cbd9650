"""Which stored row is which question: split, label, and its closed-book partner."""

import dataclasses

import numpy as np

from extract.pipeline import read_examples, read_labels
from extract.records import Setting
from extract.run.directory import RunDir
from extract.store.read import FeatureStore, open_store


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of one setting's feature store, in its order.

    Attributes:
      ids: `[n_rows]` example ids; an original and a rewritten context share one.
      datasets: `[n_rows]`.
      splits: `[n_rows]`.
      variants: `[n_rows]`.
      labels: `[n_rows]` bool; False where `is_labelled` is False.
      is_labelled: `[n_rows]` bool; False where the judges disagreed.
    """

    setting: Setting
    ids: np.ndarray
    datasets: np.ndarray
    splits: np.ndarray
    variants: np.ndarray
    labels: np.ndarray
    is_labelled: np.ndarray

    def where(self, split: str, dataset: str | None = None) -> np.ndarray:
        """Return the indices of the labelled rows of a split (and a set)."""
        chosen = (self.splits == split) & self.is_labelled
        if dataset is not None:
            chosen &= self.datasets == dataset
        return np.flatnonzero(chosen)

    def n_unlabelled(self, split: str, dataset: str) -> int:
        """Return how many rows of a set have no label."""
        chosen = (self.splits == split) & (self.datasets == dataset)
        return int((chosen & ~self.is_labelled).sum())

    def columns(self) -> list[tuple[str, str]]:
        """Return the evaluated (dataset, split) pairs, in-domain first."""
        pairs = dict.fromkeys(zip(self.datasets, self.splits, strict=True))
        return [(str(d), str(s)) for d, s in pairs if s != "train"]


def load_rows(run: RunDir, setting: Setting) -> tuple[FeatureStore, Rows]:
    """Open a setting's store and say what its rows are.

    Raises:
      ValueError: the store is missing, or a row has no label record.
    """
    store = open_store(run.features(setting))
    examples = {example.id: example for example in read_examples(run)}
    labels = read_labels(run)
    keys = store.spec.keys
    unlabelled = [key for key in keys if key not in labels]
    if unlabelled:
        raise ValueError(
            f"{run.labels} has no label for {unlabelled[0]}; run `beatrice label` again"
        )
    found = [labels[key].label for key in keys]
    return store, Rows(
        setting=setting,
        ids=np.array([key[0] for key in keys]),
        datasets=np.array([examples[key[0]].dataset for key in keys]),
        splits=np.array([examples[key[0]].split for key in keys]),
        variants=np.array([key[2] for key in keys]),
        labels=np.array([label is True for label in found]),
        is_labelled=np.array([label is not None for label in found]),
    )


def partners(rows: Rows, closed_book: Rows) -> np.ndarray:
    """Return, for every row, the closed-book row of the same question.

    Returns:
      `[n_rows]` int64 indices into `closed_book`.

    Raises:
      ValueError: a question has no closed-book row.
    """
    place = {example_id: i for i, example_id in enumerate(closed_book.ids)}
    missing = [example_id for example_id in rows.ids if example_id not in place]
    if missing:
        raise ValueError(
            f"question {missing[0]!r} has no closed-book answer; answer and extract "
            "both settings"
        )
    return np.array([place[example_id] for example_id in rows.ids], dtype=np.int64)
