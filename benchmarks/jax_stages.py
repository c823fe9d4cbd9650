"""The stages that train and choose: sweep, train, select, calibrate."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from benchmarks.evaluation import permute_by_question
from benchmarks.presets import RunConfig
from benchmarks.rows import Rows, load_rows, partners
from benchmarks.stage import Progress, Stage, Update
from benchmarks.torch_stages import store_files
from extract.atomic import sha256_file, write_json_atomic
from extract.records import SETTINGS, Setting
from extract.rundir import RunDir
from extract.store import FeatureStore
from jaxprobe import checkpoint
from jaxprobe.detector import HeadName
from jaxprobe.encoder import Encoder
from jaxprobe.features import (
    FamilyDims,
    FamilyTokens,
    Standardizer,
    fit_standardizer,
    split_families,
)
from jaxprobe.fit import FitInfo, TrainConfig
from jaxprobe.fusion import PoolCodes, pool_codes
from jaxprobe.grid import (
    Block,
    Codes,
    Member,
    Trained,
    default_blocks,
    encode,
    fit_blocks,
    grid_members,
    join,
    labelled,
)
from jaxprobe.keepsake import keep, recall
from jaxprobe.reading import (
    family_dims,
    longest_spans,
    mean_answer_states,
    read_features,
)
from jaxprobe.subsets import N_SUBSETS, subset_index
from selection.greedy import (
    GreedyConfig,
    Selection,
    fit_sets,
    fused_probability,
    select,
    slots_for,
)
from selection.sweep import SweepConfig, sweep_layers

ROWS_AT_ONCE = 1024  # examples standardised and encoded together, to bound memory
SINGLES = tuple(subset_index(letter) for letter in "HPRA")
EVERY_FAMILY = subset_index("HPRA")
BRANCHES: tuple[HeadName, ...] = ("closed_book", "with_context", "single_pass")


def branch_setting(branch: HeadName) -> Setting:
    """Return the setting whose answers a branch scores."""
    return "closed_book" if branch == "closed_book" else "with_context"


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
    write_json_atomic(run.sweep, {"layer": best, "settings": found})


def chosen_layer(run: RunDir) -> int:
    """Return the layer the hidden family is read from."""
    return int(json.loads(run.sweep.read_text())["layer"])


_split = jax.jit(split_families, static_argnames="dims")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Tokens:
    """Reads standardised tokens of stored rows, in one padded width."""

    store: FeatureStore
    setting: Setting
    layer: int
    dims: FamilyDims
    standardizer: Standardizer
    widths: tuple[int, ...]

    def __call__(self, where: np.ndarray) -> FamilyTokens:
        features = read_features(
            self.store, self.setting, self.layer, where, self.widths
        )
        return _split(features, dims=self.dims, standardizer=self.standardizer)


def _tokens_of(run: RunDir, setting: Setting, store: FeatureStore, rows: Rows):
    """Fit the standardisation on the training rows."""
    layer = chosen_layer(run)
    shapes = {name: family.shape for name, family in store.spec.families.items()}
    widths = longest_spans(store.spec.spans, setting)
    train = read_features(store, setting, layer, rows.where("train"), widths)
    return _Tokens(
        store=store,
        setting=setting,
        layer=layer,
        dims=family_dims(shapes),
        standardizer=fit_standardizer(train),
        widths=widths,
    )


def _restored(path: Path, block: Block, key: str) -> Trained | None:
    """Return a block that an earlier, killed run has finished."""
    arrays = recall(path, key)
    if arrays is None:
        return None
    info = FitInfo(**{name: arrays.pop(f"info.{name}") for name in FitInfo._fields})
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return Trained(block.members, tree, info)


def _kept(path: Path, trained: Trained, key: str) -> None:
    arrays = flax.traverse_util.flatten_dict(trained.params, sep="/")
    info = {f"info.{name}": value for name, value in trained.info._asdict().items()}
    keep(path, {**arrays, **info}, key)


def _train_blocks(
    folder: Path,
    key: str,
    encoder: Encoder,
    config: TrainConfig,
    data: tuple[Any, Any],
    blocks: tuple[Block, ...],
) -> Iterator[Trained]:
    """Yield every block, trained now or by an earlier run."""
    missing = []
    for block in blocks:
        path = folder / f"{'-'.join(map(str, block.subsets + block.seeds))}.safetensors"
        found = _restored(path, block, key)
        if found is None:
            missing.append((path, block))
        else:
            yield found
    trained = fit_blocks(
        [block for _, block in missing], *data, encoder=encoder, config=config
    )
    for (path, _), part in zip(missing, trained, strict=True):
        _kept(path, part, key)
        yield part


def _encode_all(
    trained: Trained,
    read: Callable[[np.ndarray], FamilyTokens],
    n_rows: int,
    encoder: Encoder,
) -> Codes:
    """Return every member's codes on every stored row, a few rows at a time.

    All parts have one shape, so that one executable serves them; the last one repeats
    its last row, which is cut off again.
    """
    size = -(-n_rows // -(-n_rows // ROWS_AT_ONCE))
    parts = []
    for start in range(0, n_rows, size):
        where = np.minimum(np.arange(start, start + size), n_rows - 1)
        parts.append(jax.device_get(encode(trained, read(where), encoder=encoder)))
    return Codes(
        np.concatenate([part.logits for part in parts], axis=1)[:, :n_rows],
        np.concatenate([part.pooled for part in parts], axis=1)[:, :n_rows],
    )


def _is_trained(path: Path, key: str) -> bool:
    """Tell whether an earlier, killed run has finished a setting with this data."""
    if not path.exists():
        return False
    try:
        return checkpoint.restore(path)[1]["key"] == key
    except ValueError:
        return False  # damaged: trained again and replaced


def _train_setting(
    run: RunDir, config: RunConfig, setting: Setting, update: Update
) -> None:
    store, rows = load_rows(run, setting)
    key = f"{sha256_file(run.sweep)} {sha256_file(run.labels)} {store.id}"
    if _is_trained(run.encoders(setting), key):
        return
    read = _tokens_of(run, setting, store, rows)
    train_rows, valid_rows = rows.where("train"), rows.where("validation")
    train, valid = read(train_rows), read(valid_rows)
    encoder = Encoder(config.encoder, read.dims)
    folder = run.encoders(setting).with_name(f"{setting}.members")
    n_seeds = config.train.n_seeds
    grid = default_blocks(n_seeds)
    control = tuple(Block((EVERY_FAMILY,), (seed,)) for seed in range(n_seeds))
    n_before = SETTINGS.index(setting) * (len(grid) + len(control))
    n_total = len(SETTINGS) * (len(grid) + len(control))

    def fit(labels: np.ndarray, blocks: tuple[Block, ...], name: str, n_done: int):
        data = (
            labelled(train, labels[train_rows]),
            labelled(valid, labels[valid_rows]),
        )
        parts = []
        for part in _train_blocks(
            folder / name, key, encoder, config.train, data, blocks
        ):
            parts.append(part)
            update(n_before + n_done + len(parts), n_total)
        return parts

    permuted = permute_by_question(rows, config.seed)
    trained = join(fit(rows.labels, grid, "grid", 0), grid_members(n_seeds))
    chance = join(
        fit(permuted, control, "permuted", len(grid)),
        [Member(EVERY_FAMILY, seed) for seed in range(n_seeds)],
    )
    n_rows = len(rows.ids)
    codes = _encode_all(trained, read, n_rows, encoder)
    control_codes = _encode_all(chance, read, n_rows, encoder)
    checkpoint.save(
        run.encoders(setting),
        {
            "params": trained.params,
            "info": trained.info._asdict(),
            "standardizer": read.standardizer._asdict(),
            "codes": codes._asdict(),
            "control": {"logits": control_codes.logits, "labels": permuted},
        },
        {"key": key, "layer": read.layer, "dims": dataclasses.asdict(read.dims)},
    )
    shutil.rmtree(folder, ignore_errors=True)  # the checkpoint holds all of it now


def _train(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    for setting in SETTINGS:
        _train_setting(run, config, setting, update)


def read_codes(run: RunDir, setting: Setting) -> Codes:
    """Return what every trained encoder of a setting says of its rows."""
    tree, _ = checkpoint.restore(run.encoders(setting))
    return Codes(**tree["codes"])


def setting_codes(run: RunDir, setting: Setting) -> tuple[tuple[Codes, ...], Rows]:
    """Return the codes of a setting's pool, pass by pass, and its rows.

    With context the pool is the with-context encoders, then the closed-book ones
    reading the closed-book pass of the same question.
    """
    _, rows = load_rows(run, setting)
    own = read_codes(run, setting)
    if setting == "closed_book":
        return (own,), rows
    _, cached_rows = load_rows(run, "closed_book")
    cached = read_codes(run, "closed_book")
    return (own, _at(cached, partners(rows, cached_rows))), rows


def _at(codes: Codes, where: np.ndarray) -> Codes:
    return Codes(codes.logits[:, where], codes.pooled[:, where])


def _pool(
    codes: tuple[Codes, ...], rows: Rows, where: np.ndarray, n_seeds: int
) -> PoolCodes:
    return pool_codes(tuple(_at(c, where) for c in codes), n_seeds, rows.labels[where])


def _fixed_set(
    members: tuple[int, ...], train: PoolCodes, valid: PoolCodes, config: RunConfig
) -> Selection:
    """Train the heads of a given set, in the search's shapes if they fit."""
    shape = slots_for(config.fusion, len(members))
    heads = fit_sets(
        [members],
        train,
        valid,
        config=shape,
        train_config=config.fusion_train,
        n_calls=train.logits.shape[1],
    )
    params, info = jax.tree.map(lambda x: x[0], tuple(heads))
    return Selection(members, float(info.best_auroc.mean()), (), shape, params, info)


