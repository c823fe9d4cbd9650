"""The pool that heads are selected from: encoders of both passes, by position.

With context the pool is the with-context encoders, then the closed-book ones reading
the closed-book pass of the same question. Closed-book it is the closed-book encoders.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from extract.records import Setting
from extract.run.directory import RunDir
from jaxprobe import checkpoint
from jaxprobe.detector import HeadName
from jaxprobe.features.rows import Rows, load_rows, partners
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.stage import read_member_outputs
from jaxprobe.model.encoder import MemberOutputs
from jaxprobe.model.fusion import PoolOutputs, pool_outputs
from jaxprobe.settings import grid_config

BRANCHES: tuple[HeadName, ...] = ("closed_book", "with_context", "single_pass")
OutputsOf = Callable[[RunDir, Setting], MemberOutputs]


def branch_setting(branch: HeadName) -> Setting:
    """Return the setting whose answers a branch scores."""
    return "closed_book" if branch == "closed_book" else "with_context"


def reads(branch: HeadName, members: list[int]) -> tuple[tuple[Setting, str], ...]:
    """Return (pass, subset) of pool positions; see `setting_outputs`."""
    own = branch_setting(branch)
    return tuple(
        (own if i < N_SUBSETS else "closed_book", SUBSET_NAMES[i % N_SUBSETS])
        for i in members
    )


def setting_outputs(
    run: RunDir, setting: Setting, outputs_of: OutputsOf = read_member_outputs
) -> tuple[tuple[MemberOutputs, ...], Rows]:
    """Return the outputs of a setting's pool, pass by pass, and its rows.

    With context the pool is the with-context encoders, then the closed-book ones
    reading the closed-book pass of the same question.

    Args:
      run: with trained encoders.
      setting: whose answers are scored.
      outputs_of: gives the outputs of a pass; by default the run's own encoders do.
    """
    _, rows = load_rows(run, setting)
    own = outputs_of(run, setting)
    if setting == "closed_book":
        return (own,), rows
    _, cached_rows = load_rows(run, "closed_book")
    cached = outputs_of(run, "closed_book")
    return (own, _at(cached, partners(rows, cached_rows))), rows


def _at(outputs: MemberOutputs, where: np.ndarray) -> MemberOutputs:
    return MemberOutputs(outputs.logits[:, where], outputs.pooled[:, where])


def _pool(
    outputs: tuple[MemberOutputs, ...], rows: Rows, where: np.ndarray, n_seeds: int
) -> PoolOutputs:
    return pool_outputs(
        tuple(_at(c, where) for c in outputs), n_seeds, rows.labels[where]
    )


def pools(
    run: RunDir, setting: Setting, outputs_of: OutputsOf = read_member_outputs
) -> tuple[tuple[PoolOutputs, PoolOutputs, PoolOutputs], Rows]:
    """Return a setting's pool on the training, the validation and all rows."""
    outputs, rows = setting_outputs(run, setting, outputs_of)
    n_seeds = grid_config(run).train.n_seeds
    train, valid, everyone = (
        _pool(outputs, rows, where, n_seeds)
        for where in (
            rows.where("train"),
            rows.where("validation"),
            np.arange(len(rows.ids)),
        )
    )
    return (train, valid, everyone), rows


def read_selection(
    run: RunDir, branch: HeadName
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a branch's heads and scores, and how the search went."""
    return checkpoint.restore(run.path / "selection" / branch)


def pool_name(branch: HeadName, index: int) -> str:
    """Return the printed name of a pool position: [HP] with context, (HA) without."""
    ((where, name),) = reads(branch, [index])
    return f"({name})" if where == "closed_book" else f"[{name}]"
