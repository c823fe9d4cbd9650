"""The stage that ranks every set of three encoders, and finds greedy's place there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.directory import RunDir
from extract.run.results import ON_REQUEST, ResultRow, publish, rows_file
from extract.run.stages import Stage, side_by_side
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.compiler import set_compiler
from jaxprobe.evaluation import Scored, bootstrap_of, detection_rows
from jaxprobe.features.rows import Rows
from jaxprobe.features.subsets import LETTERS
from jaxprobe.fit.stage import encoder_folders
from jaxprobe.model.fusion import PoolOutputs
from jaxprobe.pool import pool_name, pools, read_selection, reads
from jaxprobe.settings import SELECT_PRESETS, SelectConfig
from selection.exhaustive import SET_SIZE, Enumeration, Ranking, carried
from selection.greedy import GreedyConfig, fused_probability, select
from selection.stage import fixed_set

N_BINS = 80  # parts of the ranking that the figure shows
EXPERIMENT = "exhaustive"


def folder_of(run: RunDir) -> Path:
    """Return where the rankings lie."""
    return run.path / "exhaustive"


def _ranking_file(run: RunDir, setting: Setting) -> Path:
    """Return where a setting's ranking lies."""
    return folder_of(run) / f"{setting}.safetensors"


def _greedy_members(
    summary: dict[str, Any],
    train: PoolOutputs,
    valid: PoolOutputs,
    config: SelectConfig,
) -> tuple[int, ...]:
    """Return the search's set after three rounds.

    Where the search stopped earlier, it is continued without a margin, so that what is
    ranked is always as large as what it is ranked among.
    """
    added = [r["added"] for r in summary["rounds"][:SET_SIZE]]
    if len(added) == SET_SIZE:
        return tuple(sorted(added))
    found = select(
        train,
        valid,
        config=config.head,
        train_config=config.train,
        greedy=GreedyConfig(margin=-1.0, max_encoders=SET_SIZE),
    )
    return found.members


def _rank_rows(
    ranking: Ranking, greedy: tuple[int, ...], rows: Rows
) -> list[ResultRow]:
    """Return where greedy's set stands, as rows."""
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
            dataset=str(rows.datasets[where[0]]),
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
    pool = reads(setting, list(range(n_pool)))
    passes = [s for s in SETTINGS if any(where == s for where, _ in pool)]
    return {
        f"{letter}:{which}": np.array(
            [where == which and letter in name for where, name in pool]
        )
        for letter in LETTERS
        for which in passes
    }


def _facts(ranking: Ranking, greedy: tuple[int, ...], setting: Setting):
    """Return what the report shows of a ranking, as arrays."""
    of_pool = traits(setting, int(ranking.sets.max()) + 1)
    means = ranking.means[ranking.order]
    return {
        **ranking._asdict(),
        "greedy": np.array(greedy, np.int32),
        "best": ranking.sets[ranking.order[0]],
        "ordered_means": np.stack([p.mean() for p in np.array_split(means, N_BINS)]),
        "ribbon": carried(ranking, np.stack(list(of_pool.values())), N_BINS),
    }


def _rank_setting(
    run: RunDir,
    config: SelectConfig,
    setting: Setting,
    search: Enumeration,
    everyone: PoolOutputs,
    rows: Rows,
    tick: Callable[[], None],
) -> list[ResultRow]:
    """Rank a setting's sets; return its rows."""

    def trained(n_heads: int) -> None:
        for _ in range(n_heads):
            tick()

    ranking = search.run(trained)
    train, valid = search.train, search.valid
    _, summary = read_selection(run, setting)
    greedy = _greedy_members(summary, train, valid, config)
    best = tuple(map(int, ranking.sets[ranking.order[0]]))
    scored = [
        Scored(
            name=name,
            scores=fused_probability(
                fixed_set(members, train, valid, config), everyone, per_seed=True
            ),
        )
        for name, members in (("best_three", best), ("greedy_three", greedy))
    ]
    save_cache(
        _ranking_file(run, setting), _facts(ranking, greedy, setting), EXPERIMENT
    )
    return [
        *_rank_rows(ranking, greedy, rows),
        *detection_rows(scored, rows, bootstrap_of(run), EXPERIMENT),
    ]


def _enumerate(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    found: dict[Setting, list[ResultRow]] = {}
    parts = {}
    for setting in SETTINGS:
        (train, valid, everyone), rows = pools(run, setting)
        search = Enumeration(
            train=train,
            valid=valid,
            config=config.head,
            train_config=config.train,
            folder=folder_of(run) / f"{setting}.pieces",
        )
        parts[setting] = search, everyone, rows
    searches = [search for search, *_ in parts.values()]
    n_heads = sum(len(search.sets) * search.train.n_seeds for search in searches)
    n_missing = sum(search.n_missing() for search in searches)
    progress.note(f"exhaustive: {n_missing} of {n_heads} heads are still to be trained")

    def work(setting: Setting, tick: Callable[[], None]) -> None:
        found[setting] = _rank_setting(run, config, setting, *parts[setting], tick)

    side_by_side(work, SETTINGS, update, n_missing)
    publish(run, "exhaustive", [r for s in SETTINGS for r in found[s]], progress)
    for search in searches:  # the rankings hold all of it now
        shutil.rmtree(search.folder, ignore_errors=True)


def ranking_summary(run: RunDir, setting: Setting) -> dict[str, Any]:
    """Return what the report shows of a setting's ranking, as JSON values."""
    found = load_cache(_ranking_file(run, setting), EXPERIMENT)
    if found is None:
        raise ValueError(
            f"{_ranking_file(run, setting)} is damaged; run `{ON_REQUEST[EXPERIMENT]}` "
            "again"
        )
    ranking = Ranking(found["sets"], found["aurocs"])
    greedy = tuple(found["greedy"].tolist())
    n_pool = int(ranking.sets.max()) + 1
    return {
        "n_sets": len(ranking.sets),
        "rank": ranking.rank_of(greedy),
        "gap": ranking.gap_of(greedy),
        "greedy": [pool_name(setting, i) for i in greedy],
        "best": [pool_name(setting, i) for i in found["best"].tolist()],
        "means": found["ordered_means"].tolist(),
        "ribbon": dict(
            zip(traits(setting, n_pool), found["ribbon"].tolist(), strict=True)
        ),
    }


EXHAUSTIVE = Stage(
    name="exhaustive",
    inputs=lambda run: [run.labels, run.path / "selection", *encoder_folders(run)],
    outputs=lambda run: [folder_of(run), rows_file(run, "exhaustive")],
    work=_enumerate,
    presets=SELECT_PRESETS,
    section="select",
)
