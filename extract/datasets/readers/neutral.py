"""Layouts of no question set: FlashRAG's, lm-eval's, our own, plain pairs, and others.

Here too are the files that are taken for questions and are none: they are refused with
what they are. At the end stand all layouts, and which of them a record is of.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any, get_args

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import (
    Record,
    any_passages,
    check_no_passages,
    is_titled,
    optional_passages,
    read_context,
    supporting_titles,
    titled_passages,
)
from beatrice.extract.datasets.question import (
    Format,
    Question,
    dataset_marked,
    dataset_named,
    dataset_of_id,
    dataset_tagged,
    question_of,
    reader,
)
from beatrice.extract.datasets.readers import multihop, single_hop, triviaqa
from beatrice.extract.records import Passage, Split

_QUESTIONS = ("question", "query", "input", "Question", "problem")


def _metadata(record: Record) -> dict[str, Any]:
    """Return what FlashRAG keeps of the source, which is nested twice in places."""
    outer = record.get("metadata", record.get("meta_data"))
    if outer is None:
        return {}
    inner = fields.expect(outer, dict, "metadata").get("metadata")
    return {**outer, **inner} if isinstance(inner, dict) else outer


def _source(meta: Record) -> str | None:
    """Return the question set that a FlashRAG record was made of, or None."""
    if "question_decomposition" in meta:
        return "musique"
    context = meta.get("context")
    if "supporting_facts" in meta or is_titled(context):
        has_content = isinstance(context, dict) and "content" in context
        return (
            "2wikimultihopqa"
            if has_content or multihop.is_twowiki(meta)
            else "hotpotqa"
        )
    return dataset_marked(meta)


def read_flashrag(record: Record) -> Question:
    """Read `{"id", "question", "golden_answers", "metadata"}` of FlashRAG or UltraRAG.

    A list `context` of passages may stand beside them.
    """
    question, meta = question_of(record, *_QUESTIONS), _metadata(record)
    golds = fields.field_answers(record.get("golden_answers"), "golden_answers")
    passages: tuple[Passage, ...] = ()
    if record.get("context") not in (None, ""):
        passages = titled_passages(record, "context")
    elif meta.get("context"):
        # Without the facts the paragraphs are read, and none of them is gold.
        facts = meta.get("supporting_facts")
        titles = [] if facts is None else supporting_titles(facts)
        passages = read_context(meta["context"], titles)
    elif "question_decomposition" not in meta:  # MuSiQue's passages are not there
        passages = any_passages(record) or any_passages(meta)
    names = ("type", "level", "prop", "subj", "s_wiki_title", "s_pop")
    return Question(
        id=fields.identity(record, "id"),
        dataset=_source(meta) or dataset_marked(record),
        question=question,
        golds=golds,
        passages=passages,
        meta={key: meta[key] for key in names if isinstance(meta.get(key), str | int)},
    )


def read_example(record: Record) -> Question:
    """Read one line of an `examples.jsonl` that this program wrote."""
    dataset, name = fields.text(record, "dataset"), fields.identity(record, "id")
    splits: dict[str, Split] = {split: split for split in get_args(Split)}
    split = splits.get(fields.text(record, "split"))
    if split is None:
        raise ValueError(
            f"'split': expected one of {', '.join(splits)}, found {record['split']!r}"
        )
    return Question(
        split=split,
        id=name.removeprefix(f"{dataset}-") if name else None,
        dataset=dataset,
        question=fields.text(record, "question"),
        golds=fields.field_answers(record.get("golds"), "golds"),
        passages=optional_passages(record, "passages"),
    )


def _read_document(record: Record) -> Question | None:
    """Read the source record inside a log; None where it is of no layout."""
    layout = recognise_record(record)
    if layout is None or layout.read is None:
        return None
    if layout.is_weak and not fields.has_answers(record):
        return None  # the log's `target` then holds the answer
    return layout.read(record)


def _response(record: Record) -> str | None:
    """Return the model's answer in a log: filtered if there, else as generated."""
    for name in ("filtered_resps", "resps"):
        response = record.get(name)
        while isinstance(response, list) and response:
            response = response[0]
        if isinstance(response, str):
            return response
    return None


def read_lm_eval(record: Record) -> Question:
    """Read one line of lm-eval's `samples_*.jsonl`; keeps the model's answer."""
    document = fields.expect(record.get("doc"), dict, "doc")
    try:
        question = _read_document(document)
        passages = () if question is not None else any_passages(document)
    except ValueError as error:
        raise ValueError(f"in 'doc': {error}") from None
    if question is None:
        if record.get("target") is None:
            raise ValueError("neither 'doc' nor 'target' holds an answer")
        question = Question(
            id=fields.identity(document, "id", "question_id"),
            dataset=None,
            question=question_of(document, *_QUESTIONS),
            golds=fields.field_answers(record["target"], "target"),
            passages=passages,
        )
    if not (question.passages or question.documents):
        check_no_passages(document, within="in 'doc': ")
    response = _response(record)
    if response is None:
        raise ValueError("no response in 'filtered_resps' or 'resps'")
    meta = {**question.meta, "response": response}
    for key in ("doc_id", "filter"):
        if isinstance(record.get(key), str | int):
            meta[key] = record[key]
    return dataclasses.replace(question, meta=meta)


