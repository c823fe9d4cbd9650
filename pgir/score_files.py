"""Reads a file of answers in any known layout, scores it in order, makes its page.

The layouts are our own rows (the fields of `AnswerToScore`, and an id), lm-eval's
`samples_*.jsonl` and FlashRAG's records, in any container that question files may have.
If a log has the prompt that was really used, that prompt is read. The page tints tokens
by their probability under the backbone, the simplest quantity exact for a token.
"""

import collections
import dataclasses
import html
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import numpy as np

from beatrice.extract.datasets.fields import (
    Record,
    as_listed,
    parse_nested,
    passage_field,
    read_passages,
)
from beatrice.extract.datasets.readers import read_lm_eval, recognise_record
from beatrice.extract.datasets.rows import read_raw, recognise
from beatrice.extract.records import Answer, Passage, split_words
from beatrice.extract.run.files import JsonLines, sha256_json
from beatrice.extract.signals.sequence import sequence_of
from beatrice.pgir.arguments import as_messages, as_passages, as_text
from beatrice.pgir.given import ARGUMENTS, READING, AnswerToScore, token_texts

if TYPE_CHECKING:
    from beatrice.pgir.asking import Score

ROWS_TOGETHER = 64  # read, scored by length and written together; a kill loses these
# Keys that hold a passage's text in question files only.
_OF_QUESTIONS = {"paragraph_text", "content"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One record of a file of answers."""

    line: int  # on which it begins; the record's number if records are not on lines
    at: str  # its position, in words
    id: str | float | None
    given: AnswerToScore | str  # what to score, or why the record has no answer
    unread: tuple[str, ...]  # fields of the record that are not read
    digest: str  # hash of the whole record


def _prompt_of(record: Record, passages: Sequence[Passage]) -> dict[str, Any]:
    """Return the prompt in a log, with the passages that it contains."""
    prompt: Any = record.get("arguments", record.get("prompt"))
    while isinstance(prompt, (list, dict)) and prompt and not _is_messages(prompt):
        prompt = next(iter(prompt.values())) if isinstance(prompt, dict) else prompt[0]
    if isinstance(prompt, str) and prompt.startswith("[{"):
        try:
            prompt = json.loads(prompt)  # messages, as lm-eval writes them for servers
        except (ValueError, RecursionError):
            pass
    if _is_messages(prompt):
        prompt = as_messages(prompt, "messages")
        text = _text_of(prompt)
        return {"messages": prompt, "context": [p for p in passages if p.text in text]}
    if isinstance(prompt, str) and prompt:
        return {"prompt": prompt, "context": [p for p in passages if p.text in prompt]}
    return {"context": passages}


def _is_messages(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(x, Mapping) and "role" in x for x in value)


def _text_of(messages: Iterable[Mapping[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages)


def _row_of_log(record: Record) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a record of lm-eval: the first response as generated, with its prompt."""
    question = read_lm_eval(record, needs_golds=False)
    response: Any = record.get("resps") or record.get("filtered_resps")
    while isinstance(response, list) and response:
        if str(response[-1]) in ("True", "False") and len(response) == 2:
            raise ValueError(
                "its responses are log-likelihoods, as in a multiple-choice task, so "
                "no answer was written; log a task that generates"
            )
        response = response[0]
    arguments = _prompt_of(record, question.passages)
    text = arguments.get("prompt") or _text_of(arguments.get("messages", []))
    if not text or question.question in text:
        arguments["question"] = question.question
    for part in (*(p.text for p in question.passages if p.text), question.question):
        text = text.replace(part, "\n")
    return {**arguments, "answer": response}, _shown_fields(record["doc"], text)


def _shown_fields(document: Record, text: str) -> tuple[str, ...]:
    """Return the fields of a log's document whose texts occur in a text, longest first.

    Single words are ignored, since they occur in many prompts by chance.
    """
    texts = {f"doc.{k}": v.strip() for k, v in document.items() if isinstance(v, str)}
    names = []
    for name, value in sorted(texts.items(), key=lambda item: -len(item[1])):
        if value in text and len(split_words(value)) > 1:
            names.append(name)
            text = text.replace(value, "\n")
    return tuple(names)


def _row_of_flashrag(record: Record) -> dict[str, Any]:
    """Read a record of FlashRAG: the prediction, its prompt, and what was retrieved."""
    output = record.get("output")
    output = {**record, **output} if isinstance(output, dict) else record
    answer = as_text(output.get("pred", output.get("answer")), "output.pred")
    retrieved = output.get("retrieval_result") or output.get("context")
    context = as_passages(retrieved, "context")
    arguments = _prompt_of({"prompt": output.get("prompt")}, context)
    if len(arguments["context"]) < len(context):
        raise ValueError(
            f"its prompt lacks {len(context) - len(arguments['context'])} of "
            f"{len(context)} retrieved passages, so what the model was shown is unclear"
        )
    return {**arguments, "question": record.get("question"), "answer": answer}


def record_context(record: Record) -> tuple[str | None, list[Passage]]:
    """Return the field in which a record has passages, and those that are not blank.

    `context` takes precedence. Tables may hold the list as a text in a cell.
    """
    field, context = "context", record.get("context")
    if not context or (isinstance(context, str) and not context.strip()):
        field = passage_field(record)
    if field is None:
        return None, []
    value = as_listed(record[field], field)
    items = value if isinstance(value, list) else [value]
    passages = (
        read_passages(items, field)
        if any(isinstance(x, dict) and x.keys() & _OF_QUESTIONS for x in items)
        else as_passages(value, field)
    )
    stripped = [Passage(title=p.title.strip(), text=p.text.strip()) for p in passages]
    return field, [passage for passage in stripped if passage.text]


_NESTED = {*ARGUMENTS[ARGUMENTS.index("messages") :]}


def _arguments(record: Record) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments of an `AnswerToScore`, and the fields that are not read."""
    known = recognise_record(record)
    if known is not None and known.read is read_lm_eval:
        return _row_of_log(record)
    if "golden_answers" in record and not isinstance(record.get("answer"), str):
        return _row_of_flashrag(record), ()
    # A blank cell of a table is no prompt; a blank question or answer is an error.
    blank = {name for name in ARGUMENTS[2:] if record.get(name) == ""}
    arguments = {x: record[x] for x in ARGUMENTS if x in record and x not in blank}
    for name in arguments.keys() & _NESTED:  # cells of a table are texts
        arguments[name] = parse_nested(arguments[name], name)
    field, arguments["context"] = record_context(record)
    known_fields = {*ARGUMENTS, "id", field}
    unread = tuple(name for name in record if name not in known_fields)
    if arguments.keys() <= {"question", "context"}:
        raise ValueError(
            f"no 'answer': expected the fields {', '.join(ARGUMENTS[:3])} (or prompt, "
            f"messages, …), found {', '.join(map(repr, record)) or 'none'}"
        )
    return arguments, unread


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; a record without an answer says why."""
    for raw in read_raw(path, recognise(path)):
        given: AnswerToScore | str = raw.problem or "no record"
        unread: tuple[str, ...] = ()
        name = None
        if raw.value is not None:
            name = raw.value.get("id", raw.value.get("doc_id"))
            is_number = isinstance(name, float) and math.isfinite(name)
            name = name if is_number or isinstance(name, (str, int)) else None
            try:
                arguments, unread = _arguments(raw.value)
                given = AnswerToScore(**arguments)
            except ValueError as error:
                given = str(error)
        # Columns that are not read may hold values unknown to JSON: bytes, decimals.
        record = msgspec.to_builtins([raw.value, raw.problem], enc_hook=str)
        yield Row(
            line=raw.number if raw.line is None else raw.line,
            at=raw.at,
            id=name,
            given=given,
            unread=unread,
            digest=sha256_json(record),
        )


def count_rows(path: Path) -> int:
    """Return how many rows a file has, checking that at least one has an answer."""
    n = sum(1 for _ in read_raw(path, recognise(path)))
    if not n:
        raise ValueError(f"{path} holds no records; expected rows with an answer each")
    rows = read_rows(path)
    first = next(rows)
    if all(isinstance(row.given, str) for row in itertools.chain([first], rows)):
        raise ValueError(
            f"{path}: none of its {n} rows holds an answer that can be scored (the "
            f"first, {first.at}: {first.given}); expected records with an answer each. "
            "To let the model answer, use --question, or Probe.answer in Python"
        )
    return n


@dataclasses.dataclass
class Tally:
    """Counts of the results for a file's rows."""

    n_done: int = 0  # rows with a result, including those of an earlier call
    # How many rows have each decision, not counting bad ones.
    decisions: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    n_bad: int = 0  # rows without a score
    first_bad: str = ""  # where the first of them is, and why it is bad
    # For each field that is not read, how many rows have it.
    unread: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, row: Row, result: Mapping[str, Any]) -> None:
        """Count one result."""
        self.n_done += 1
        if "error" in result:
            self.n_bad += 1
            self.first_bad = self.first_bad or f"{row.at}: {result['error']}"
        else:
            self.decisions[result["decision"]] += 1
        for name in row.unread:
            self.unread[name] = self.unread.get(name, 0) + 1

    def as_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        counts = {"n_rows": self.n_done}
        counts |= {name: self.decisions[name] for name in SIGNS if name != "bad"}
        return {**counts, "bad": self.n_bad, "unread": self.unread}

    def in_words(self) -> str:
        """Return the counts as a sentence."""
        text = (
            f"{self.n_done} row{'' if self.n_done == 1 else 's'}: "
            f"{self.decisions['trust']} trusted, "
            f"{self.decisions['distrust']} distrusted, {self.decisions['unknown']} "
            f"unknown, {self.n_bad} bad"
        )
        names = [f"{name!r} ({n})" for name, n in self.unread.items()]
        return f"{text}; fields not read: {', '.join(names)}" if names else text


