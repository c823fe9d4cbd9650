"""What training and selection will take, from a few batches of the run's own rows."""

import dataclasses
import os
import time
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.forecasts.train_work import Workload, step_flops
from benchmarks.stages.forecast import Forecast
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.rows import Rows, load_rows
from benchmarks.stages.select_stage import BRANCHES, SELECT, branch_setting, pools
from benchmarks.stages.sweep_stage import chosen_layer
from benchmarks.stages.train_sides import settings_at_once
from benchmarks.stages.train_stage import EVERY_FAMILY, TRAIN
from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from extract.store.read import FeatureStore
from jaxprobe.features.families import split_families
from jaxprobe.features.reading import (
    family_dims,
    fit_reading,
    longest_spans,
    read_features,
)
from jaxprobe.features.subsets import N_SUBSETS
from jaxprobe.fit.grid import Block, Labelled, default_blocks, fit_blocks, labelled
from jaxprobe.model.encoder import Encoder
from jaxprobe.model.fusion import PoolOutputs
from selection.greedy import fit_sets, slots_for

N_BATCHES = 10  # that the probe trains on
N_ROUNDS = 5  # of a search: the paper's sets of four, and a round that gains nothing
_FORWARD = 1 / 3  # of a training step, which is three products of matrices for one
_BYTES = 4  # of a float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Probed:
    """What a setting's probe found.

    Attributes:
      compiling: seconds of the first call, beyond a later one.
      epoch: seconds of one epoch over all rows, of all members of the grid.
      control: likewise of the permuted-label control's members.
      n_rows: training rows, and all rows of the store.
      params_bytes: of one member's weights.
      held_bytes: of the tokens that are held.
    """

    compiling: float
    epoch: float
    control: float
    n_rows: tuple[int, int]
    params_bytes: int
    held_bytes: int


def _some(rows: Rows, n_most: int) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """Return training and validation rows of a probe, and all rows' share of them."""
    train, valid = rows.where("train"), rows.where("validation")
    n_train = min(len(train), n_most)
    share = len(train) / max(1, n_train)
    return (train[:n_train], valid[: max(1, round(len(valid) / share))]), share


def _read(
    run: RunDir, setting: Setting, store: FeatureStore, rows: Rows, where: Sequence
) -> list[Labelled]:
    """Return standardised rows of the store with their labels."""
    widths, dims = longest_spans(store.spec.spans, setting), family_dims(store)
    layer = chosen_layer(run)
    found = [read_features(store, setting, layer, some, widths) for some in where]
    standardizer = fit_reading(found[0], dims)
    return [
        labelled(split_families(one, dims, standardizer), rows.labels[some])
        for one, some in zip(found, where, strict=True)
    ]


def _probe(run: RunDir, config: RunConfig, setting: Setting) -> _Probed:
    """Train a few members for one epoch on ten batches, twice."""
    store, rows = load_rows(run, setting)
    size = config.train.batch_size
    where, share = _some(rows, N_BATCHES * size)
    train, valid = _read(run, setting, store, rows, where)
    dims, widths = family_dims(store), longest_spans(store.spec.spans, setting)
    workload = Workload(
        encoder=config.encoder,
        dims=dims,
        spans=tuple((1, n) for n in widths),
        batch_size=size,
        n_steps=1,
        n_seeds=config.train.n_seeds,
    )
    how = {
        "encoder": Encoder(config.encoder, dims),
        "config": dataclasses.replace(config.train, max_epochs=1),
    }
    whole = default_blocks(config.train.n_seeds)
    is_alone = len(whole[0].members) == 1  # one by one, as on a CPU
    # As many side by side as the stage trains: they share the cores.
    n_blocks = (os.cpu_count() or 1) if is_alone else 1
    blocks = [Block((EVERY_FAMILY,), (seed,)) for seed in range(n_blocks)]
    blocks = blocks if is_alone else list(whole)
    began = time.monotonic()
    (first,) = fit_blocks(blocks[:1], train, valid, **how)
    compiled = time.monotonic()
    list(fit_blocks([blocks[0], *blocks], train, valid, **how))
    seconds = (time.monotonic() - compiled) / 2  # one alone, then all of them
    work = sum(step_flops(workload, m) for b in blocks for m in b.members)
    rate = seconds * share / work  # seconds per operation of a step
    every = rate * sum(step_flops(workload, m) for m in workload.members)
    fullest = step_flops(workload, (EVERY_FAMILY, 0))
    leaves = jax.tree.leaves(first.params)
    n_held = len(rows.where("train")) + len(rows.where("validation"))
    return _Probed(
        compiling=max(0.0, compiled - began - seconds),
        epoch=every,
        control=rate * fullest * config.train.n_seeds,
        n_rows=(len(rows.where("train")), len(rows.ids)),
        params_bytes=sum(x.nbytes for x in leaves) // len(first.members),
        held_bytes=n_held * sum(widths) * dims.total * _BYTES,
    )


