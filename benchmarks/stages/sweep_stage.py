"""The stage that chooses the layer of the hidden states."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stages.presets import RunConfig
from benchmarks.stages.rows import Rows, load_rows
from benchmarks.stages.stage import Progress, Stage, Update
from benchmarks.stages.torch_stages import store_files
from extract.records import SETTINGS
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from jaxprobe.features.reading import mean_answer_states
from selection.sweep import SweepConfig, sweep_layers


def _sweep_rows(rows: Rows, split: str, limit: int) -> np.ndarray:
    """Return up to `limit` original rows of a split, in stored order."""
    where = rows.where(split)
    return where[rows.variants[where] == "original"][:limit]


def _sweep(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    found: dict[str, Any] = {}
    for number, setting in enumerate(SETTINGS):
        store, rows = load_rows(run, setting)
        train, valid = (
            _sweep_rows(rows, split, config.n_sweep)
            for split in ("train", "validation")
        )
        layers = store.spec.hidden_layers
        states = [
            np.stack(
                [mean_answer_states(store, where, layer) for layer in layers], axis=1
            )
            for where in (train, valid)
        ]
        sweep = sweep_layers(
            states[0],
            rows.labels[train],
            states[1],
            rows.labels[valid],
            SweepConfig(n_seeds=config.train.n_seeds, root_seed=config.seed),
        )
        found[setting] = {
            "layers": list(layers),
            "auroc": [[round(float(x), 6) for x in row] for row in sweep.aurocs],
            "best": layers[sweep.best_layer],
        }
        update(number + 1, len(SETTINGS))
    # One layer serves both settings, as in the paper: the best of their mean.
    mean = np.mean([np.mean(f["auroc"], axis=1) for f in found.values()], axis=0)
    best = found[SETTINGS[0]]["layers"][int(np.argmax(mean))]
    if len(layers) == 1:
        progress.note(
            f"sweep: the store keeps layer {best} alone, so there is nothing to choose"
        )
    write_json_atomic(run.sweep, {"layer": best, "settings": found})


def chosen_layer(run: RunDir) -> int:
    """Return the layer the hidden family is read from."""
    return int(json.loads(run.sweep.read_text())["layer"])


def stored(run: RunDir) -> list[Path]:
    """Return what identifies the stores of both settings."""
    return [path for setting in SETTINGS for path in store_files(run, setting)]


SWEEP = Stage(
    name="sweep",
    inputs=lambda run: [run.labels, *stored(run)],
    outputs=lambda run: [run.sweep],
    work=_sweep,
)
