"""Ranking of every set of three encoders, and the rank of the greedy search's set.

The paper enumerates all three-encoder sets of a pool (section 4.3): 455 closed-book and
4,060 with context, each with a head per seed. Each call trains as many sets as a round
of the greedy search and reuses its executable. Each call's AUROCs are saved, so that a
killed enumeration can resume.
"""

import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.records import IN_DOMAIN, SETTINGS, Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import row_files, settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import ResultRow, publish, rows_file
from beatrice.extract.run.stages import Stage, side_by_side
from beatrice.jaxprobe.calibrate import run_bootstrap, run_pool, run_selection
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import (
    PROTOCOL,
    SELECT_PRESETS,
    SelectConfig,
    set_compiler,
)
from beatrice.jaxprobe.detector import encoders_read, pool_names
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import LETTERS
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.stages import encoder_folders
from beatrice.selection.greedy import HeadTrainer, load_part

SET_SIZE = 3  # as in the paper's enumeration


class Ranking(NamedTuple):
    """Validation AUROC of every set of a pool."""

    # `[n_sets, set_size]` int32 pool positions, ascending in a set, sets in
    # lexicographic order.
    sets: np.ndarray
    aurocs: np.ndarray  # `[n_sets, n_seeds]` float32 validation AUROC

    @property
    def means(self) -> np.ndarray:
        """The AUROCs averaged over seeds, `[n_sets]` float64."""
        return self.aurocs.mean(axis=1, dtype=np.float64)

    @property
    def order(self) -> np.ndarray:
        """Rows from best to worst, `[n_sets]`; ties keep the order of `sets`."""
        return np.argsort(-self.means, kind="stable")

    def parts(self, values: np.ndarray, n_parts: int) -> list[np.ndarray]:
        """Split values `[n_sets, ...]` into parts of the ranking, best first."""
        return np.array_split(values[self.order], min(n_parts, len(values)))

    def row_of(self, members: tuple[int, ...]) -> int:
        """Return the row of a set, which must be in the ranking."""
        return int(np.flatnonzero((self.sets == np.sort(members)).all(axis=1))[0])

    def rank_of(self, members: tuple[int, ...]) -> int:
        """Return a set's rank: one plus the number of better sets."""
        means = self.means
        return 1 + int((means > means[self.row_of(members)]).sum())

    def gap_of(self, members: tuple[int, ...]) -> float:
        """Return how far a set's seed-averaged AUROC is below that of the best set."""
        means = self.means
        return float(means.max() - means[self.row_of(members)])


