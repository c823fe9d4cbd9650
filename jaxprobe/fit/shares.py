"""Several processes train one grid, each its share of the members.

Members never speak to each other, so neither do the processes: each writes its finished
members into the run, and whoever writes the last joins them as one process would. On a
CPU the checkpoint is that of one process bit by bit, whatever the number of processes,
before and after a kill. On accelerators members lie side by side in blocks of other
sizes, which changes how their products are summed, within rounding.

Each process trains on the devices it sees, one GPU of its own where a launcher starts
several on a machine. Rows are not split over processes: a setting has 48 members, six
for each of eight GPUs, and gradients of parts of the rows would meet in every step.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax

from extract.records import Setting
from extract.run.console import Progress, Update
from extract.run.contents import settings_of
from extract.run.directory import RunDir
from extract.run.launch import own_gpu
from extract.run.share import Share
from extract.run.stages import Change, do, side_by_side
from extract.store.read import FeatureStore
from jaxprobe.features.families import longest_spans
from jaxprobe.features.reading import family_dims
from jaxprobe.features.subsets import N_SUBSETS
from jaxprobe.fit.grid import Block, Member, default_blocks
from jaxprobe.fit.saved import cut, load_members
from jaxprobe.fit.stage import (
    EVERY_FAMILY,
    TRAIN,
    open_setting,
    settings_at_once,
)
from jaxprobe.fit.work import Workload, in_parts
from jaxprobe.settings import GridConfig, set_compiler
from jaxprobe.stage import open_rows


def use_own_device(worker: Share) -> None:
    """Take one GPU of a machine whose workers share its GPUs; before JAX looks."""
    gpu = own_gpu() if worker.world_size > 1 else None
    if gpu is not None:
        jax.config.update("jax_cuda_visible_devices", str(gpu))


def shares_of(
    workload: Workload, world_size: int
) -> list[tuple[set[Member], set[Member]]]:
    """Deal the grid and its control out, so that all have about as much to do.

    Subsets are dealt with all their seeds, which are a block; where there are more
    workers than subsets, single members are.

    Args:
      workload: of a setting.
      world_size: number of workers.

    Returns:
      per worker, the members of the grid and those of its control.
    """
    n_seeds = workload.n_seeds
    # A control costs what its encoder does; here its seeds follow those of the grid.
    controls = [[(EVERY_FAMILY, n_seeds + s)] for s in range(n_seeds)]
    if world_size > N_SUBSETS:
        groups = [[member] for member in workload.members]
    else:
        groups = [[(k, s) for s in range(n_seeds)] for k in range(N_SUBSETS)]
    dealt = in_parts(workload, [*groups, *controls], world_size)
    return [
        (
            {Member(k, s) for k, s in part if s < n_seeds},
            {Member(k, s - n_seeds) for k, s in part if s >= n_seeds},
        )
        for part in dealt
    ]


def workload_of(
    config: GridConfig, setting: Setting, store: FeatureStore, n_train: int
) -> Workload:
    """Return the work of a setting's grid if no member stops early."""
    widths = longest_spans(store.spec.spans, setting)
    return Workload(
        encoder=config.encoder,
        dims=family_dims(store),
        spans=tuple((1, width) for width in widths),
        batch_size=config.train.batch_size,
        n_steps=-(-n_train // config.train.batch_size) * config.train.max_epochs,
        n_seeds=config.train.n_seeds,
    )


def _blocks_of(members: set[Member], n_seeds: int) -> list[Block]:
    """Return blocks of some members, as large as those of the whole grid may be."""
    subsets = sorted({member.subset for member in members})
    blocks = default_blocks(n_seeds, subsets)
    return [part for block in blocks for part in cut(block, members)]


def _work(
    run: RunDir, config: GridConfig, update: Update, progress: Progress
) -> int | None:
    """Train a share of the members, or join all; returns how many are missing."""
    if run.share.is_whole:
        return TRAIN.work(run, config, update, progress)
    use_own_device(run.share)
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    n_seeds = config.train.n_seeds
    own = {}
    for setting in settings_of(run):
        store, rows = open_rows(run, setting)
        n_train = len(rows.where("train"))
        workload = workload_of(config, setting, store, n_train)
        members = shares_of(workload, run.share.world_size)[run.share.rank]
        own[setting] = [_blocks_of(part, n_seeds) for part in members]
    left = []

    def one(setting: Setting, tick: Callable[[], None]) -> None:
        opened = open_setting(run, config, setting, tick)
        if opened is None:
            return
        trainer, *tasks = opened
        for task, share in zip(tasks, own[setting], strict=True):
            trainer.fit_share(*task, share)
        left.append((trainer.key, tasks))

    total = sum(len(share) for shares in own.values() for share in shares)
    side_by_side(one, list(own), update, total, at_once=settings_at_once(config))
    n_missing = 0
    for key, tasks in left:
        for task in tasks:
            members = [member for block in task.blocks for member in block.members]
            n_missing += len(members) - len(load_members(task.folder, members, key))
    return n_missing


def train_share(run_dir: Path, share: Share, change: Change | None = None) -> None:
    """Train a share of a run's encoders; join all if none is missing.

    Args:
      run_dir: of all workers.
      share: of this process, one of several.
      change: makes of the run's settings what a person chose.

    Raises:
      InUse: a process that works alone holds the run.
      ValueError: an input is missing, or the run has settled on other settings.
    """
    stage = dataclasses.replace(TRAIN, work=_work, parts="encoders")
    do(run_dir, stage, change=change, share=share)
