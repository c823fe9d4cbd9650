"""The pool that heads are selected from: encoders of both passes, by position.

With context the pool is the with-context encoders, then the closed-book ones reading
the closed-book pass of the same question. Closed-book it is the closed-book encoders.
In a run of one setting it is that setting's alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from beatrice.extract.records import Record, Setting
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.detector import HeadName
from beatrice.jaxprobe.features.rows import Rows, partners
from beatrice.jaxprobe.features.subsets import SUBSET_NAMES
from beatrice.jaxprobe.model.encoder import MemberOutputs
from beatrice.jaxprobe.model.fusion import PoolOutputs, pool_outputs

BRANCHES: tuple[HeadName, ...] = ("closed_book", "with_context", "single_pass")


class Pool(NamedTuple):
    """What the pool of a setting puts out on its rows.

    Attributes:
      train: outputs on the training rows.
      valid: outputs on the validation rows.
      all_rows: outputs on every stored row.
      rows: what the rows are.
      n_subsets: encoders of each pass; a family alone is at `2**f - 1`.
    """

    train: PoolOutputs
    valid: PoolOutputs
    all_rows: PoolOutputs
    rows: Rows
    n_subsets: int


def pool_of(
    outputs: Mapping[Setting, MemberOutputs],
    rows: Mapping[Setting, Rows],
    setting: Setting,
    n_seeds: int,
) -> Pool:
    """Return a setting's pool.

    Args:
      outputs: of every trained encoder of a pass, on all rows of that pass; with
        context, the closed-book pass is read too where it is there.
      rows: what the rows of each pass are.
      setting: whose answers are scored.
      n_seeds: of every encoder.
    """
    own_rows, passes = rows[setting], [outputs[setting]]
    if setting == "with_context" and "closed_book" in outputs:
        where = partners(own_rows.ids, rows["closed_book"].ids)
        passes.append(_take(outputs["closed_book"], where))

    def part(where: np.ndarray) -> PoolOutputs:
        parts = tuple(_take(member_outputs, where) for member_outputs in passes)
        return pool_outputs(parts, n_seeds, own_rows.labels[where])

    return Pool(
        train=part(own_rows.where("train")),
        valid=part(own_rows.where("validation")),
        all_rows=part(np.arange(len(own_rows.ids))),
        rows=own_rows,
        n_subsets=len(passes[0].logits) // n_seeds,
    )


def _take(outputs: MemberOutputs, where: np.ndarray) -> MemberOutputs:
    return MemberOutputs(outputs.logits[:, where], outputs.pooled[:, where])


def branch_setting(branch: HeadName) -> Setting:
    """Return the setting whose answers a branch scores."""
    return "closed_book" if branch == "closed_book" else "with_context"


def branches_of(settings: Sequence[Setting]) -> tuple[HeadName, ...]:
    """Return the branches that score answers of some settings."""
    return tuple(branch for branch in BRANCHES if branch_setting(branch) in settings)


def reads(
    branch: HeadName, members: Sequence[int], names: Sequence[str] = SUBSET_NAMES
) -> tuple[tuple[Setting, str], ...]:
    """Return the (pass, subset name) of pool positions.

    Args:
      branch: whose pool.
      members: positions in it.
      names: of all subsets of a pass; those of the paper's families by default.
    """
    own, n = branch_setting(branch), len(names)
    return tuple((own if i < n else "closed_book", names[i % n]) for i in members)


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


def read_selection(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the heads and scores of a saved search, and the search's summary."""
    tree, summary = checkpoint.restore(path, SearchSummary)
    return tree, msgspec.to_builtins(summary)
