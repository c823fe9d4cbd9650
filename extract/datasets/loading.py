"""Recognise a file of questions by its content, and read it record by record.

Nothing is dropped silently: every record becomes a question, or a refusal with its
number and the reason.
"""

import collections
import dataclasses
import hashlib
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from beatrice.extract.datasets.fields import (
    DATASETS,
    Format,
    Question,
    Record,
    check_no_passages,
    dataset_named,
    dataset_of_style,
    is_foreign,
    unread_fields,
)
from beatrice.extract.datasets.readers import (
    attach_pages,
    choose_format,
    find_evidence,
    recognise_record,
)
from beatrice.extract.datasets.rows import (
    FileType,
    OnRead,
    RawRecord,
    ignore_bytes,
    read_raw,
    recognise,
)
from beatrice.extract.datasets.splits import Context
from beatrice.extract.records import (
    NAME_IN_WORDS,
    Example,
    check_choice,
    check_id,
    is_safe_name,
    normalise,
    text_key,
)
from beatrice.extract.run.files import sha256_file

N_SAMPLE = 64  # records from which a file's layout and question set are recognised
MAX_LISTED = 1000  # refused records that are listed; all are counted
# A layout tells less than marks in the records: other sets may use it too.
DatasetSource = Literal[
    "given", "records", "layout", "style of the questions", "file name"
]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A record that is a question."""

    number: int  # position of the record in the file, from 1
    at: str  # its place in the file, in words
    question: Question
    format: str
    unread: Sequence[str] = ()  # fields of a plain record that are not read


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A record that cannot be used, and why."""

    number: int
    at: str
    reason: str


class FileRefused(ValueError):
    """A file whose container was recognised, but which holds no questions."""

    def __init__(self, message: str, file_type: FileType, layout: str | None) -> None:
        """Keep the file's type and its records' layout (None if unknown)."""
        super().__init__(message)
        self.type, self.format = file_type, layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetFile:
    """A recognised file."""

    path: Path
    type: FileType
    format: Format
    evidence: Path | None  # TriviaQA's folder of pages, if there is one
    dataset: str | None = None  # question set of most records; None if unknown
    dataset_from: DatasetSource | None = None  # how the question set was recognised
    # Other fields of an object around the records; filled once they are read.
    envelope: dict[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, on_read: OnRead = ignore_bytes) -> Iterator[Loaded | Refusal]:
        """Yield every record, in file order; see `read_raw`."""
        numbers: dict[int, int] = {}  # number of the first record with an id
        log_filter: str | None = None
        for raw in read_raw(self.path, self.type, self.envelope, on_read):
            row = self.read_one(raw)
            if isinstance(row, Loaded):
                # Only in a log: examples made from one have `filter` in their `meta`.
                is_log = raw.value is not None and "filter" in raw.value
                name = row.question.meta.get("filter") if is_log else None
                log_filter = log_filter or name
                if name in (None, log_filter):
                    row = _refuse_repeated_id(row, numbers)
                else:  # a log with two filters has each question twice
                    reason = (
                        f"repeats a question through the filter {name!r}: only the "
                        f"first filter's records, {log_filter!r}, are read"
                    )
                    row = Refusal(raw.number, raw.at, reason)
            yield row

    def read_one(self, raw: RawRecord) -> Loaded | Refusal:
        """Turn one raw record into a question or a refusal."""
        if raw.value is None:
            return Refusal(raw.number, raw.at, raw.problem or "not a record")
        layout, value = self.format, raw.value
        if not layout.fits(value):
            layout = self._other_format(value)
        if layout.read is None:
            return Refusal(raw.number, raw.at, f"is of another kind ({layout.name})")
        # Records with a foreign set's tag may be read under a name of the user's own.
        is_renamed = self.dataset_from == "given" and self.dataset not in DATASETS
        if is_renamed and is_foreign(value.get("dataset")):
            value = {key: x for key, x in value.items() if key != "dataset"}
        try:
            question = layout.read(value)
            if not (question.passages or question.documents):
                check_no_passages(value)
            if question.documents or layout.dataset == "triviaqa":
                question = attach_pages(question, self.evidence)
            question = self._completed(question)
            check_id(question.example_id)
            # Published layouts have many other fields, and none that should be read.
            unread = unread_fields(value) if layout.is_weak else ()
        except ValueError as error:
            return Refusal(raw.number, raw.at, str(error))
        return Loaded(raw.number, raw.at, question, layout.name, unread)

    def _other_format(self, record: Record) -> Format:
        """Return the layout of a record that does not fit the file's layout.

        A record with less than the file's layout (say, no paragraphs) is damaged; the
        file's own layout is returned, whose reader says what is missing.
        """
        other = recognise_record(record)
        if other is None or (other.is_weak and not self.format.is_weak):
            return self.format
        return other

    def _completed(self, question: Question) -> Question:
        """Fill in the set and any missing id (from the text); drop empty passages."""
        changes: dict[str, Any] = {}
        is_given, name = self.dataset_from == "given", question.dataset
        if is_given and self.dataset in DATASETS and name not in (None, self.dataset):
            raise ValueError(f"is of {name}, but its file was given as {self.dataset}")
        if is_given or name is None:
            changes["dataset"] = self.dataset
        if question.id is None:
            digest = hashlib.sha256(question.question.encode()).hexdigest()[:24]
            changes |= {"id": f"q{digest}", "has_made_id": True}
        passages = tuple(passage for passage in question.passages if passage.text)
        if n_empty := len(question.passages) - len(passages):
            meta = {**question.meta, "n_empty_passages": n_empty}
            changes |= {"passages": passages, "meta": meta}
        return dataclasses.replace(question, **changes)


