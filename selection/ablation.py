"""The stage that takes something away: a signal family, or a token span.

Without a family: the greedy search over the encoders that do not read it. Without a
span: the champion's encoders trained anew, then its head. Both run in the executables
of the ordinary stages; the paper's other variants are rows of `evaluate` already.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.contents import store_files
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.results import ON_REQUEST, ResultRow, publish, rows_file
from extract.run.stages import Stage, side_by_side
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.compiler import set_compiler
from jaxprobe.evaluation import METRICS, Scored, bootstrap_of, detection_rows
from jaxprobe.features.rows import Rows, load_rows
from jaxprobe.features.subsets import FAMILIES, LETTERS
from jaxprobe.fit.grid import default_blocks
from jaxprobe.fit.stage import encoder_folders, settings_at_once
from jaxprobe.model.fusion import PoolOutputs
from jaxprobe.pool import pool_name, pools, read_selection, reads
from jaxprobe.settings import SELECT_PRESETS, SelectConfig, grid_config
from selection.greedy import (
    GreedyConfig,
    NoSignalError,
    Selection,
    fused_probability,
    select,
)
from selection.spans import SPANS, outputs_without, subsets_read, train_without_spans
from selection.stage import fixed_set

EXPERIMENT = "ablation"
Pools = tuple[PoolOutputs, PoolOutputs, PoolOutputs]  # training, validation, all rows


def folder_of(run: RunDir) -> Path:
    """Return where the variants lie."""
    return run.path / "ablations"


def variants(setting: Setting) -> list[str]:
    """Return the names of what is taken away in a setting, in the order of tables."""
    return [
        *(f"without_{family}" for family in FAMILIES),
        *(f"without_{span}_span" for span in SPANS[setting]),
    ]


def candidates_without(setting: Setting, n_pool: int, family: str) -> list[int]:
    """Return the pool positions of the encoders that do not read a family."""
    letter = LETTERS[FAMILIES.index(family)]
    pool = reads(setting, list(range(n_pool)))
    return [i for i, (_, name) in enumerate(pool) if letter not in name]


def _variant_file(run: RunDir, setting: Setting, name: str) -> Path:
    return folder_of(run) / f"{setting}.{name}.scores.safetensors"


def _keep_variant(
    path: Path, key: str, selection: Selection | None, everyone: PoolOutputs
) -> None:
    """Write a variant's encoders and what it says of every row."""
    if selection is None:
        save_cache(path, {"members": np.zeros(0, np.int32)}, key)
        return
    scores = fused_probability(selection, everyone, per_seed=True)
    save_cache(path, {"members": np.array(selection.members), "scores": scores}, key)


def _select_without(
    pools_: Pools, config: SelectConfig, setting: Setting, family: str
) -> Selection | None:
    """Search without a family; None where what is left is no better than chance."""
    train, valid, _ = pools_
    try:
        return select(
            train,
            valid,
            config=config.head,
            train_config=config.train,
            greedy=GreedyConfig(margin=config.margin),
            candidates=candidates_without(setting, train.n_pool, family),
        )
    except NoSignalError:
        return None


def _vary(
    run: RunDir,
    config: SelectConfig,
    key: str,
    setting: Setting,
    tick: Callable[[], None],
) -> None:
    """Make every variant of a setting that an earlier, killed run has not made."""
    read = subsets_read(run)
    members = tuple(read_selection(run, setting)[1]["members"])
    whole = None
    for name in variants(setting):
        path = _variant_file(run, setting, name)
        if load_cache(path, key) is None:
            what = name.removeprefix("without_")
            if what in FAMILIES:
                whole = whole or pools(run, setting)[0]
                found = _select_without(whole, config, setting, what)
                _keep_variant(path, key, found, whole[2])
            else:
                span = what.removesuffix("_span")
                source = outputs_without(folder_of(run), key, span, read)
                train, valid, everyone = pools(run, setting, source)[0]
                found = fixed_set(members, train, valid, config)
                _keep_variant(path, key, found, everyone)
        tick()


