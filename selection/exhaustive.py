"""Every set of a given size, ranked: how good is what the greedy search found?

The paper enumerates all three-encoder sets of a pool (section 4.3): 455 closed-book and
4,060 with context, each with a head per seed. Calls are as large as a round of the
greedy search, so that all of them run through the executable the search has compiled.
Each call's AUROCs are saved, so that a killed enumeration continues.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxprobe.checkpoint import Cache
from jaxprobe.config import FusionConfig, TrainConfig
from jaxprobe.model.fusion import PoolOutputs
from selection.greedy import check_classes, fit_sets, slots_for

SET_SIZE = 3  # of the paper's enumeration


class Ranking(NamedTuple):
    """What every set of a pool reaches on validation.

    Attributes:
      sets: `[n_sets, set_size]` int32 pool positions, ascending in a set; the sets in
        lexicographic order.
      aurocs: `[n_sets, n_seeds]` float32 validation AUROC.
    """

    sets: np.ndarray
    aurocs: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean over seeds, `[n_sets]` float64."""
        return self.aurocs.mean(axis=1, dtype=np.float64)

    @property
    def order(self) -> np.ndarray:
        """Rows best to worst, `[n_sets]`; the earlier one of a tie first."""
        return np.argsort(-self.means, kind="stable")

    def row_of(self, members: tuple[int, ...]) -> int:
        """Return the row of a set.

        Raises:
          ValueError: no such set was ranked.
        """
        is_size = len(members) == self.sets.shape[1]
        wanted = np.sort(members)[None, :] if is_size else -1
        found = np.flatnonzero((self.sets == wanted).all(axis=1))
        if not len(found):
            raise ValueError(
                f"the set {tuple(members)} is not among the {len(self.sets)} ranked "
                f"sets of {self.sets.shape[1]} encoders"
            )
        return int(found[0])

    def rank_of(self, members: tuple[int, ...]) -> int:
        """Return a set's rank, from 1: one more than the number of better sets."""
        means = self.means
        return 1 + int((means > means[self.row_of(members)]).sum())

    def gap_of(self, members: tuple[int, ...]) -> float:
        """Return how far a set's seed-averaged AUROC is below the best set's."""
        means = self.means
        return float(means.max() - means[self.row_of(members)])


def all_sets(n_pool: int, set_size: int) -> np.ndarray:
    """Return every set of pool positions, `[n_sets, set_size]` int32.

    Raises:
      ValueError: the pool is smaller than a set.
    """
    if not 1 <= set_size <= n_pool:
        raise ValueError(
            f"a pool of {n_pool} encoders has no sets of {set_size}; ask for a size "
            f"from 1 to {n_pool}"
        )
    return np.array(list(itertools.combinations(range(n_pool), set_size)), np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Enumeration:
    """All sets of one size of one pool, and where finished calls are saved.

    Attributes:
      train: outputs of the pool on the training rows.
      valid: the same on the validation rows.
      config: shape of the heads.
      train_config: protocol of the heads.
      folder: of finished calls, a file each; None saves none.
      set_size: encoders of a set.
    """

    train: PoolOutputs
    valid: PoolOutputs
    config: FusionConfig
    train_config: TrainConfig
    folder: Path | None = None
    set_size: int = SET_SIZE

    def __post_init__(self) -> None:
        """Refuse validation rows on which nothing can be ranked.

        Raises:
          ValueError: they have one class only.
        """
        check_classes(self.valid)

    @cached_property
    def sets(self) -> np.ndarray:
        """All sets, `[n_sets, set_size]`."""
        return all_sets(self.train.n_pool, self.set_size)

    @cached_property
    def cache(self) -> Cache:
        """Finished calls, by the SHA-256 of everything a head depends on."""
        digest = hashlib.sha256(
            f"{self.config} {self.train_config} {self.set_size}".encode()
        )
        for value in (*self.train, *self.valid):
            array = np.ascontiguousarray(value)
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(array.data)
        return Cache(self.folder, digest.hexdigest())

    @property
    def _calls(self) -> dict[str, np.ndarray]:
        """The sets of every call, by the name of its part."""
        width, size = len(str(len(self.sets))), self.train.n_pool
        starts = range(0, len(self.sets), size)
        return {
            f"{start:0{width}}": self.sets[start : start + size] for start in starts
        }

    def n_missing(self) -> int:
        """Return how many heads have not been trained yet."""
        calls = self._calls
        n_sets = sum(len(calls[name]) for name in self.cache.missing(calls))
        return n_sets * self.train.n_seeds

    def run(self, tick: Callable[[int], None] | None = None) -> Ranking:
        """Train every head that is missing, and rank all sets.

        Args:
          tick: told after every call how many heads it has trained.
        """
        shape = slots_for(self.config, self.set_size)
        parts = []
        for name, sets in self._calls.items():
            saved = self.cache.load(name)
            if saved is None:
                heads = fit_sets(
                    [tuple(map(int, members)) for members in sets],
                    self.train,
                    self.valid,
                    config=shape,
                    train_config=self.train_config,
                    n_calls=self.train.n_pool,
                )
                saved = {"aurocs": np.asarray(heads.info.best_auroc)}
                self.cache.save(name, saved)
                if tick is not None:
                    tick(saved["aurocs"].size)
            parts.append(saved["aurocs"])
        return Ranking(self.sets, np.concatenate(parts))


def carried(ranking: Ranking, traits: np.ndarray, n_bins: int) -> np.ndarray:
    """How many encoders of a set carry a trait, along the ranking, best to worst.

    The ribbon of the paper's figure of all combinations: a local mean, here over equal
    parts of the ranking.

    Args:
      ranking: of all sets.
      traits: `[n_traits, n_pool]` bool, such as "reads hidden states with context".
      n_bins: parts of the ranking.

    Returns:
      `[n_traits, n_bins]` mean number of encoders, from 0 to the size of a set.
    """
    counts = traits[:, ranking.sets[ranking.order]].sum(axis=2)
    parts = np.array_split(counts, min(n_bins, counts.shape[1]), axis=1)
    return np.stack([part.mean(axis=1) for part in parts], axis=1)