def _refuse_repeated_id(row: Loaded, numbers: dict[int, int]) -> Loaded | Refusal:
    """Refuse a record whose id an earlier one has; adds its id to `numbers`."""
    question = row.question
    short = hash((question.dataset, question.id))  # the id takes too much memory
    first = numbers.setdefault(short, row.number)
    if first == row.number or question.has_made_id:
        return row
    reason = f"the id {question.id!r} is already that of record {first}"
    return Refusal(row.number, row.at, reason)


def open_dataset(
    path: Path, *, dataset: str | None = None, evidence: Path | None = None
) -> DatasetFile:
    """Recognise a file of questions, by its content rather than its name.

    If `dataset` is one of the six sets, records of another set are an error. If
    `evidence` is None, TriviaQA's folder of pages is looked for next to the file.
    """
    file_type = recognise(path)
    try:
        records, layout = _sample(path, file_type)
    except ValueError as error:
        raise FileRefused(str(error), file_type, None) from None
    if layout.read is None:
        raise FileRefused(f"{path} {layout.refusal}", file_type, layout.name)
    evidence = evidence or find_evidence(path)
    file = DatasetFile(path=path, type=file_type, format=layout, evidence=evidence)
    name, source = _dataset_of(file, records)
    if dataset is not None:
        if source == "records" and name != dataset and dataset in DATASETS:
            raise ValueError(
                f"{path} holds {name}, not {dataset}; give it under its own name"
            )
        name, source = dataset, "given"
    return dataclasses.replace(file, dataset=name, dataset_from=source)


def _sample(path: Path, file_type: FileType) -> tuple[list[RawRecord], Format]:
    sample: list[RawRecord] = []
    try:
        sample.extend(itertools.islice(read_raw(path, file_type), N_SAMPLE))
    except ValueError:
        if all(raw.value is None for raw in sample):
            raise  # otherwise the records that were read show what the file is
    if not sample:
        raise ValueError(f"{path} holds no records")
    values = [raw.value for raw in sample if raw.value is not None]
    if not values:
        raise ValueError(
            f"{path}: none of the first {len(sample)} records can be read; record "
            f"{sample[0].number} ({sample[0].at}): {sample[0].problem}"
        )
    layout = choose_format(values)
    if layout is None:
        keys = ", ".join(repr(key) for key in list(values[0])[:8])
        what = f"with the fields {keys}" if keys else "without any field"
        raise ValueError(
            f"{path}: records {what} have no known layout of questions; save them as "
            'FlashRAG does, {"id", "question", "golden_answers"} on each line'
        )
    return sample, layout


