"""A corpus: the passages of any files, each stored once, on disk, and read one by one.

Corpora are read as they are published (DPR's `psgs_w100.tsv`, the JSON lines of
FlashRAG and Search-R1, HippoRAG's lists of titles and texts), and so are the contexts
of question sets. Their gold passages are recorded too, so that retrieval can be
measured by the gold passages and gold answers among the first of a ranking.
"""

import collections
import contextlib
import hashlib
import mmap
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, overload

import msgspec
import numpy as np

from beatrice.extract.datasets.fields import Question
from beatrice.extract.datasets.loading import FileRefused, Loaded, Refusal, open_dataset
from beatrice.extract.datasets.rows import OnRead, read_raw
from beatrice.extract.records import (
    Passage,
    Record,
    normalise,
    read_records,
    spaced,
    text_key,
    to_json,
)
from beatrice.extract.run.console import Progress, shell_line, table_head, table_row
from beatrice.extract.run.directory import acquire_lock
from beatrice.extract.run.files import (
    read_sealed,
    seal,
    sha256_file,
    sha256_once,
    write_json_atomic,
    write_stream_atomic,
)
from beatrice.pgir.arguments import as_passage

# A passage must fit into a prompt. TriviaQA's evidence is whole pages, and nothing says
# which paragraph holds the answer.
MOST_WORDS = 1000
DEPTHS = (3, 5, 20)  # of a ranking, at which retrieval is measured
# In what two wordings of a passage may differ, besides case: blanks, quotes, brackets;
# sentence marks that end a word (those of "3.5" and "!=" count); dashes, unless a word
# begins with one ("-5"). All else counts: "C++" is not "C#", a vowel sign is a letter.
_BLANKS = r"""\s"'`´‘’‚“”„«»‹›()\[\]{}"""
_MARKS, _DASHES = "[.,;:!?…]", "[-‐‑–—]"
# Each run is tried once, as a whole: a page may have a line of 100,000 dots.
_BETWEEN = re.compile(
    rf"[{_BLANKS}]|(?<!{_MARKS}){_MARKS}++(?=[{_BLANKS}]|$)"
    rf"|(?<=\w){_DASHES}+|(?<!{_DASHES}){_DASHES}++(?!\w)"
)
_NO_SOURCE = (
    "left out, as it has neither questions nor passages (records with 'text', "
    "'contents' or 'page_content')"
)
_AGAIN = "build the corpus again in another folder"
_FILES = ("passages.jsonl", "gold.jsonl", "lines.npy")
# What is counted for a file, and the words for it.
_COUNTED = {
    "n_found": "passages",
    "n_new": "of them new",
    "n_long": f"left out for more than {MOST_WORDS} words",
    "n_empty": "left out without a word",
}
Note = Callable[[str], None]
# The mean at each depth, by (question set, measure).
Measured = dict[tuple[str, str], dict[int, float]]


class Gold(Record, frozen=True, kw_only=True):
    """A question, and the indices in the corpus of its gold passages."""

    dataset: str
    id: str
    question: str
    golds: tuple[str, ...]
    passages: tuple[int, ...]


