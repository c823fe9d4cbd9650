"""Draw the training, validation, test and held-out questions, fixed by id.

Sizes follow appendix A of the paper. A question's place is a hash of the seed, its set
and its id, so it depends neither on the order of the file nor on other questions. No
question text is in two splits.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from beatrice.extract.records import Split
from beatrice.extract.run.files import read_sealed, seal

Role = Literal["train", "dev", "held-out"]
Context = Literal["supporting", "first", "all", "none"]
Size = int | Literal["all"]  # number of questions in a split
# Evaluation splits choose first.
SPLITS_OF: dict[Role, tuple[Split, ...]] = {
    "dev": ("validation", "test"),
    "held-out": ("ood",),
    "train": ("train",),
}
HELD_OUT_SIZES = {"popqa": 1000, "nq": 1182, "triviaqa": 1277}
# Of splits.json; version 1 digested texts without case, marks and articles.
VERSION = 2
N_FIRST = 256  # first records of a file, from which its set's context is chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How many questions each split has; defaults are those of appendix A."""

    seed: int = 0  # seed of the hash that orders the questions
    n_train: Size = 10_000  # per set with a training file; "all" takes every question
    # `n_train` of single sets, by name.
    n_train_of: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    n_evaluation: Size = 500  # validation and test each, per set with development files
    n_held_out: Mapping[str, Size] = dataclasses.field(  # per set never trained on
        default_factory=lambda: dict(HELD_OUT_SIZES)
    )

    def __post_init__(self) -> None:
        """Check that every size is at least one."""
        of_sets = (*self.n_train_of.values(), *self.n_held_out.values())
        for size in (self.n_train, self.n_evaluation, *of_sets):
            if size != "all" and size < 1:
                raise ValueError(f"a split needs at least one question, not {size}")

    def size(self, dataset: str, role: Role) -> Size:
        """Return how many questions of a set go to each split of a role."""
        if role == "train":
            return self.n_train_of.get(dataset, self.n_train)
        if role == "dev":
            return self.n_evaluation
        if dataset not in self.n_held_out:
            raise ValueError(
                f"appendix A holds out {', '.join(HELD_OUT_SIZES)} and gives no size "
                f"for {dataset}; give one with --n-held-out {dataset}=N, or =all"
            )
        return self.n_held_out[dataset]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One file, its question set and its role."""

    dataset: str
    role: Role
    path: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What to build from which files."""

    sources: tuple[Source, ...]
    splits: SplitConfig
    fixed: Path | None = None  # a manifest whose splits are used instead of drawing
    # Passages of an example: the supporting ones, as in the paper, the first of these,
    # all that came with it, or none. With `supporting` and `first`, questions without
    # one are left out; with `none`, questions are asked closed-book only. None stands
    # for `supporting`, see also `with_contexts_of_files`.
    context: Context | None = None
    # `context` of single sets, by name.
    contexts: Mapping[str, Context] = dataclasses.field(default_factory=dict)
    # Sets whose context was chosen because their first questions mark no passage.
    unmarked: frozenset[str] = frozenset()
    # `text_key` of the prompt's worked examples, which no drawn split contains.
    shots: frozenset[bytes] = frozenset()
    skip_bad: bool = False  # leave out and list refused records instead of stopping
    evidence: Path | None = None  # TriviaQA's pages, if they are not next to the file

    def context_of(self, dataset: str) -> Context:
        """Return the context of one set."""
        return self.contexts.get(dataset, self.context or "supporting")

    def contexts_as_text(self) -> str:
        """Return the contexts as a manifest has them: "supporting popqa=none"."""
        common, contexts = self.context or "supporting", sorted(self.contexts.items())
        return " ".join([common, *(f"{k}={x}" for k, x in contexts if x != common)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the questions of a run depend on."""

    splits: SplitConfig | None  # how the splits were drawn; None if they were given
    fixed: str | None  # SHA-256 of the manifest the splits were taken from, or None
    context: str  # which passages an example has, see `contexts_as_text`
    skip_bad: bool  # whether refused records were left out
    sources: tuple[tuple[str, str, str], ...]  # (set, role, SHA-256) per file, sorted

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, with lists for tuples."""
        return json.loads(json.dumps(dataclasses.asdict(self), sort_keys=True))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A question that may be drawn."""

    id: str  # unique in its set
    text_key: bytes  # equal for questions with the same normalised text
    split: Split | None = None  # the split its record names, or None to draw it


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A question that was passed over because another split has its text or id."""

    dataset: str
    id: str
    split: Split
    other_dataset: str
    other_id: str
    other_split: Split


@dataclasses.dataclass(frozen=True)
class DrawnSplits:
    """The questions that were drawn, and those passed over."""

    splits: dict[Split, dict[str, list[str]]]  # ids by set, in the order of the hash
    conflicts: list[Conflict]
    # (split, set, id, set, id) of questions whose text occurs twice in one split; both
    # are kept (PopQA asks about subjects of the same name).
    repeated: list[tuple[Split, str, str, str, str]]


def draw_splits(
    pools: Mapping[tuple[str, Role], Iterable[Candidate]], config: SplitConfig
) -> DrawnSplits:
    """Draw the splits from the candidates of each set and role."""

    def order(candidate: Candidate) -> bytes:
        text = f"{config.seed}\n{dataset}\n{candidate.id}"
        return hashlib.sha256(text.encode()).digest()

    drawn = DrawnSplits({}, [], [])
    # Split, set and id under which a text or (set, id) was drawn first.
    placed: dict[bytes | tuple[str, str], tuple[Split, str, str]] = {}
    roles = list(SPLITS_OF)
    for dataset, role in sorted(pools, key=lambda x: (roles.index(x[1]), x[0])):
        pool = sorted(pools[dataset, role], key=order)
        size = config.size(dataset, role)
        seen: set[str] = set()  # ids of this pool that were chosen or passed over
        for split in SPLITS_OF[role]:
            chosen = drawn.splits.setdefault(split, {}).setdefault(dataset, [])
            left = [c for c in pool if c.split in (None, split) and c.id not in seen]
            if size == "all":  # those that name this split go before the others
                left.sort(key=lambda candidate: candidate.split is None)
            n_wanted = _n_wanted(split, size, left)
            for candidate in left:
                if len(chosen) == n_wanted:
                    break
                seen.add(candidate.id)
                name = dataset, candidate.id
                here: tuple[Split, str, str] = (split, *name)
                text = candidate.text_key
                first = placed.get(name, placed.get(text, here))
                if first[0] != split:
                    drawn.conflicts.append(Conflict(*name, split, *first[1:], first[0]))
                    continue
                if first != here:
                    drawn.repeated.append((split, *name, *first[1:]))
                placed |= {name: here, text: first}
                chosen.append(candidate.id)
            if len(chosen) < (1 if size == "all" else size):
                raise _shortage(pools, dataset, role, config, drawn)
    return drawn


def _n_wanted(split: Split, size: Size, left: Sequence[Candidate]) -> int:
    """Return a split's size; if "all", validation takes half of what names no split."""
    if size != "all":
        return size
    n_free = sum(candidate.split is None for candidate in left)
    return len(left) - (n_free // 2 if split == "validation" else 0)


def _shortage(
    pools: Mapping[tuple[str, Role], Iterable[Candidate]],
    dataset: str,
    role: Role,
    config: SplitConfig,
    drawn: DrawnSplits,
) -> ValueError:
    """Return the error for a pool with too few questions, with sizes that it allows."""
    splits, size = SPLITS_OF[role], config.size(dataset, role)
    keys = [c.text_key for c in pools[dataset, role]]
    n, unique = len(keys), set(keys)
    n_passed = sum(c.dataset == dataset and c.split in splits for c in drawn.conflicts)
    beside = pools.get((dataset, "train" if role == "dev" else "dev"), ())
    is_shared = 2 * len(unique.intersection(c.text_key for c in beside)) > len(unique)
    if role == "held-out":
        advice = f"a smaller --n-held-out {dataset}= (or all, for every one)"
    elif is_shared and n > 2:
        n_each = max(1, n // 5)
        advice = (
            f"since they are --train and --dev at once, --n-evaluation {n_each} "
            f"--n-train all, which leaves {n - 2 * n_each} to train on"
        )
    elif role == "train":
        advice = "a smaller --n-train (or all, for every one)"
    else:
        advice = f"--n-evaluation {max(1, n // 2)} or fewer (all halves them)"
    return ValueError(
        f"{dataset}: {' + '.join([str(size)] * len(splits))} questions are asked for "
        f"in {' and '.join(splits)}, but the {role} files have {n} that can be used "
        f"({n_passed} of them with an id or a text, ignoring case, marks and articles, "
        f"that is in another split); give larger files, or {advice}"
    )


def questions_digest(rows: Iterable[tuple[str, str]]) -> str:
    """Return a SHA-256 of ids and question texts, whatever their order and white space.

    It digests texts, not their keys, since another version may fold more of a question.
    """
    lines = sorted(f"{name}\t{' '.join(text.split())}\n" for name, text in rows)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_splits(path: Path) -> dict[str, Any]:
    """Read and check a manifest of splits, as `seal` made it."""
    again = "restore it, or draw splits again with `beatrice data`"
    manifest = read_sealed(path, again)
    known = [("beatrice-splits", version) for version in (1, VERSION)]
    if (manifest.get("format"), manifest.get("version")) not in known:
        raise ValueError(
            f"{path} is not a manifest of splits (beatrice-splits, version 1 or "
            f"{VERSION}); {again}"
        )
    return seal(manifest)