def _story(selection: Selection, margin: float) -> dict[str, Any]:
    """Return how the search went, as JSON values."""
    last = selection.path[-1]
    gain = last.auroc - selection.auroc
    stop = (
        "the pool is used up"
        if last.accepted
        else f"the best addition gains {gain:+.4f}, not more than {margin:g}"
    )
    return {
        "members": list(selection.members),
        "n_slots": selection.config.n_slots,
        "stop": stop,
        "rounds": [
            {
                "added": r.best,
                "auroc": r.auroc,
                "candidates": dict(
                    zip(
                        map(str, r.candidates),
                        map(float, r.aurocs.mean(axis=1)),
                        strict=True,
                    )
                ),
            }
            for r in selection.path
            if r.accepted
        ],
    }


def _save_selection(
    run: RunDir,
    config: RunConfig,
    branch: HeadName,
    found: dict[str, Selection],
    everyone: PoolCodes,
) -> None:
    tree = {
        name: {
            "params": one.params,
            "scores": fused_probability(one, everyone, per_seed=True),
        }
        for name, one in found.items()
    }
    story = _story(found["champion"], config.margin)
    checkpoint.save(run.path / "selection" / branch, tree, story)


def _select(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    n_done = 0
    for setting in SETTINGS:
        codes, rows = setting_codes(run, setting)
        train, valid, everyone = (
            _pool(codes, rows, where, config.train.n_seeds)
            for where in (
                rows.where("train"),
                rows.where("validation"),
                np.arange(len(rows.ids)),
            )
        )
        # The single pass searches the with-context half of the same pool.
        branches = [b for b in BRANCHES if branch_setting(b) == setting]
        for branch in branches:
            champion = select(
                train,
                valid,
                config=config.fusion,
                train_config=config.fusion_train,
                greedy=GreedyConfig(margin=config.margin),
                n_candidates=N_SUBSETS if branch == "single_pass" else None,
            )
            found = {"champion": champion}
            if branch != "single_pass":
                every = tuple(range(train.logits.shape[1]))
                found["late_fusion_singles"] = _fixed_set(SINGLES, train, valid, config)
                found["late_fusion_all"] = _fixed_set(every, train, valid, config)
            _save_selection(run, config, branch, found, everyone)
            n_done += 1
            update(n_done, len(BRANCHES))


def read_selection(
    run: RunDir, branch: HeadName
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a branch's heads and scores, and how the search went."""
    return checkpoint.restore(run.path / "selection" / branch)


def _folders(run: RunDir) -> list[Path]:
    return [run.encoders(setting) for setting in SETTINGS]


def stored(run: RunDir) -> list[Path]:
    """Return what identifies the stores of both settings."""
    return [path for setting in SETTINGS for path in store_files(run, setting)]


SWEEP = Stage(
    name="sweep",
    inputs=lambda run: [run.labels, *stored(run)],
    outputs=lambda run: [run.sweep],
    work=_sweep,
)
TRAIN = Stage(
    name="train",
    inputs=lambda run: [run.labels, run.sweep, *stored(run)],
    outputs=_folders,
    work=_train,
)
SELECT = Stage(
    name="select",
    inputs=lambda run: [run.labels, *_folders(run)],
    outputs=lambda run: [run.path / "selection"],
    work=_select,
)
