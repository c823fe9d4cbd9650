"""Which files of a folder hold the questions that a real run needs, by content."""

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from beatrice.extract.datasets.building import is_usable
from beatrice.extract.datasets.loading import Loaded, open_dataset
from beatrice.extract.datasets.splits import Context, Role


class Wanted(NamedTuple):
    """A set that a run is made of.

    Attributes:
      title: as a person calls it.
      roles: what its file serves as; no question is in two splits.
      context: which passages its examples have.
      would_do: what could be put into the folder if it is not there.
    """

    title: str
    roles: tuple[Role, ...]
    context: Context
    would_do: str


# TriviaQA's passages are whole pages, which no small model reads. Of PopQA's two gold
# paragraphs the second is the answer's own page, whose title is the answer.
WANTED = {
    "triviaqa": Wanted(
        "TriviaQA",
        ("train", "dev"),
        "none",
        "any published file of it, without passages too, such as DPR's trivia-*.qa.csv",
    ),
    "nq": Wanted(
        "Natural Questions",
        ("train", "dev"),
        "supporting",
        "a file with gold passages, such as nq-open-oracle.jsonl.gz, DPR's "
        "nq-dev_gold_info.json or biencoder-nq-dev.json",
    ),
    "popqa": Wanted(
        "PopQA",
        ("held-out",),
        "first",
        "a file with gold paragraphs, such as popqa.json of HippoRAG or NeuroPath",
    ),
}


def _files(folder: Path) -> Iterator[Path]:
    """Yield files below a folder, in an order that does not depend on the disk."""
    for where, folders, names in os.walk(folder):
        # TriviaQA's evidence is half a million pages, and no questions.
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "evidence")
        yield from (Path(where) / name for name in sorted(names) if name[0] != ".")


def _n_usable(path: Path) -> tuple[str | None, int]:
    """Return the set of a file, and how many of its questions a run can use."""
    try:
        file = open_dataset(path)
        if file.dataset not in WANTED:
            return None, 0
        context = WANTED[file.dataset].context
        return file.dataset, sum(
            isinstance(found, Loaded)
            and found.question.dataset == file.dataset
            and is_usable(found, context)
            for found in file.read()
        )
    except (ValueError, OSError):
        return None, 0  # no questions, or a damaged file: not what is looked for


def find_questions(
    folder: Path,
    note: Callable[[str], None],
    given: Collection[str] = (),
) -> list[tuple[str, str, Path]]:
    """Return (role, set, file) of the sets that a real run is made of.

    Of several files of one set, the one with the most questions that can be used.

    Args:
      folder: looked through with all that is below it; evidence pages are not.
      note: told of what was found.
      given: sets that need not be looked for.

    Raises:
      ValueError: a set is missing; the sentence names all that are, and what would do.
    """
    best: dict[str, tuple[int, Path]] = {}
    for path in _files(folder):
        dataset, n = _n_usable(path)
        if dataset is not None and n > best.get(dataset, (0, path))[0]:
            best[dataset] = n, path
    looked_for = [name for name in WANTED if name not in given]
    missing = [name for name in looked_for if name not in best]
    if missing:
        raise ValueError(
            f"{folder} lacks "
            + "; ".join(f"{WANTED[m].title}: {WANTED[m].would_do}" for m in missing)
            + "; put it there, or name the file, as in --train NAME=FILE"
        )
    for name in looked_for:
        note(f"{WANTED[name].title}: {best[name][0]} questions in {best[name][1]}")
    return [
        (role, name, best[name][1])
        for name in looked_for
        for role in WANTED[name].roles
    ]