def score_rows(
    score: Callable[[list[AnswerToScore]], Sequence["Score"]],
    rows: Iterable[Row],
    identity: str,
    out: JsonLines | None,
    write: Callable[[list[str]], object],
    each: Callable[[Row, Mapping[str, Any]], None],
    batch_size: int = ROWS_TOGETHER,
) -> None:
    """Score rows in order; those that `out` already has are not scored again.

    The detector's `identity` keeps results of two detectors out of one file. `score` is
    called with a batch of answers, then `write` with the JSON lines of the results; a
    batch has `batch_size` rows, but at least 64. `each` is called with every row and
    its result, in order.
    """
    stream = iter(rows)
    rows_done = out.rows() if out else ()
    where = out.path if out else ""
    for number, result in enumerate(rows_done, start=1):
        row = next(stream, None)
        if row is None or result.get("key") != _key(row, identity):
            raise ValueError(
                f"{where}, line {number}: belongs to another row, detector, precision "
                "or version; give a new --out, or delete the file to score all again"
            )
        if result.pop("check", None) != _check(result):
            raise ValueError(
                f"{where}, line {number}: was edited, or written by an earlier "
                "version; put the line back, or delete the file to score all again"
            )
        each(row, result)
    n_together = max(ROWS_TOGETHER, batch_size)
    while some := list(itertools.islice(stream, n_together)):
        readable = [row.given for row in some if isinstance(row.given, AnswerToScore)]
        scores = iter(score(readable))
        results = []
        for row in some:
            is_bad = isinstance(row.given, str)
            fields = {"error": row.given} if is_bad else next(scores).as_json()
            fields = {"error": fields["error"]} if "error" in fields else fields
            ids = {"line": row.line, "id": row.id, "key": _key(row, identity)}
            results.append(ids | fields)
        checked = ({**result, "check": _check(result)} for result in results)
        write([json.dumps(result, allow_nan=False) for result in checked])
        for row, result in zip(some, results, strict=True):
            each(row, result)


