"""What a file of questions is, told by its content: layout and question set."""

import collections
import dataclasses
from pathlib import Path

from extract.datasets.files.kinds import FileType, recognise
from extract.datasets.files.streams import RawRecord, RecordStream
from extract.datasets.loading import DatasetFile, DatasetSource, Loaded, choose_format
from extract.datasets.readers.question import (
    Format,
    Question,
    dataset_named,
    dataset_of_style,
    is_foreign,
)
from extract.datasets.readers.triviaqa import find_evidence

N_SAMPLE = 64  # records from which a file's layout and question set are told
N_SEARCHED = 4096  # records read for one of a known layout, where the first are not


class FileRefused(ValueError):
    """A file whose container was recognised, and which holds no questions.

    Attributes:
      type: how it holds its records.
      format: the layout that they are of, or None if it is not known.
    """

    def __init__(self, message: str, file_type: FileType, known: str | None) -> None:
        """Say why, and what is known all the same."""
        super().__init__(message)
        self.type, self.format = file_type, known


def open_dataset(
    path: Path, *, dataset: str | None = None, evidence: Path | None = None
) -> DatasetFile:
    """Recognise a file of questions.

    Args:
      path: the file; its name does not matter where its content tells.
      dataset: its question set, if known; refused where the records say otherwise.
      evidence: TriviaQA's folder of pages; looked for beside the file if None.

    Raises:
      ValueError: it holds no questions in any known layout; the message says what it
        holds instead.
    """
    file_type = recognise(path)
    try:
        records, known = _sample(path, file_type)
    except ValueError as error:
        raise FileRefused(str(error), file_type, None) from None
    if known.read is None:
        raise FileRefused(f"{path} {known.refusal}", file_type, known.name)
    file = DatasetFile(
        path=path,
        type=file_type,
        format=known,
        dataset=None,
        dataset_from=None,
        evidence=evidence or find_evidence(path),
    )
    name, source = _dataset_of(file, records)
    if dataset is not None:
        if source == "records" and name != dataset:
            raise ValueError(
                f"{path} holds {name}, not {dataset}; give it under its own name"
            )
        name, source = dataset, "given"
    return dataclasses.replace(file, dataset=name, dataset_from=source)


def _sample(path: Path, file_type: FileType) -> tuple[list[RawRecord], Format]:
    """Return the first records and their layout.

    Where none of them is of a known one, more are read: a damaged beginning does not
    make a file of questions another kind of file.
    """
    sample: list[RawRecord] = []
    n_read = n_known = 0
    try:
        for raw in RecordStream(path, file_type):
            is_known = _format_of([raw]) is not None
            n_read, n_known = n_read + 1, n_known + is_known
            if is_known or n_read <= N_SAMPLE:  # a thousand unknown ones may be large
                sample.append(raw)
            if n_read == N_SEARCHED or (n_known and n_read % N_SAMPLE == 0):
                break
    except ValueError:
        if not any(raw.value is not None for raw in sample):
            raise  # otherwise what was read tells what the file is
    if not sample:
        raise ValueError(f"{path} holds no records")
    values = [raw.value for raw in sample if raw.value is not None]
    if not values:
        raise ValueError(
            f"{path}: none of the first {n_read} records can be read; record "
            f"{sample[0].number} ({sample[0].at}): {sample[0].problem}"
        )
    known = _format_of(sample)
    if known is None:
        keys = ", ".join(repr(key) for key in list(values[0])[:8])
        what = f"with the fields {keys}" if keys else "without any field"
        raise ValueError(
            f"{path}: records {what} are of no known layout of questions; save them "
            'as FlashRAG does, {"id", "question", "golden_answers"} on each line'
        )
    return sample, known


def _format_of(sample: list[RawRecord]) -> Format | None:
    """Return the layout of the records that could be read."""
    return choose_format([raw.value for raw in sample if raw.value is not None])


def _dataset_of(
    file: DatasetFile, sample: list[RawRecord]
) -> tuple[str | None, DatasetSource | None]:
    """Return the question set and what told it."""
    found = [file.read_one(raw) for raw in sample]
    questions = [one.question for one in found if isinstance(one, Loaded)]
    named = collections.Counter(q.dataset for q in questions if q.dataset)
    known = file.format.dataset
    if named:
        most = max(named.values())
        if named.get(known or "") == most:
            return known, "records"  # where two sets have as many, as the format is
        return named.most_common(1)[0][0], "records"
    if known is not None and not file.format.is_weak:
        return known, "records"
    guess, source = _guessed(file, questions)
    # A name goes before a guess: short lists of aliases are PopQA's as well.
    name = dataset_named(file.path.name) or dataset_named(file.path.parent.name)
    return (guess, source) if name in (None, guess) else (name, "file name")


def _guessed(
    file: DatasetFile, questions: list[Question]
) -> tuple[str | None, DatasetSource | None]:
    """Return what a layout or a manner of asking suggests, and which of the two."""
    if is_foreign(file.path.name):
        return None, None
    if file.format.dataset is not None:
        return file.format.dataset, "layout"
    # Layouts of nobody in particular are not guessed at: any set may be written so.
    style = None if file.format.is_weak else dataset_of_style(questions)
    return style, None if style is None else "style of the questions"
