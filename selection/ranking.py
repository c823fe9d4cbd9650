"""The stage that ranks every set of three encoders, and finds greedy's place there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract.records import IN_DOMAIN, SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.contents import row_files, settings_of
from extract.run.directory import RunDir
from extract.run.results import ResultRow, publish, rows_file
from extract.run.stages import Stage, side_by_side
from jaxprobe.checkpoint import Cache
from jaxprobe.config import SELECT_PRESETS, SelectConfig, set_compiler
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.rows import Rows
from jaxprobe.features.subsets import LETTERS
from jaxprobe.metrics import BootstrapConfig
from jaxprobe.pool import pool_names, reads
from jaxprobe.stage import encoder_folders, run_bootstrap, run_pool, run_selection
from selection.exhaustive import SET_SIZE, Enumeration, Ranking, carried
from selection.greedy import GreedyConfig, HeadTrainer
from selection.stage import load_part

N_BINS = 80  # parts of the ranking that the figure shows
EXPERIMENT = "exhaustive"


def _folder(run: RunDir) -> Path:
    return run.path / "exhaustive"


def _rankings(run: RunDir) -> Cache:
    return Cache(_folder(run), EXPERIMENT)


def _greedy_members(heads: HeadTrainer, added: Sequence[int]) -> tuple[int, ...]:
    """Return the search's set after three rounds.

    Where the search stopped earlier, it is continued without a margin, so that what is
    ranked is always as large as what it is ranked among.

    Args:
      heads: of the search.
      added: pool positions that it added, in order.
    """
    if len(added) >= SET_SIZE:
        return tuple(sorted(added[:SET_SIZE]))
    return heads.search(greedy=GreedyConfig(margin=-1.0, max_encoders=SET_SIZE)).members


def _rank_rows(
    ranking: Ranking, greedy: tuple[int, ...], rows: Rows
) -> list[ResultRow]:
    """Return the rank of greedy's set, as rows."""
    where = rows.where("validation")
    values = {
        "rank": ranking.rank_of(greedy),
        "n_sets": len(ranking.sets),
        "auroc_gap": ranking.gap_of(greedy),
    }
    return [
        ResultRow(
            experiment=EXPERIMENT,
            detector="greedy_three",
            setting=rows.setting,
            dataset=IN_DOMAIN,
            split="validation",
            metric=metric,
            value=float(value),
            n=len(where),
        )
        for metric, value in values.items()
    ]


def traits(setting: Setting, n_pool: int) -> dict[str, np.ndarray]:
    """Return which encoders of a pool read which family in which pass.

    Returns:
      `[n_pool]` bool by "family letter:pass", such as "H:with_context".
    """
    pool = reads(setting, range(n_pool))
    passes = [s for s in SETTINGS if any(where == s for where, _ in pool)]
    return {
        f"{letter}:{where}": np.array([w == where and letter in n for w, n in pool])
        for letter in LETTERS
        for where in passes
    }


def rank(
    heads: HeadTrainer,
    ranking: Ranking,
    added: Sequence[int],
    bootstrap: BootstrapConfig,
) -> tuple[dict[str, np.ndarray], list[ResultRow]]:
    """Compare a pool's best set of three with greedy's.

    Args:
      heads: of the pool.
      ranking: of all its sets.
      added: pool positions that the greedy search added, in order.
      bootstrap: how intervals are made.

    Returns:
      What the report shows of the ranking, and the rows of both sets.
    """
    rows = heads.pool.rows
    best = ranking.sets[ranking.order[0]]
    greedy = _greedy_members(heads, added)
    scored = [
        Scored(name=name, scores=heads.scores(heads.fit(members)))
        for name, members in (
            ("best_three", tuple(best.tolist())),
            ("greedy_three", greedy),
        )
    ]
    families = list(traits(rows.setting, heads.pool.train.n_pool).values())
    parts = np.array_split(ranking.means[ranking.order], N_BINS)
    arrays = {
        **ranking._asdict(),
        "greedy": np.array(greedy, np.int32),
        "best": best,
        "ordered_means": np.stack([part.mean() for part in parts]),
        "ribbon": carried(ranking, np.stack(families), N_BINS),
    }
    return arrays, [
        *_rank_rows(ranking, greedy, rows),
        *detection_rows(scored, rows, bootstrap, EXPERIMENT),
    ]


def _enumerate(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    settings = settings_of(run)
    heads = {s: HeadTrainer(run_pool(run, s), config) for s in settings}
    searches = {
        setting: Enumeration(
            train=trainer.pool.train,
            valid=trainer.pool.valid,
            config=config.head,
            train_config=config.train,
            folder=_folder(run) / f"{setting}.pieces",
        )
        for setting, trainer in heads.items()
    }
    n_heads = sum(
        len(search.sets) * search.train.n_seeds for search in searches.values()
    )
    n_missing = sum(search.n_missing() for search in searches.values())
    progress.note(f"exhaustive: {n_missing} of {n_heads} heads are still to be trained")
    rows: dict[Setting, list[ResultRow]] = {}

    def work(setting: Setting, tick: Callable[[], None]) -> None:
        ranking = searches[setting].run(lambda n: [tick() for _ in range(n)])
        _, summary = run_selection(run, setting)
        added = [step["added"] for step in summary["rounds"]]
        arrays, rows[setting] = rank(heads[setting], ranking, added, run_bootstrap(run))
        _rankings(run).save(setting, arrays)

    side_by_side(work, settings, update, n_missing)
    publish(run, "exhaustive", [row for s in settings for row in rows[s]], progress)
    for search in searches.values():  # the rankings hold all of it now
        search.cache.clear()


def read_ranking(run: RunDir, setting: Setting) -> Ranking:
    """Return a setting's ranking.

    Raises:
      ValueError: it was not made, or is damaged.
    """
    saved = load_part(_rankings(run), setting, "exhaustive")
    return Ranking(saved["sets"], saved["aurocs"])


def ranking_summary(run: RunDir, setting: Setting) -> dict[str, Any]:
    """Return what the report shows of a setting's ranking, as JSON values."""
    saved = load_part(_rankings(run), setting, "exhaustive")
    ranking = Ranking(saved["sets"], saved["aurocs"])
    greedy = tuple(saved["greedy"].tolist())
    names = traits(setting, int(ranking.sets.max()) + 1)
    return {
        "n_sets": len(ranking.sets),
        "rank": ranking.rank_of(greedy),
        "gap": ranking.gap_of(greedy),
        "greedy": pool_names(setting, greedy),
        "best": pool_names(setting, saved["best"].tolist()),
        "means": saved["ordered_means"].tolist(),
        "ribbon": dict(zip(names, saved["ribbon"].tolist(), strict=True)),
    }


EXHAUSTIVE = Stage(
    name="exhaustive",
    inputs=lambda run: [*row_files(run), run.selection, *encoder_folders(run)],
    outputs=lambda run: [_folder(run), rows_file(run, "exhaustive")],
    work=_enumerate,
    presets=SELECT_PRESETS,
    section="select",
)
