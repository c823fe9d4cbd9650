"""A file of answers: whatever its layout, row by row, scored in the order given.

Read are our own rows (the fields of `GivenAnswer`, and an id), lm-eval's
`samples_*.jsonl` and FlashRAG's records, in any container that questions are read from.
Where a log holds the prompt that was really used, that prompt is read.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from extract.datasets import fields
from extract.datasets.fields import Record
from extract.datasets.files.kinds import recognise
from extract.datasets.files.streams import RecordStream
from extract.datasets.loading import recognise_record
from extract.run.files import JsonLines, sha256_json
from pgir.scoring.given import GivenAnswer

ROWS_TOGETHER = 512  # read, sorted by length and written together
_OWN = tuple(field.name for field in dataclasses.fields(GivenAnswer))
_LM_EVAL = "lm-eval samples"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One record of a file of answers.

    Attributes:
      line: its number in the file, from 1.
      at: where it lies, in words.
      id: its own, or None.
      given: what is scored, or why the record tells no answer.
      unread: fields of the record that are not read.
      digest: of the whole record.
    """

    line: int
    at: str
    id: str | int | None
    given: GivenAnswer | str
    unread: tuple[str, ...]
    digest: str


def _shown(record: Record, passages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the prompt in a log, with those of the passages that are in it."""
    found: Any = record.get("arguments", record.get("prompt"))
    while isinstance(found, (list, dict)) and found and not _is_messages(found):
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    if isinstance(found, str) and found.startswith("[{"):
        try:
            found = json.loads(found)  # messages, as lm-eval writes them for servers
        except ValueError:
            pass
    if _is_messages(found):
        text = "\n".join(str(one.get("content")) for one in found)
        shown = [p for p in passages if p["text"] in text]
        return {"messages": found, "context": shown}
    if isinstance(found, str) and found:
        shown = [p for p in passages if p["text"] in found]
        return {"prompt": found, "context": shown}
    return {"context": list(passages)}


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and "role" in one for one in value
    )


def _of_log(record: Record) -> dict[str, Any]:
    """Read lm-eval's record: the first response as generated, under its prompt."""
    known = recognise_record(record)
    if known is None or known.read is None:
        raise ValueError("no lm-eval sample with 'doc' and 'target'")
    question = known.read(record)
    response: Any = record.get("resps") or record.get("filtered_resps")
    while isinstance(response, list) and response:
        response = response[0]
    passages = [{"title": p.title, "text": p.text} for p in question.passages]
    told = _shown(record, passages)
    text = told.get("prompt") or str(told.get("messages", question.question))
    asked = {"question": question.question} if question.question in text else {}
    return {**told, **asked, "answer": response}


def _passage(found: Any) -> dict[str, str]:
    """Return a passage; in `contents` its title is the line before its text."""
    if not isinstance(found, Mapping):
        return {"title": "", "text": fields.expect(found, str, "context")}
    if "contents" in found:
        contents = fields.expect(found["contents"], str, "contents")
        title, _, text = contents.partition("\n")
        return {"title": title, "text": text} if text else {"title": "", "text": title}
    text = fields.expect(found.get("text"), str, "text")
    return {"title": fields.expect(found.get("title", ""), str, "title"), "text": text}


def _of_flashrag(record: Record) -> dict[str, Any]:
    """Read FlashRAG's record: the prediction, its prompt, and what was retrieved."""
    output = record.get("output")
    output = {**record, **output} if isinstance(output, dict) else record
    answer = output.get("pred", output.get("answer"))
    fields.expect(answer, str, "output.pred")
    retrieved = output.get("retrieval_result") or output.get("context") or []
    context = [_passage(one) for one in fields.expect(retrieved, list, "context")]
    told = _shown({"prompt": output.get("prompt")}, context)
    if len(told["context"]) < len(context):
        raise ValueError(
            f"{len(context) - len(told['context'])} of {len(context)} retrieved "
            "passages are not in its prompt, so what the model was shown is unclear"
        )
    return {**told, "question": record.get("question"), "answer": answer}


def _told(record: Record) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments of a `GivenAnswer`, and the fields that are not read."""
    known = recognise_record(record)
    if known is not None and known.name == _LM_EVAL:
        return _of_log(record), ()
    if "golden_answers" in record and not isinstance(record.get("answer"), str):
        return _of_flashrag(record), ()
    unread = tuple(name for name in record if name not in (*_OWN, "id"))
    told = {name: record[name] for name in _OWN if name in record}
    if told.keys() <= {"question", "context"}:
        raise ValueError(
            f"no 'answer'; expected the fields {', '.join(_OWN[:3])} (or prompt, "
            f"messages, …), found {', '.join(map(repr, record)) or 'none'}"
        )
    return told, unread


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; what is no row says why.

    Raises:
      ValueError: the file is not JSON, a table or Parquet, or is cut off.
    """
    for raw in RecordStream(path, recognise(path)):
        given: GivenAnswer | str = raw.problem or "no record"
        unread: tuple[str, ...] = ()
        name = None
        if raw.value is not None:
            name = raw.value.get("id", raw.value.get("doc_id"))
            name = name if isinstance(name, (str, int)) else None
            try:
                told, unread = _told(raw.value)
                given = GivenAnswer(**told)
            except ValueError as error:
                given = str(error)
        yield Row(
            line=raw.number,
            at=raw.at,
            id=name,
            given=given,
            unread=unread,
            digest=sha256_json([raw.value, raw.problem]),
        )


def count_rows(path: Path) -> int:
    """Return how many rows a file has.

    Raises:
      ValueError: none, or as `read_rows`.
    """
    n = sum(1 for _ in RecordStream(path, recognise(path)))
    if not n:
        raise ValueError(f"{path} holds no records; expected an answer a row")
    return n


@dataclasses.dataclass
class Tally:
    """What became of a file's rows.

    Attributes:
      n_done: rows with a result, those of an earlier call included.
      n_trusted: those whose decision is "trust".
      n_abstained: those whose decision is "abstain".
      bad: for each row without a score, where it lies and why.
      unread: how many rows have a field that is not read, by its name.
    """

    n_done: int = 0
    n_trusted: int = 0
    n_abstained: int = 0
    bad: list[str] = dataclasses.field(default_factory=list)
    unread: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, row: Row, result: Mapping[str, Any]) -> None:
        """Count one result."""
        self.n_done += 1
        self.n_trusted += result.get("decision") == "trust"
        self.n_abstained += result.get("decision") == "abstain"
        if "error" in result:
            self.bad.append(f"{row.at}: {result['error']}")
        for name in row.unread:
            self.unread[name] = self.unread.get(name, 0) + 1

    def in_words(self) -> str:
        """Say what became of the rows."""
        text = (
            f"{self.n_done} rows: {self.n_trusted} trusted, {self.n_abstained} "
            f"abstained, {len(self.bad)} bad"
        )
        names = [f"{name!r} ({n})" for name, n in self.unread.items()]
        return f"{text}; fields not read: {', '.join(names)}" if names else text