def _variant(run: RunDir, setting: Setting, name: str, key: str) -> dict[str, Any]:
    path = _variant_file(run, setting, name)
    found = load_cache(path, key)
    if found is None:
        raise ValueError(
            f"{path} is missing or damaged; run `{ON_REQUEST['ablate']}` again"
        )
    return found


def undefined_rows(name: str, rows: Rows) -> list[ResultRow]:
    """Return the rows of a search that found nothing to select."""
    return [
        ResultRow(
            experiment=EXPERIMENT,
            detector=name,
            setting=rows.setting,
            dataset=dataset,
            split=split,
            metric=metric,
            value=None,
            n=len(rows.where(split, dataset)),
            n_failed=rows.n_unlabelled(split, dataset),
            reason="no encoder of those left is better than chance on validation",
        )
        for (dataset, split), metric in itertools.product(rows.columns(), METRICS)
    ]


def _rows_of(run: RunDir, setting: Setting, key: str) -> list[ResultRow]:
    """Return the rows of a setting's variants."""
    _, rows = load_rows(run, setting)
    found = {name: _variant(run, setting, name, key) for name in variants(setting)}
    scored = [
        Scored(name=name, scores=one["scores"])
        for name, one in found.items()
        if "scores" in one
    ]
    made = detection_rows(scored, rows, bootstrap_of(run), EXPERIMENT)
    empty = [name for name, one in found.items() if "scores" not in one]
    return made + [row for name in empty for row in undefined_rows(name, rows)]


def _inputs(run: RunDir) -> list[Path]:
    """Return everything a variant depends on."""
    chosen = run.path / "selection"
    return [run.labels, run.sweep, chosen, *encoder_folders(run), *store_files(run)]


def _ablate(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    key = " ".join(run.hash_inputs(*_inputs(run)).values())
    read = subsets_read(run)
    n_seeds = grid_config(run).train.n_seeds
    n_blocks = {s: len(default_blocks(n_seeds, read[s])) for s in SETTINGS}
    n_trained = sum(n_blocks[s] * len(SPANS[s]) for s in SETTINGS)
    n_variants = sum(len(variants(setting)) for setting in SETTINGS)
    n_all = n_trained + n_variants

    def train(setting: Setting, tick: Callable[[], None]) -> None:
        folder = folder_of(run)
        train_without_spans(run, folder, key, setting, read[setting], tick)

    def vary(setting: Setting, tick: Callable[[], None]) -> None:
        _vary(run, config, key, setting, tick)

    # The with-context heads need the closed-book encoders, so training comes first.
    at_once = settings_at_once(grid_config(run))
    side_by_side(train, SETTINGS, update, n_all, at_once=at_once)
    side_by_side(
        vary, SETTINGS, lambda done, total: update(n_trained + done, total), n_all
    )
    publish(
        run,
        "ablate",
        [row for s in SETTINGS for row in _rows_of(run, s, key)],
        progress,
    )
    write_json_atomic(folder_of(run) / "summary.json", _summary(run, key))


def _summary(run: RunDir, key: str) -> dict[str, dict[str, list[str]]]:
    """Return the printed names of every variant's encoders, setting by setting."""
    summary = {
        setting: {
            name: [
                pool_name(setting, i)
                for i in _variant(run, setting, name, key)["members"].tolist()
            ]
            for name in variants(setting)
        }
        for setting in SETTINGS
    }
    alone = read_selection(run, "single_pass")[1]["members"]  # a row of `evaluate`
    summary["with_context"]["without_closed_book"] = [
        pool_name("single_pass", i) for i in alone
    ]
    return summary


def ablation_summary(run: RunDir) -> dict[str, dict[str, list[str]]]:
    """Return which encoders every variant reads, by setting and name."""
    return json.loads((folder_of(run) / "summary.json").read_text(encoding="utf-8"))


ABLATE = Stage(
    name="ablate",
    inputs=_inputs,
    outputs=lambda run: [folder_of(run), rows_file(run, "ablate")],
    work=_ablate,
    presets=SELECT_PRESETS,
    section="select",
)