def _key(row: Row, identity: str) -> str:
    """Return a result's key, of the record, the detector and how texts are read."""
    return sha256_json([row.digest, identity, READING])[:16]


def _check(result: Mapping[str, Any]) -> str:
    """Return the checksum of a result, without its own field."""
    return sha256_json(result)[:16]


P_STEPS = (0.05, 0.25, 0.5, 0.8)  # upper ends of a token's tints, by its p

MOST_SHOWN = 2000  # rows on the page; the results have all
N_BARS = 20
SIGNS = {"trust": "✓", "distrust": "✗", "unknown": "?", "bad": "!"}


def _token(text: str, log_p: float | None) -> dict[str, Any]:
    """Return a token with its tint; a token without a probability has none."""
    if log_p is None:
        return {"text": text, "tint": None, "log_p": None}
    tints = (i for i, step in enumerate(P_STEPS) if math.exp(log_p) < step)
    return {"text": text, "tint": next(tints, None), "log_p": f"{log_p:.3f}"}


def _entry(shown: "Shown") -> dict[str, Any]:
    """Return what the page shows for one result."""
    question, context, result = shown
    tokens = result.get("tokens", [])
    log_probs = result.get("log_probs") or [None] * len(tokens)
    spelled = [_token(*pair) for pair in zip(tokens, log_probs, strict=True)]
    if spelled:
        spelled[0]["text"] = spelled[0]["text"].lstrip()
    if "error" not in result and not "".join(tokens).strip():
        spelled = [_token("(no answer)", None), *spelled[1:]]
    p_correct, reason = result.get("p_correct"), result.get("reason")
    return {
        "line": result.get("line", 1),
        "id": result.get("id"),
        "error": result.get("error"),
        "p": None if p_correct is None else f"{p_correct:.3f}",
        "kind": "bad" if "error" in result else result["decision"],
        "asked": question,
        "context": context,
        "tokens": spelled,
        "notes": [*([reason] if reason else []), *result.get("warnings", [])],
    }