def _dataset_of(
    file: DatasetFile, sample: list[RawRecord]
) -> tuple[str | None, DatasetSource | None]:
    rows = [file.read_one(raw) for raw in sample]
    questions = [row.question for row in rows if isinstance(row, Loaded)]
    named = collections.Counter(q.dataset for q in questions if q.dataset)
    of_format = file.format.dataset
    if named:
        # If sets are equally frequent, the layout's own set wins.
        if of_format is not None and named[of_format] == max(named.values()):
            return of_format, "records"
        return named.most_common(1)[0][0], "records"
    if of_format is not None and not file.format.is_weak:
        return of_format, "records"
    guess: str | None = None
    source: DatasetSource = "layout"
    if not is_foreign(file.path.name):
        guess = of_format
        # The style is no guide in weak layouts: any set may be written in them.
        if of_format is None and not file.format.is_weak:
            guess, source = dataset_of_style(questions), "style of the questions"
    # A name goes before a guess: PopQA has short lists of aliases, too.
    name = dataset_named(file.path.name) or dataset_named(file.path.parent.name)
    if name is not None and name != guess:
        return name, "file name"
    return guess, None if guess is None else source


def read_questions(
    path: Path | str, dataset: str | None = None, *, context: Context = "all"
) -> list[Example]:
    """Read a file of questions, in any of the layouts that `beatrice data` reads.

    Args:
      path: JSON, JSON lines, CSV, TSV or Parquet, also gzipped: a published question
        set, or lines with "question", "golds" and optionally "id" and "passages".
      dataset: name of the question set; by default taken from the records or the file's
        name.
      context: which passages an example has: all that came with its question, the
        supporting ones, the first of these, or none.

    Returns:
      The questions in file order, each with a unique id. Their split is the one that
      the record names, else `train`. A `UserWarning` names fields of plain records that
      are not read, since accepted answers or passages may be among them.

    Raises:
      ValueError: the file has no questions, a record cannot be used (its number and the
        reason are given), or an argument has the wrong type.
    """
    if not isinstance(path, str | Path):
        raise ValueError(
            "read_questions reads a file: expected its path, found "
            f"{type(path).__name__} (make questions in memory with Example)"
        )
    if dataset is not None and not (isinstance(dataset, str) and is_safe_name(dataset)):
        raise ValueError(f"dataset: expected a {NAME_IN_WORDS}, found {dataset!r}")
    check_choice("context", context, get_args(Context))
    path = Path(os.path.expanduser(path))
    file = open_dataset(path, dataset=dataset)
    stem = path.name.partition(".")[0]
    default = file.dataset or (stem if is_safe_name(stem) else "questions")
    examples: dict[str, Example] = {}
    next_number: dict[str, int] = {}
    unread = collections.Counter[str]()
    for row in file.read():
        if isinstance(row, Refusal):
            raise ValueError(f"{path}, record {row.number} ({row.at}): {row.reason}")
        unread.update(row.unread)
        question = row.question
        if question.dataset is None:
            question = dataclasses.replace(question, dataset=default)
        split = question.split or "train"
        example = question.as_example(split, question.context(context))
        # A question without an id may occur several times.
        base = example.id
        for number in itertools.count(next_number.get(base, 2)):
            if examples.setdefault(example.id, example) is example:
                break
            next_number[base] = number + 1
            name = f"{question.dataset}-{question.id}-{number}"
            example = msgspec.structs.replace(example, id=name)
    if unread:
        warnings.warn(f"{path}: {unread_in_words(unread)}", stacklevel=2)
    return list(examples.values())


def unread_in_words(counts: Mapping[str, int]) -> str:
    """Return the fields that are not read, each with its number of records."""
    names = ", ".join(f"{name!r} ({n})" for name, n in sorted(counts.items()))
    return f"fields not read: {names}"