class Corpus(Sequence[Passage]):
    """The passages of a finished corpus, read from disk one by one.

    Passages that differ only in case, blanks, quotes, brackets, dashes and the marks
    that end sentences are one; the first wording is kept.

    `facts`, from `corpus.json`, has `sources` with the counts of every file: its
    passages, those that no earlier file had, and those left out for having more than
    `MOST_WORDS` words or none. `identity` is the SHA-256 of the passages; an index
    records the one that it was built on.
    """

    def __init__(self, folder: Path) -> None:
        """Open a corpus; `sha256_once` checks every file against its SHA-256."""
        self.folder = folder
        self.facts = read_facts(folder)
        for name, sha256 in self.facts["files"].items():
            check_file(folder / name, sha256, f"restore it, or {_AGAIN}")
        self.identity: str = self.facts["files"]["passages.jsonl"]
        self._lines = np.load(folder / "lines.npy", mmap_mode="r")
        with (folder / "passages.jsonl").open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._decode = msgspec.json.Decoder(Passage).decode

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self._lines) - 1

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        """Return the passage at an index, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"passage {index} of {len(self)}")
        start, stop = int(self._lines[index]), int(self._lines[index + 1])
        return self._decode(self._bytes[start:stop])

    def golds(self) -> list[Gold]:
        """Return the questions with known gold passages."""
        return list(read_records(self.folder / "gold.jsonl", Gold))


def check_file(path: Path, sha256: str, what_to_do: str) -> None:
    """Check that a file is there and has this SHA-256."""
    if not path.is_file() or sha256_once(path) != sha256:
        raise ValueError(
            f"{path} is damaged: it does not match its SHA-256; {what_to_do}"
        )


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts of a finished corpus without reading its other files."""
    if not (folder / "corpus.json").is_file():
        line = shell_line("corpus", folder, "--source", "FILE")
        raise ValueError(f"{folder} has no finished corpus; build one with `{line}`")
    return read_sealed(folder / "corpus.json", _AGAIN)


def as_document(passage: Passage) -> str:
    """Return a passage as FlashRAG and Search-R1 write it, and as encoders read it.

    The title in double quotes, a line break and the text; without a title, the text.
    """
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text


def as_served(passage: Passage) -> str:
    """Return the document that `from_document` reads as this passage.

    It is that of `as_document`, except that the title becomes a single line, and a text
    of several lines without a title is preceded by an empty one.
    """
    if not passage.title and "\n" in passage.text:
        return f'""\n{passage.text}'
    title = passage.title.replace("\n", " ")
    return as_document(Passage(title=title, text=passage.text))


def _key(passage: Passage) -> int:
    """Hash the bare wording to 8 bytes; P(any clash in 21e6 passages) is 1.2e-5."""
    text = unicodedata.normalize("NFC", f"{passage.title} {passage.text}").casefold()
    words = " ".join(_BETWEEN.sub(" ", text).split())
    digest = hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest)


def _has_passages(path: Path, error: FileRefused) -> bool:
    """Return whether a file without questions has records that are passages."""
    if error.format is not None:
        return error.format.startswith("passages")
    try:
        record = next(read_raw(path, error.type)).value or {}
    except (ValueError, StopIteration):
        return False
    return any(isinstance(record.get(x), str) for x in ("text", "page_content"))


def read_source(
    path: Path, note: Note, on_read: OnRead
) -> Iterator[tuple[Question | None, Sequence[Passage]]]:
    """Yield the passages of a file, or its questions with their passages.

    For `on_read`, see `read_raw`.
    """
    try:
        questions = open_dataset(path)
    except ValueError as error:
        if not (isinstance(error, FileRefused) and _has_passages(path, error)):
            note(f"{path.name}: {_NO_SOURCE}")
            return
        for raw in read_raw(path, error.type, on_read=on_read):
            if raw.value is None:
                raise ValueError(f"{path}, {raw.at}: {raw.problem}") from None
            passage = as_passage(raw.value, f"{path}, {raw.at}")
            title, text = passage.title.strip(), passage.text.strip()
            yield None, [Passage(title=title, text=text)]
        return
    refused: list[Refusal] = []
    for row in questions.read(on_read):
        if isinstance(row, Loaded):
            yield row.question, row.question.passages
        else:
            refused.append(row)
    if refused:
        first = refused[0]
        note(
            f"{path.name}: unusable records left out: {len(refused)}; the first is "
            f"record {first.number} ({first.at}): {first.reason}"
        )