_RAISES, _LOWERS = "31, 104, 173", "179, 78, 12"  # red, green, blue
_LEAST_EFFECT = 0.001  # on P; smaller ones may be rounding, and are not tinted


def score_html(result: Mapping[str, Any], effects: Sequence[float]) -> str:
    """Return a score (`Score.as_json`) as notebook HTML, tinted by effects, if any."""
    entry = _entry((None, (), result))
    most = max(map(abs, effects), default=0.0) or 1.0
    spans = []
    for token, effect in itertools.zip_longest(entry["tokens"], effects):
        style, titles = "", []
        if effect is not None and abs(effect) < _LEAST_EFFECT:
            titles.append(f"moves P by less than {_LEAST_EFFECT}")
        elif effect is not None:
            colour = _RAISES if effect > 0 else _LOWERS
            style = (
                f' style="background: rgba({colour}, {0.6 * abs(effect) / most:.2f})"'
            )
            titles.append(f"moves P by {effect:+.3f}")
        if token["log_p"] is not None:
            titles.append(f"log p = {token['log_p']}")
        title = f' title="{", ".join(titles)}"' if titles else ""
        spans.append(f"<span{style}{title}>{html.escape(token['text'])}</span>")
    p = "no P" if entry["p"] is None else f"P(correct) = {entry['p']}"
    escaped = map(html.escape, entry["notes"])
    notes = "".join(f"<br><small>{note}</small>" for note in escaped)
    kind = entry["kind"]
    return (
        f'<div><b>{SIGNS[kind]} {kind} · {p}</b><br><bdi style="white-space: '
        f'pre-wrap">{"".join(spans)}</bdi>{notes}</div>'
    )


def _bars(
    counts: collections.Counter[tuple[int, str]],
) -> tuple[list[dict[str, Any]], int]:
    """Return the rectangles of a histogram of P, and the count of its tallest bar."""
    heights = collections.Counter(bar for bar, _ in counts.elements())
    most, bars = max(heights.values(), default=0), []
    tops = collections.Counter[int]()
    for (bar, decision), n in sorted(counts.items()):
        tops[bar] += n
        bars.append(
            {
                "decision": decision,
                "n": n,
                "x": 11.5 + 31 * bar,
                "y": f"{130 - 110 * tops[bar] / most:.1f}",
                "height": f"{110 * n / most:.1f}",
                "low": bar / N_BARS,
                "high": (bar + 1) / N_BARS,
            }
        )
    return bars, most


