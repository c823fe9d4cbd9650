"""What a file of questions is: counted, with everything that was refused and why."""

import collections
import hashlib
import re
from pathlib import Path
from typing import Any

from beatrice.extract.datasets.files.kinds import FileType
from beatrice.extract.datasets.loading import (
    DatasetFile,
    FileRefused,
    Loaded,
    Refusal,
    open_dataset,
)
from beatrice.extract.datasets.readers.question import DATASETS, Question
from beatrice.extract.records import normalise
from beatrice.extract.run.files import sha256_file

MAX_LISTED = 1000  # refusals kept one by one; all are counted

# A value in a reason, in Python's quotes of either kind.
_A_VALUE = re.compile(
    r"(found|the id|the filter|records,|its 'dataset' is|the evidence file) "
    r"""b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
)
_LONG_WORD = re.compile(r"\w{4}")  # no article: spares normalising most answers


_COUNTED = ("records", "loaded", "refused", "with_passages", "with_gold_passages",
            "passages", "gold_passages", "golds", "repeated_questions",
            "golds_without_words", "empty_passages", "missing_titles",
            "missing_documents")  # fmt: skip


class Tally:
    """What was counted while a file was read."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.counts = collections.Counter(dict.fromkeys(_COUNTED, 0))
        self.datasets: collections.Counter[str] = collections.Counter()
        self.formats: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.refusals: list[Refusal] = []
        self._questions: set[bytes] = set()

    def add(self, found: Loaded | Refusal) -> None:
        """Count one record."""
        self.counts["records"] += 1
        if isinstance(found, Refusal):
            self.counts["refused"] += 1
            self.reasons[_kind_of_reason(found.reason)] += 1
            if len(self.refusals) < MAX_LISTED:
                self.refusals.append(found)
            return
        self.datasets[found.question.dataset or "unknown"] += 1
        self.formats[found.format] += 1
        self._add_question(found.question)

    def _add_question(self, question: Question) -> None:
        n_gold = sum(passage.is_supporting for passage in question.passages)
        text = normalise(question.question).encode()
        key = hashlib.blake2b(text, digest_size=12).digest()
        self.counts.update(
            loaded=1,
            with_passages=bool(question.passages),
            with_gold_passages=n_gold > 0,
            passages=len(question.passages),
            gold_passages=n_gold,
            golds=len(question.golds),
            golds_without_words=sum(map(_has_no_word, question.golds)),
            empty_passages=question.meta.get("n_empty_passages", 0),
            missing_titles="missing_titles" in question.meta,
            missing_documents=question.meta.get("n_missing_documents", 0),
            repeated_questions=key in self._questions,
        )
        self._questions.add(key)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, and what was refused."""
        return {
            **self.counts,
            "reasons": dict(self.reasons.most_common()),
            "refusals": [
                {"record": one.number, "at": one.at, "reason": one.reason}
                for one in self.refusals
            ],
            "refusals_not_listed": self.counts["refused"] - len(self.refusals),
        }


def _has_no_word(gold: str) -> bool:
    """Tell whether nothing of an answer is left when it is normalised."""
    return _LONG_WORD.search(gold) is None and not normalise(gold)


def _kind_of_reason(reason: str) -> str:
    """Return a reason without the numbers and values in it, to count alike ones."""
    return re.sub(r"\d+", "N", _A_VALUE.sub(r"\1 …", reason))


def inspect_file(
    path: Path, *, dataset: str | None = None, evidence: Path | None = None
) -> dict[str, Any]:
    """Return what a file is, as JSON values.

    Args:
      path: the file.
      dataset: its question set, if known.
      evidence: TriviaQA's folder of pages, if it is elsewhere.

    Returns:
      See the help of `beatrice data`: `error` is None, or the sentence for which the
      whole file is refused; what was read before it is counted all the same.
    """
    report: dict[str, Any] = {"file": str(path)}
    tally, file, error = Tally(), None, None
    known: dict[str, Any] = {}
    try:
        file = open_dataset(path, dataset=dataset, evidence=evidence)
        for found in file.read():
            tally.add(found)
    except FileRefused as refused:
        error = " ".join(str(refused).split())
        known = _container(refused.type) | {"format": refused.format}
    except (ValueError, OSError) as problem:
        error = " ".join(str(problem).split())
    if path.is_file():
        report |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    report |= _identity(file, tally) | known | tally.as_json()
    if file is None:
        report["records"] = None  # not counted: what they are was enough
    if error is None and not tally.counts["loaded"]:
        first = tally.refusals[0]
        error = (
            f"{path}: none of {tally.counts['records']} records can be used; record "
            f"{first.number} ({first.at}): {first.reason}"
        )
    return report | {"error": error}


def _identity(file: DatasetFile | None, tally: Tally) -> dict[str, Any]:
    """Say what the file is."""
    if file is None:
        return dict.fromkeys(
            ("dataset", "dataset_from", "format", "container", "gzipped", "bom")
        )
    name = file.format.name
    if name == "TriviaQA" and file.envelope.get("Domain"):
        name = f"TriviaQA ({file.envelope['Domain']})"
    return {
        "dataset": file.dataset,
        "dataset_from": file.dataset_from,
        "format": name,
        **_container(file.type),
        "published_split": file.envelope.get("Split"),
        "known_dataset": file.dataset in DATASETS,
        "datasets": dict(tally.datasets),
        "formats": dict(tally.formats),
    }


def _container(file_type: FileType) -> dict[str, Any]:
    """Say how a file holds its records."""
    return {
        "container": file_type.container,
        "gzipped": file_type.is_gzipped,
        "bom": file_type.has_bom,
    }