class _Writer:
    """Writes passages and gold passages, each once, and counts them for a file."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        self.lines = [0]
        self.questions: set[tuple[str, bytes]] = set()
        self.counts: collections.Counter[str] = collections.Counter()

    def add(self, passage: Passage, stream: IO[bytes]) -> int | None:
        """Write a passage unless it is there; return its index, None if left out."""
        self.counts["n_found"] += 1
        n_words = len(spaced(passage.text).split())
        if not 0 < n_words <= MOST_WORDS:
            self.counts["n_long" if n_words else "n_empty"] += 1
            return None
        index = self.places.setdefault(_key(passage), len(self.places))
        if index == len(self.lines) - 1:
            self.counts["n_new"] += 1
            bare = Passage(title=passage.title, text=passage.text)
            line = f"{to_json(bare)}\n".encode()
            stream.write(line)
            self.lines.append(self.lines[-1] + len(line))
        return index

    def add_golds(
        self, question: Question, places: Sequence[int | None], stream: IO[bytes]
    ) -> None:
        """Write a question's gold passages, unless it has none or was seen before."""
        pairs = zip(question.passages, places, strict=True)
        golds = [i for passage, i in pairs if passage.is_supporting and i is not None]
        name = question.dataset or "unknown"
        key = (name, text_key(question.question))
        if not golds or key in self.questions:
            return
        self.questions.add(key)
        gold = Gold(
            dataset=name,
            id=str(question.id),
            question=question.question,
            golds=question.golds,
            passages=tuple(dict.fromkeys(golds)),
        )
        stream.write(f"{to_json(gold)}\n".encode())


