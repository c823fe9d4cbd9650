"""What a set of questions is built of, and what a manifest says of it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from beatrice.extract.records import ACROSS_SETS, MAX_NAME, Split

Role = Literal["train", "dev", "held-out"]
Context = Literal["supporting", "first", "all", "none"]
Size = int | Literal["all"]  # of a split
A_NAME = (
    f"a name (letters, digits, '.', '_' and '-', at most {MAX_NAME}, the first a "
    f"letter, a digit or '_'; none of {', '.join(ACROSS_SETS)})"
)
HELD_OUT_SIZES = {"popqa": 1000, "nq": 1182, "triviaqa": 1277}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How many questions each split has; defaults are those of appendix A.

    Attributes:
      seed: of the hash that orders the questions.
      n_train: of each set with a training file; "all" takes every question, and of a
        development file half of them each.
      n_train_of: the same for sets that differ from the others.
      n_evaluation: validation and test each, of each set with a development file.
      n_held_out: of each set that is never trained on.
    """

    seed: int = 0
    n_train: Size = 10_000
    n_train_of: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    n_evaluation: Size = 500
    n_held_out: Mapping[str, Size] = dataclasses.field(
        default_factory=lambda: dict(HELD_OUT_SIZES)
    )

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        of_sets = (*self.n_train_of.values(), *self.n_held_out.values())
        for size in (self.n_train, self.n_evaluation, *of_sets):
            if size != "all" and size < 1:
                raise ValueError(f"a split has at least one question, not {size}")

    def sizes(self, dataset: str, role: Role) -> dict[Split, Size]:
        """Return the splits that a file's questions go to, with their sizes."""
        if role == "train":
            return {"train": self.n_train_of.get(dataset, self.n_train)}
        if role == "dev":
            return {"validation": self.n_evaluation, "test": self.n_evaluation}
        if dataset not in self.n_held_out:
            raise ValueError(
                f"appendix A holds out {', '.join(HELD_OUT_SIZES)}, and gives no size "
                f"for {dataset}; say how many with --n-held-out {dataset}=N, or =all"
            )
        return {"ood": self.n_held_out[dataset]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One file and what it is for."""

    dataset: str
    role: Role
    path: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What is built.

    Attributes:
      context: passages of an example: the supporting ones, as in the paper, the first
        of these, all that came with it, or none. With `supporting` and `first`,
        questions without one are left out; with `none`, questions are asked closed-book
        only. None stands for `supporting`, see also `with_contexts_of_files`.
      contexts: the same for sets that differ from the others.
      skip_bad: leave refused records out and list them, instead of stopping.
      evidence: TriviaQA's folder of pages, if it is not beside the file.
    """

    splits: SplitConfig
    context: Context | None = None
    contexts: Mapping[str, Context] = dataclasses.field(default_factory=dict)
    skip_bad: bool = False
    evidence: Path | None = None

    def context_of(self, dataset: str) -> Context:
        """Return which passages the examples of one set have."""
        return self.contexts.get(dataset, self.context or "supporting")

    def contexts_as_text(self) -> str:
        """Return what a manifest says: "supporting popqa=none"."""
        common = self.context or "supporting"
        others = (
            f"{dataset}={context}"
            for dataset, context in sorted(self.contexts.items())
            if context != common
        )
        return " ".join((common, *others))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the questions depend on.

    Attributes:
      splits: how they were drawn, or None where the splits were given.
      fixed: SHA-256 of the manifest that the splits were taken from, or None.
      context: which passages an example has: "supporting", or with the sets that
        differ, "supporting popqa=none".
      skip_bad: whether refused records were left out.
      sources: (set, role, SHA-256) of each file, sorted.
    """

    splits: SplitConfig | None
    fixed: str | None
    context: str
    skip_bad: bool
    sources: tuple[tuple[str, str, str], ...]

    def as_json(self) -> dict[str, Any]:
        """Return JSON values, lists for tuples."""
        return json.loads(json.dumps(dataclasses.asdict(self), sort_keys=True))
