"""What a file of questions is: counted, with everything that was refused and why."""

import collections
import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

from extract.datasets.files.kinds import FileType
from extract.datasets.loading import (
    DatasetFile,
    FileRefused,
    Loaded,
    Refusal,
    open_dataset,
)
from extract.datasets.readers.question import DATASETS
from extract.label.verdicts import normalise
from extract.run.files import sha256_file

MAX_LISTED = 1000  # refusals kept one by one; all are counted
# UTF-8 that was decoded as Windows-1252 and encoded again.
_TWICE_ENCODED = re.compile(
    "[ÂÃ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]|â[\u0080€][\u0080-\u00bf™œž“”¢¦]"
)

# A value in a reason, in Python's quotes of either kind.
_A_VALUE = re.compile(
    r"(found|the id|the filter|records,|its 'dataset' is|the evidence file) "
    r"""b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
)
_LONG_WORD = re.compile(r"\w{4}")  # no article: spares normalising most answers


@dataclasses.dataclass
class Tally:
    """What was counted while a file was read."""

    records: int = 0
    loaded: int = 0
    refused: int = 0
    with_passages: int = 0
    with_gold_passages: int = 0
    passages: int = 0
    gold_passages: int = 0
    golds: int = 0
    repeated_questions: int = 0
    golds_without_words: int = 0
    twice_encoded: int = 0
    empty_passages: int = 0
    missing_titles: int = 0
    missing_documents: int = 0
    datasets: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    formats: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    reasons: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    refusals: list[Refusal] = dataclasses.field(default_factory=list)
    _questions: set[bytes] = dataclasses.field(default_factory=set)

    def add(self, found: Loaded | Refusal) -> None:
        """Count one record."""
        self.records += 1
        if isinstance(found, Refusal):
            self.refused += 1
            self.reasons[_kind_of_reason(found.reason)] += 1
            if len(self.refusals) < MAX_LISTED:
                self.refusals.append(found)
            return
        self.loaded += 1
        self.datasets[found.question.dataset or "unknown"] += 1
        self.formats[found.format] += 1
        self._add_question(found)

    def _add_question(self, found: Loaded) -> None:
        question = found.question
        n_gold = sum(passage.is_supporting for passage in question.passages)
        self.with_passages += bool(question.passages)
        self.with_gold_passages += n_gold > 0
        self.passages += len(question.passages)
        self.gold_passages += n_gold
        self.golds += len(question.golds)
        self.golds_without_words += sum(map(_has_no_word, question.golds))
        self.empty_passages += question.meta.get("n_empty_passages", 0)
        self.missing_titles += "missing_titles" in question.meta
        self.missing_documents += question.meta.get("n_missing_documents", 0)
        words = (question.question, *question.golds)
        if any(not w.isascii() and _TWICE_ENCODED.search(w) for w in words):
            self.twice_encoded += 1
        key = hashlib.blake2b(
            normalise(question.question).encode(), digest_size=12
        ).digest()
        self.repeated_questions += key in self._questions
        self._questions.add(key)


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
    report |= _identity(file, tally) | known | _counts(tally)
    if file is None:
        report["records"] = None  # not counted: what they are was enough
    if error is None and not tally.loaded:
        first = tally.refusals[0]
        error = (
            f"{path}: none of {tally.records} records can be used; record "
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


def _counts(tally: Tally) -> dict[str, Any]:
    """Return the numbers, and what was refused."""
    names = [
        field.name
        for field in dataclasses.fields(tally)
        if isinstance(getattr(tally, field.name), int)
    ]
    return {name: getattr(tally, name) for name in names} | {
        "reasons": dict(tally.reasons.most_common()),
        "refusals": [
            {"record": r.number, "at": r.at, "reason": r.reason} for r in tally.refusals
        ],
        "refusals_not_listed": tally.refused - len(tally.refusals),
    }