def none_usable(path: Path, n_records: int, first: Refusal) -> str:
    """Return the error for a file whose every record is refused."""
    return (
        f"{path}: none of {n_records} records can be used; record {first.number} "
        f"({first.at}): {first.reason}"
    )


# A value in a reason, in either kind of Python quotes.
_A_VALUE = re.compile(
    r"(found|the id|the filter|records,|its 'dataset' is|the evidence file) "
    r"""b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
)
_LONG_WORD = re.compile(r"\w{4}")  # never an article: spares normalising most answers
_COUNTED = ("records", "loaded", "refused", "with_passages", "with_gold_passages",
            "passages", "gold_passages", "golds", "repeated_questions",
            "golds_without_words", "empty_passages", "missing_titles",
            "missing_documents")  # fmt: skip


def inspect_file(
    path: Path, *, dataset: str | None = None, evidence: Path | None = None
) -> dict[str, Any]:
    """Return a report of a file of questions, see the help of `beatrice data`."""
    counts: collections.Counter[str] = collections.Counter(dict.fromkeys(_COUNTED, 0))
    datasets, formats, reasons, unread = (collections.Counter[str]() for _ in range(4))
    refusals: list[dict[str, Any]] = []
    texts: set[bytes] = set()
    file, error = None, None
    identity: dict[str, Any] = dict.fromkeys(
        ("dataset", "dataset_from", "format", "container", "gzipped", "bom")
    )
    try:
        file = open_dataset(path, dataset=dataset, evidence=evidence)
        for row in file.read():
            counts["records"] += 1
            if isinstance(row, Refusal):
                counts["refused"] += 1
                # Reasons that differ only in numbers and values are counted as one.
                kind = re.sub(r"\d+", "N", _A_VALUE.sub(r"\1 …", row.reason))
                reasons[kind] += 1
                if len(refusals) < MAX_LISTED:
                    about = {"record": row.number, "at": row.at, "reason": row.reason}
                    refusals.append(about)
                continue
            datasets[row.question.dataset or "unknown"] += 1
            formats[row.format] += 1
            unread.update(row.unread)
            counts.update(_counts_of(row.question, texts))
    except (ValueError, OSError) as problem:
        error = " ".join(str(problem).split())
        if isinstance(problem, FileRefused):
            identity |= {"format": problem.format, **_container(problem.type)}
    if file is not None:
        identity = _identity(file)
        identity |= {"datasets": dict(datasets), "formats": dict(formats)}
    if error is None and not counts["loaded"]:
        first = Refusal(*refusals[0].values())
        error = none_usable(path, counts["records"], first)
    report: dict[str, Any] = {"file": str(path)}
    if path.is_file():
        report |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    return {
        **report,
        **identity,
        **counts,
        # Records are not counted if the file was refused for what it is.
        "records": None if file is None else counts["records"],
        "reasons": dict(reasons.most_common()),
        "unread": dict(unread),
        "refusals": refusals,
        "refusals_not_listed": counts["refused"] - len(refusals),
        "error": error,
    }


def _identity(file: DatasetFile) -> dict[str, Any]:
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
    }


def _container(file_type: FileType) -> dict[str, Any]:
    return {
        "container": file_type.container,
        "gzipped": file_type.is_gzipped,
        "bom": file_type.has_bom,
    }


def _counts_of(question: Question, texts: set[bytes]) -> collections.Counter[str]:
    """Return the counts of one question; adds its text's digest to `texts`."""
    n_gold = sum(passage.is_supporting for passage in question.passages)
    n_before = len(texts)
    texts.add(text_key(question.question))
    return collections.Counter(
        loaded=1,
        with_passages=bool(question.passages),
        with_gold_passages=n_gold > 0,
        passages=len(question.passages),
        gold_passages=n_gold,
        golds=len(question.golds),
        golds_without_words=sum(
            _LONG_WORD.search(gold) is None and not normalise(gold)
            for gold in question.golds
        ),
        empty_passages=question.meta.get("n_empty_passages", 0),
        missing_titles="missing_titles" in question.meta,
        missing_documents=question.meta.get("n_missing_documents", 0),
        repeated_questions=len(texts) == n_before,
    )