def forecast_train(run: RunDir, config: RunConfig) -> Forecast:
    """Return what training takes if no member stops early."""
    run.hash_inputs(*TRAIN.inputs(run))
    found = [_probe(run, config, setting) for setting in SETTINGS]
    n_members = (N_SUBSETS + 1) * config.train.n_seeds
    pooled = 1 + config.encoder.d_pooled
    disk = sum(
        N_SUBSETS * config.train.n_seeds * (p.params_bytes + p.n_rows[1] * pooled * 4)
        for p in found
    )
    epochs = config.train.max_epochs
    # Settings that train side by side compile so, each on a core of its own.
    compiling = (max if settings_at_once(config) > 1 else sum)(
        p.compiling for p in found
    )
    seconds = compiling + sum(
        (epochs + _FORWARD * p.n_rows[1] / max(1, p.n_rows[0])) * (p.epoch + p.control)
        for p in found
    )
    streamed = "" if config.stream is None else "; reading the store comes on top"
    return Forecast(
        stage="train",
        memory_bytes=(
            sum(p.held_bytes for p in found)
            if config.stream is None
            else 2
            * config.stream.n_chunk
            * config.stream.n_mixed
            * max(p.held_bytes // max(1, p.n_rows[0]) for p in found)
        ),
        disk_bytes=disk,
        seconds=seconds,
        basis=(
            f"{n_members} members in each of {len(found)} settings, at most {epochs} "
            f"epochs each (early stopping makes them fewer); time from {N_BATCHES} "
            "batches of members that read every family, scaled by rows, epochs and "
            f"operations{streamed}; memory is that of the rows held on the device"
        ),
    )


def _cut(codes: PoolOutputs, n_rows: int) -> PoolOutputs:
    """Return the codes of the first rows."""
    return PoolOutputs(
        codes.outputs[..., :n_rows], codes.labels[:n_rows], codes.weights[:n_rows]
    )


def forecast_select(run: RunDir, config: RunConfig) -> Forecast:
    """Return what selection takes if it goes five rounds and no head stops early."""
    run.hash_inputs(*SELECT.inputs(run))
    epochs = config.fusion_train.max_epochs
    once = dataclasses.replace(config.fusion_train, max_epochs=1)
    seconds, n_heads, held = 0.0, 0, 0
    for setting in SETTINGS:
        (train, valid, everyone), _ = pools(run, config, setting)
        n_train = int(train.labels.shape[0])
        n_probed = min(n_train, N_BATCHES * config.fusion_train.batch_size)
        share = n_train / max(1, n_probed)
        n_valid = max(1, round(valid.labels.shape[0] / share))
        some = _cut(train, n_probed), _cut(valid, n_valid)
        sets = [(c,) for c in range(train.n_pool)]
        shape = slots_for(config.fusion, 1)
        took = []
        for _ in range(2):
            began = time.monotonic()
            fit_sets(sets, *some, config=shape, train_config=once)
            took.append(time.monotonic() - began)
        # A search of N_ROUNDS rounds per branch, and two fixed sets per setting, each
        # in a call padded to the pool.
        n_calls = N_ROUNDS * sum(branch_setting(b) == setting for b in BRANCHES) + 2
        compiling = max(0.0, took[0] - took[1])
        seconds += compiling + n_calls * took[1] * share * epochs
        n_heads += n_calls * train.n_pool * train.n_seeds
        held += sum(np.asarray(x.outputs).nbytes for x in (train, valid, everyone))
    return Forecast(
        stage="select",
        memory_bytes=held,
        seconds=seconds,
        basis=(
            f"{n_heads} heads, at most {epochs} epochs each: searches of {N_ROUNDS} "
            "rounds (more members take more) and the fixed sets; time from one call "
            f"of each setting on {N_BATCHES} batches"
        ),
    )