def all_sets(n_pool: int, set_size: int = SET_SIZE) -> np.ndarray:
    """Return every set of pool positions, `[n_sets, set_size]` int32."""
    return np.array(list(itertools.combinations(range(n_pool), set_size)), np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Enumeration:
    """Trains heads for all sets of three of one pool, and saves finished calls."""

    heads: HeadTrainer  # of the pool
    folder: Path | None = None  # for a file per finished call; None: save none

    @cached_property
    def calls(self) -> dict[str, np.ndarray]:
        """The sets that each call trains, `[n_sets, SET_SIZE]`, by the call's name."""
        size = self.heads.pool.train.n_pool
        sets = all_sets(size)
        width = len(str(len(sets)))
        starts = range(0, len(sets), size)
        return {f"{start:0{width}}": sets[start : start + size] for start in starts}

    @cached_property
    def cache(self) -> Cache:
        """Finished calls, keyed by the SHA-256 of everything heads depend on."""
        pool, config = self.heads.pool, self.heads.config
        shapes = f"{PROTOCOL} {config.head} {config.train} {SET_SIZE}"
        digest = hashlib.sha256(shapes.encode())
        for value in (*pool.train, *pool.valid):
            array = np.ascontiguousarray(value)
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(array.data)
        return Cache(self.folder, digest.hexdigest())

    def n_heads(self, names: Iterable[str]) -> int:
        """Return how many heads the named calls train."""
        n_seeds = self.heads.pool.train.n_seeds
        return sum(len(self.calls[name]) for name in names) * n_seeds

    def n_missing(self) -> int:
        """Return how many heads are still to be trained."""
        return self.n_heads(self.cache.missing(self.calls))

    def run(self, tick: Callable[[int], object] = lambda n_heads: None) -> Ranking:
        """Train all missing heads, and rank all sets."""
        aurocs = []
        for name, sets in self.calls.items():
            saved = self.cache.load(name)
            if saved is None:
                heads = self.heads.fit_sets([*map(tuple, sets.tolist())])
                saved = {"aurocs": np.asarray(heads.info.best_auroc)}
                self.cache.save(name, saved)
                tick(saved["aurocs"].size)
            aurocs.append(saved["aurocs"])
        sets = np.concatenate([*self.calls.values()])
        return Ranking(sets, np.concatenate(aurocs))


def n_with_trait(ranking: Ranking, traits: np.ndarray, n_bins: int) -> np.ndarray:
    """Return how many encoders with each trait a set contains, along the ranking.

    The ribbon in the paper's figure of all combinations: means over equal parts of the
    ranking, `[n_traits, n_bins]`. `traits` is `[n_traits, n_pool]` bool.
    """
    parts = ranking.parts(traits[:, ranking.sets].sum(axis=2).T, n_bins)
    means = [counts.mean(axis=0) for counts in parts]
    return np.stack(means, axis=1)


N_BINS = 80  # parts of the ranking in the figure
EXPERIMENT = "exhaustive"


def _folder(run: RunDir) -> Path:
    return run.path / "exhaustive"


def _calls_folder(run: RunDir) -> Path:
    """Return the folder of finished calls, kept until the stage is complete."""
    return run.path / "exhaustive.pieces"


def _rankings(run: RunDir) -> Cache:
    return Cache(_folder(run), EXPERIMENT)


def _greedy_members(heads: HeadTrainer, added: Sequence[int]) -> tuple[int, ...]:
    """Return greedy's first three encoders, searched without a margin if need be."""
    if len(added) >= SET_SIZE:
        return tuple(sorted(added[:SET_SIZE]))
    return heads.search(margin=-1.0, max_encoders=SET_SIZE).members


def _rank_rows(
    ranking: Ranking, greedy: tuple[int, ...], rows: StoreRows
) -> list[ResultRow]:
    values = {
        "rank": ranking.rank_of(greedy),
        "n_sets": len(ranking.sets),
        "auroc_gap": ranking.gap_of(greedy),
    }
    at: dict[str, Any] = {"experiment": EXPERIMENT, "detector": "greedy_three"}
    at |= {"setting": rows.setting, "dataset": IN_DOMAIN, "split": "validation"}
    n = len(rows.where("validation"))
    return [
        ResultRow(metric=metric, value=float(value), n=n, **at)
        for metric, value in values.items()
    ]


def traits(setting: Setting, n_pool: int) -> dict[tuple[str, Setting], np.ndarray]:
    """Return, by letter and pass, which encoders read that family, `[n_pool]` bool."""
    pool = encoders_read(setting, range(n_pool))
    passes: list[Setting] = [s for s in SETTINGS if any(w == s for w, _ in pool)]
    return {
        (letter, where): np.array([w == where and letter in n for w, n in pool])
        for letter in LETTERS
        for where in passes
    }


def rank(
    heads: HeadTrainer,
    ranking: Ranking,
    added: Sequence[int],
    bootstrap: BootstrapConfig,
) -> tuple[dict[str, np.ndarray], list[ResultRow]]:
    """Compare a pool's best set of three with greedy's; return arrays and rows."""
    rows = heads.pool.rows
    best = ranking.sets[ranking.order[0]]
    greedy = _greedy_members(heads, added)
    threes = {"best_three": tuple(best.tolist()), "greedy_three": greedy}
    scored = [
        DetectorScores(name=name, scores=heads.scores(heads.fit(members)))
        for name, members in threes.items()
    ]
    arrays = {**ranking._asdict(), "greedy": np.array(greedy, np.int32)}
    return arrays, [
        *_rank_rows(ranking, greedy, rows),
        *detection_rows(scored, rows, bootstrap, EXPERIMENT),
    ]


def _enumerate(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    for old in _folder(run).glob("*.pieces"):  # the old place of saved calls
        shutil.copytree(old, _calls_folder(run) / old.stem, dirs_exist_ok=True)
        shutil.rmtree(old)
    config = config.seeded(run.seed)
    settings = settings_of(run)
    heads = {s: HeadTrainer(run_pool(run, s), config) for s in settings}
    searches = {
        setting: Enumeration(trainer, _calls_folder(run) / setting)
        for setting, trainer in heads.items()
    }
    n_heads = sum(search.n_heads(search.calls) for search in searches.values())
    n_missing = sum(search.n_missing() for search in searches.values())
    progress.note(f"exhaustive: {n_missing} of {n_heads} heads still to be trained")
    rows: dict[Setting, list[ResultRow]] = {}

    def work(setting: Setting, tick: Callable[[], None]) -> None:
        ranking = searches[setting].run(lambda n: [tick() for _ in range(n)])
        _, summary = run_selection(run, setting)
        added = [step["added"] for step in summary["rounds"]]
        arrays, rows[setting] = rank(heads[setting], ranking, added, run_bootstrap(run))
        _rankings(run).save(setting, arrays)

    side_by_side(work, settings, update, n_missing)
    publish(run, "exhaustive", [row for s in settings for row in rows[s]], progress)


def read_ranking(run: RunDir, setting: Setting) -> Ranking:
    """Read a setting's ranking."""
    saved = load_part(_rankings(run), setting, EXHAUSTIVE.verb)
    return Ranking(saved["sets"], saved["aurocs"])


def ranking_summary(run: RunDir, setting: Setting) -> dict[str, Any]:
    """Return the parts of a setting's ranking that the report shows, for JSON."""
    saved = load_part(_rankings(run), setting, EXHAUSTIVE.verb)
    ranking = Ranking(saved["sets"], saved["aurocs"])
    greedy = tuple(saved["greedy"].tolist())
    families = traits(setting, int(ranking.sets.max()) + 1)
    ribbon = n_with_trait(ranking, np.stack(list(families.values())), N_BINS)
    best = ranking.sets[ranking.order[0]].tolist()
    return {
        "n_sets": len(ranking.sets),
        "rank": ranking.rank_of(greedy),
        "gap": ranking.gap_of(greedy),
        "greedy": pool_names(setting, greedy),
        "best": pool_names(setting, best),
        "means": [float(x.mean()) for x in ranking.parts(ranking.means, N_BINS)],
        "ribbon": [
            {"family": letter, "reads": reads, "means": means}
            for (letter, reads), means in zip(families, ribbon.tolist(), strict=True)
        ],
    }


EXHAUSTIVE = Stage(
    name="exhaustive",
    verb="select --exhaustive",
    inputs=lambda run: [*row_files(run), run.selection, *encoder_folders(run)],
    outputs=lambda run: [_folder(run), rows_file(run, "exhaustive")],
    work=_enumerate,
    leftovers=lambda run: [_calls_folder(run)],
    presets=SELECT_PRESETS,
    section="select",
)