_OFTEN = 3  # a note of this many rows or more is written once, and has a number

# The question, the passages that were shown with it, and the score as JSON values.
Shown = tuple[str | None, Sequence[str], Mapping[str, Any]]


class PageRows:
    """The rows that a page shows and counts; those after `MOST_SHOWN` are not kept."""

    def __init__(self, rows: Iterable[Shown] = ()) -> None:
        """Start with some rows."""
        self.shown: list[Shown] = []
        self.kinds = collections.Counter[str]()
        # By bar of the histogram of P, and decision.
        self.bars = collections.Counter[tuple[int, str]]()
        for row in rows:
            self.add(row)

    def add(self, row: Shown) -> None:
        """Count a row, and keep it if it is among the first."""
        result = row[2]
        self.kinds["bad" if "error" in result else result["decision"]] += 1
        if (p := result.get("p_correct")) is not None:
            self.bars[min(int(p * N_BARS), N_BARS - 1), result["decision"]] += 1
        if len(self.shown) < MOST_SHOWN:
            self.shown.append(row)


def page(
    title: str,
    summary: str,
    results: Iterable[Shown] | PageRows,
    thresholds: Sequence[str] = (),
) -> str:
    """Return the page of scored answers; those after `MOST_SHOWN` are only counted.

    `thresholds` say, one in a phrase, from which P on decisions are made.
    """
    rows = results if isinstance(results, PageRows) else PageRows(results)
    kinds = rows.kinds
    entries = [_entry(each) for each in rows.shown]
    counts = collections.Counter(note for each in entries for note in each["notes"])
    shared = [note for note, n in counts.most_common() if n >= _OFTEN]
    bars, most = _bars(rows.bars)
    decisions = [
        (name, sign, kinds[name]) for name, sign in SIGNS.items() if kinds[name]
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
    )
    return environment.get_template("score.html.j2").render(
        title=title,
        summary=summary,
        thresholds=thresholds,
        rows=entries,
        shared=shared,
        n_left_out=kinds.total() - len(entries),
        bars=bars,
        most=most,
        n_scored=sum(n for name, _, n in decisions if name != "bad"),
        counts_in_words=", ".join(f"{n} {name}" for name, _, n in decisions),
        decisions=decisions,
        signs=SIGNS,
        steps=P_STEPS,
    )


def shown_tokens(
    tokenizer: Any,
    answer: Answer,
    prob: np.ndarray,
    first_token: int = 0,
) -> list[dict[str, Any]]:
    """Return the tokens of a sequence as the report shows them.

    `prob` has the rows `[n_tokens, 5]` of the prob family from `first_token` on. Each
    token is shown with the numbers of the position that emitted it; one without such a
    position (the very first) is left out.
    """
    from beatrice.jaxprobe.families import SPAN_NAMES  # the report needs no JAX

    # The span of a token's text, whichever positions the run reads as the answer.
    spans = sequence_of(answer, answer_span="emitting").spans
    rows = []
    texts = token_texts(tokenizer, [*answer.prompt_ids, *answer.token_ids])
    for position, text in enumerate(texts):
        # An answer token is shown with the position that emitted it, one before.
        inside = (
            name
            for name, (start, stop) in zip(SPAN_NAMES, spans, strict=True)
            if start <= position - (name == "answer") < stop
        )
        span = next(inside, None)
        if span is None or position <= first_token:
            continue
        p, surprisal, entropy, _, margin = prob[position - 1 - first_token].tolist()
        rows.append(
            {
                "text": text,
                "span": span,
                "p": p,
                "surprisal": surprisal,
                "entropy": entropy,
                "margin": margin,
            }
        )
    return rows