def _source_files(sources: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        inside = sorted(source.rglob("*")) if source.is_dir() else [source]
        files += [path for path in inside if path.is_file()]
    if not files:
        raise ValueError("a corpus needs at least one file, found none")
    return files


def build_corpus(folder: Path, sources: Sequence[Path], note: Note) -> Corpus:
    """Build a corpus, or open an existing one if it was built from the same files.

    Memory grows with the number of passages (some 150 bytes each), not with the files.
    """
    files = _source_files(sources)
    hashes = [[path.name, sha256_file(path)] for path in files]
    if (folder / "corpus.json").exists():
        corpus = Corpus(folder)
        if corpus.facts["asked"] != hashes:
            raise ValueError(
                f"{folder} has a corpus of other files; choose another folder"
            )
        return corpus
    with exclusive_folder(folder):
        writer, reports = _write_passages(folder, files, hashes, note)
        with write_stream_atomic(folder / "lines.npy") as stream:
            np.save(stream, np.array(writer.lines, np.int64))
        facts = {
            "asked": hashes,
            "sources": reports,
            "n_passages": len(writer.places),
            "files": {name: sha256_file(folder / name) for name in _FILES},
        }
        write_json_atomic(folder / "corpus.json", seal(facts))
    return Corpus(folder)


@contextlib.contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Create and lock a folder (`InUse` for others); if left empty, remove it again."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    with acquire_lock(lock) as stream:
        try:
            yield
        finally:
            if [*folder.iterdir()] == [lock]:
                lock.unlink()
                folder.rmdir()
            else:
                stream.truncate(0)


def _write_passages(
    folder: Path, files: Sequence[Path], hashes: Sequence[Sequence[str]], note: Note
) -> tuple[_Writer, list[dict[str, Any]]]:
    writer, reports = _Writer(), []
    sizes = [path.stat().st_size for path in files]
    with (
        Progress().stage("corpus") as update,
        write_stream_atomic(folder / "passages.jsonl") as passages,
        write_stream_atomic(folder / "gold.jsonl") as golds,
    ):
        for i, (path, (name, sha256)) in enumerate(zip(files, hashes, strict=True)):

            def on_read(n_bytes: int, n_before: int = sum(sizes[:i])) -> None:
                update(n_before + n_bytes, sum(sizes))

            writer.counts = collections.Counter(dict.fromkeys(_COUNTED, 0))
            for question, of_record in read_source(path, note, on_read):
                places = [writer.add(passage, passages) for passage in of_record]
                if question is not None:
                    writer.add_golds(question, places, golds)
            if writer.counts["n_found"]:
                reports.append({"name": name, "sha256": sha256, **writer.counts})
                counts = (f"{n} {_COUNTED[x]}" for x, n in writer.counts.items() if n)
                note(f"{name}: {', '.join(counts)}")
        if not writer.places:
            raise ValueError("none of the files has a passage; give other files")
    return writer, reports


def gold_recall(
    ranking: np.ndarray, golds: Sequence[int], depths: Sequence[int] = DEPTHS
) -> dict[int, float]:
    """Return the share of a question's gold passages among the first of a ranking.

    Args:
      ranking: `[n]` indices, best first.
      golds: indices of the gold passages, at least one.
      depths: how many passages count as the first.
    """
    return {
        depth: len(set(golds) & set(ranking[:depth].tolist())) / len(golds)
        for depth in depths
    }


def has_answer(
    ranking: np.ndarray,
    passages: Sequence[Passage],
    golds: Sequence[str],
    depths: Sequence[int] = DEPTHS,
) -> dict[int, float]:
    """Return, by depth, 1 if one of the first passages contains a gold answer, else 0.

    The words of the normalised answer must occur in order, as whole words of the
    normalised passage (DPR's "has answer" with SQuAD's normalisation; see `spaced`).
    """
    answers = [f" {words} " for gold in golds if (words := spaced(normalise(gold)))]
    is_held = []
    for index in ranking[: max(depths)].tolist():
        passage = passages[index]
        text = f" {spaced(normalise(f'{passage.title} {passage.text}'))} "
        is_held.append(any(words in text for words in answers))
    return {depth: float(any(is_held[:depth])) for depth in depths}


def measure(
    rankings: Sequence[np.ndarray] | np.ndarray,
    passages: Sequence[Passage],
    golds: Sequence[Gold],
) -> tuple[Measured, dict[str, int]]:
    """Return recall and has-answer per question set, and how many questions each has.

    Args:
      rankings: `[n]` indices for each question, best first.
      passages: the passages that the indices refer to.
      golds: the questions, with their gold passages.
    """
    of_set: dict[tuple[str, str], list[dict[int, float]]] = {}
    for gold, ranking in zip(golds, rankings, strict=True):
        values = {
            "recall": gold_recall(ranking, gold.passages),
            "answer": has_answer(ranking, passages, gold.golds),
        }
        for name, by_depth in values.items():
            of_set.setdefault((gold.dataset, name), []).append(by_depth)
    measured = {
        key: {d: sum(x[d] for x in by_depth) / len(by_depth) for d in DEPTHS}
        for key, by_depth in of_set.items()
    }
    return measured, dict(collections.Counter(gold.dataset for gold in golds))


def agreement(rankings: np.ndarray, exact: np.ndarray) -> dict[int, float]:
    """Return, by depth, the share of an exact ranking's first passages that are found.

    Args:
      rankings: `[n_queries, n]` indices, from a lossy index.
      exact: `[n_queries, n]` indices, from the flat index.
    """
    pairs = list(zip(rankings, exact, strict=True))
    shares = {d: [gold_recall(a, b[:d], (d,))[d] for a, b in pairs] for d in DEPTHS}
    return {depth: float(np.mean(values)) for depth, values in shares.items()}


def recall_table(measured: Mapping[str, Measured], counts: Mapping[str, int]) -> str:
    """Return a Markdown table of recall and has-answer, a row per set and retriever."""
    at = [(kind, depth) for kind in ("recall", "answer") for depth in DEPTHS]
    lines = [table_head(["set", "n", "retriever", *(f"{x}@{d}" for x, d in at)])]
    for dataset, n in counts.items():
        for name, of_retriever in measured.items():
            values = (of_retriever[dataset, kind][depth] for kind, depth in at)
            cells = (f"{value:.3f}".lstrip("0") for value in values)
            lines.append(table_row([dataset, f"{n:,}", name, *cells]))
    return "\n".join(lines)