def score_rows(
    score: Callable[[list[GivenAnswer | str]], list[dict[str, Any]]],
    rows: Iterable[Row],
    identity: str,
    out: JsonLines | None,
    write: Callable[[list[str]], None],
    each: Callable[[Row, Mapping[str, Any]], None],
) -> None:
    """Score rows in order; those that `out` has already are not scored again.

    Args:
      score: `Scorer.results`, of some rows at a time.
      rows: of a file.
      identity: of the detector, so that no file mixes two detectors' numbers.
      out: results of an earlier call; None where there is none.
      write: takes results as JSON lines, some rows at a time.
      each: called with every row and its result, in order.

    Raises:
      ValueError: `out` has results of other rows or of another detector.
    """
    stream = iter(rows)
    for number, old in enumerate(out.rows() if out else (), start=1):
        row = next(stream, None)
        if row is None or old.get("key") != _key(row, identity):
            raise ValueError(
                f"{out.path}, line {number}: is of another row or another detector; "
                "give a new --out, or delete it to score all again"
            )
        each(row, old)
    while some := list(itertools.islice(stream, ROWS_TOGETHER)):
        found = score([row.given for row in some])
        results = [
            {"line": row.line, "id": row.id, "key": _key(row, identity), **result}
            for row, result in zip(some, found, strict=True)
        ]
        write([json.dumps(result, allow_nan=False) for result in results])
        for row, result in zip(some, results, strict=True):
            each(row, result)


def _key(row: Row, identity: str) -> str:
    """Identity of a result: the record and the detector."""
    return sha256_json([row.digest, identity])[:16]
