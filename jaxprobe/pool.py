"""The pool that heads are selected from: encoders of both passes, by position.

With context the pool is the with-context encoders, then the closed-book ones reading
the closed-book pass of the same question. Closed-book it is the closed-book encoders.
In a run of one setting it is that setting's alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from extract.records import Record, Setting
from extract.run.contents import settings_of
from extract.run.directory import RunDir
from jaxprobe import checkpoint
from jaxprobe.detector import HeadName
from jaxprobe.features.rows import Rows, load_rows, partners
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.saved import read_member_outputs
from jaxprobe.model.encoder import MemberOutputs
from jaxprobe.model.fusion import PoolOutputs, pool_outputs
from jaxprobe.settings import grid_config

BRANCHES: tuple[HeadName, ...] = ("closed_book", "with_context", "single_pass")


class Pool(NamedTuple):
    """What the pool of a setting puts out on its rows.

    Attributes:
      train: outputs on the training rows.
      valid: outputs on the validation rows.
      all_rows: outputs on every stored row.
      rows: what the rows are.
    """

    train: PoolOutputs
    valid: PoolOutputs
    all_rows: PoolOutputs
    rows: Rows


def load_pool(
    run: RunDir,
    setting: Setting,
    outputs_of: Callable[[Setting], MemberOutputs] | None = None,
) -> Pool:
    """Return a setting's pool.

    Args:
      run: with trained encoders.
      setting: whose answers are scored.
      outputs_of: gives the outputs of a pass; None takes the run's own encoders.
    """
    outputs_of = outputs_of or partial(read_member_outputs, run)
    _, rows = load_rows(run, setting)
    passes = [outputs_of(setting)]
    if setting == "with_context" and "closed_book" in settings_of(run):
        _, closed_book = load_rows(run, "closed_book")
        where = partners(rows, closed_book)
        passes.append(_take(outputs_of("closed_book"), where))
    n_seeds = grid_config(run).train.n_seeds

    def part(where: np.ndarray) -> PoolOutputs:
        outputs = tuple(_take(one, where) for one in passes)
        return pool_outputs(outputs, n_seeds, rows.labels[where])

    return Pool(
        train=part(rows.where("train")),
        valid=part(rows.where("validation")),
        all_rows=part(np.arange(len(rows.ids))),
        rows=rows,
    )


def _take(outputs: MemberOutputs, where: np.ndarray) -> MemberOutputs:
    return MemberOutputs(outputs.logits[:, where], outputs.pooled[:, where])


def branch_setting(branch: HeadName) -> Setting:
    """Return the setting whose answers a branch scores."""
    return "closed_book" if branch == "closed_book" else "with_context"


def branches_of(run: RunDir) -> tuple[HeadName, ...]:
    """Return the branches that score answers of a run's settings."""
    settings = settings_of(run)
    return tuple(branch for branch in BRANCHES if branch_setting(branch) in settings)


def reads(branch: HeadName, members: Sequence[int]) -> tuple[tuple[Setting, str], ...]:
    """Return the (pass, subset name) of pool positions."""
    own = branch_setting(branch)
    return tuple(
        (own if i < N_SUBSETS else "closed_book", SUBSET_NAMES[i % N_SUBSETS])
        for i in members
    )


def pool_names(branch: HeadName, members: Sequence[int]) -> list[str]:
    """Return printed names of pool positions: [HP] with context, (HA) without."""
    return [
        f"({name})" if where == "closed_book" else f"[{name}]"
        for where, name in reads(branch, members)
    ]


class Round(Record, frozen=True, kw_only=True):
    """One accepted round of a search; `candidates` are AUROCs by pool position."""

    added: int
    auroc: float
    candidates: dict[str, float]


class SearchSummary(Record, frozen=True, kw_only=True):
    """How a search went, as it is saved beside its heads."""

    members: tuple[int, ...]
    n_slots: int
    stop: str
    rounds: tuple[Round, ...]


def read_selection(
    run: RunDir, branch: HeadName
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a branch's heads and scores, and the summary of its search."""
    tree, summary = checkpoint.restore(run.selection / branch, SearchSummary)
    return tree, msgspec.to_builtins(summary)