def _kilt_answers(record: Record) -> tuple[str, ...]:
    outputs = fields.expect(record.get("output"), list, "output")
    texts = [item.get("answer") for item in outputs if isinstance(item, dict)]
    golds = [text for text in texts if isinstance(text, str)]
    return fields.answers(golds, "output[].answer")


def _wordings(answer: Record) -> list[Any]:
    spans = list(fields.listed(answer, "spans")) if answer.get("spans") else []
    number, date = answer.get("number"), answer.get("date")
    if number not in (None, ""):
        spans.append(str(number))
    if isinstance(date, dict):
        words = (str(date.get(key) or "") for key in ("day", "month", "year"))
        spans.append(" ".join(words).strip())
    return spans


def _ircot_answers(record: Record) -> tuple[str, ...]:
    objects = fields.objects(record, "answers_objects")
    golds = [wording for answer in objects for wording in _wordings(answer)]
    return fields.any_answers({"answers": golds})


def _fits_kilt(record: Record) -> bool:
    # Instructions (Alpaca) have a text there.
    has_output = "output" in record and not isinstance(record["output"], str)
    return has_output and bool({"input", "id"} & record.keys())


def _fits_ircot(record: Record) -> bool:
    return "question_text" in record and (
        "answers_objects" in record or "contexts" in record
    )


def _fits_titles(record: Record) -> bool:
    questions = {"question", "query", "answers", "answer"}
    return {"title", "text"} <= record.keys() and not questions & record.keys()


_NOT_READ = "not questions; a retriever searches it, `beatrice data` does not read it"
_FORMATS = (
    Format("FlashRAG", lambda r: "golden_answers" in r, read_flashrag),
    Format("examples of this program",
           lambda r: {"golds", "question", "split", "dataset"} <= r.keys(),
           read_example),
    Format("KILT, ids alone", lambda r: _fits_kilt(r) and "input" not in r,
           refusal="names questions by id only, as KILT's TriviaQA does; give "
           "TriviaQA's own files"),
    # Pages are named, their text is not in the file.
    Format("KILT", _fits_kilt,
           reader(dataset=lambda r: dataset_of_id(r.get("id")), questions=("input",),
                  golds=_kilt_answers)),
)  # fmt: skip
_OTHER_FORMATS = (
    Format("RetrievalQA", lambda r: {"data_source", "ground_truth"} <= r.keys(),
           # Passages were retrieved, none is marked gold.
           reader(ids=("question_id", "id"),
                  dataset=lambda r: dataset_named(r.get("data_source")),
                  passages=lambda r: optional_passages(
                      r, "context", is_supporting=False))),
    Format("IRCoT / Adaptive-RAG", _fits_ircot,
           reader(ids=("question_id",), questions=("question_text",),
                  dataset=lambda r: dataset_tagged(r)
                  or dataset_named(r.get("question_id")),
                  golds=_ircot_answers,
                  passages=lambda r: titled_passages(r, "contexts"))),
    Format("passages (FlashRAG corpus)",
           lambda r: "contents" in r and not {"question", "query"} & r.keys(),
           refusal=f"holds passages (a FlashRAG corpus), {_NOT_READ}"),
    Format("passages (titles and texts)", _fits_titles,
           refusal=f"holds passages (titles and texts, as psgs_w100.tsv), {_NOT_READ}"),
)  # fmt: skip
_WEAK_FORMATS = (
    Format("questions and answers",
           lambda r: bool({"question", "query", "Question"} & r.keys()),
           reader(ids=("id", "_id", "question_id", "qid"), questions=_QUESTIONS,
                  dataset=dataset_marked, passages=any_passages), is_weak=True),
)  # fmt: skip


def _fits_log(record: Record) -> bool:
    marks = {"target", "resps", "filtered_resps", "doc_id"}
    return "doc" in record and not marks.isdisjoint(record)


# All layouts, in the order they are tried in.
FORMATS: tuple[Format, ...] = (
    Format("lm-eval samples", _fits_log, read_lm_eval),
    *triviaqa.FORMATS,
    *single_hop.POPQA_FORMATS,
    *single_hop.DPR_FORMATS,
    *single_hop.NQ_FORMATS,
    *_FORMATS,
    *multihop.FORMATS,
    *_OTHER_FORMATS,
    *multihop.WEAK_FORMATS,
    *_WEAK_FORMATS,
)
_STRONG_FIRST = sorted(FORMATS, key=lambda layout: layout.is_weak)


def recognise_record(record: Record) -> Format | None:
    """Return the layout of one record: the first strong one that fits, or a weak."""
    return next((layout for layout in _STRONG_FIRST if layout.fits(record)), None)


def choose_format(records: Iterable[Record]) -> Format | None:
    """Return the layout of a file from its first records.

    The most frequent one, where a layout that any damaged record fits (a question and
    an answer) only counts if there is no other.
    """
    counts = collections.Counter(map(recognise_record, records))
    del counts[None]
    return min(
        (layout for layout in counts if layout is not None),
        key=lambda x: (x.is_weak, -counts[x], _STRONG_FIRST.index(x)),
        default=None,
    )
