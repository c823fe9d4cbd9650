"""Layouts of no question set: FlashRAG's, lm-eval's, our own, plain pairs, and others.

Here too are the files that are taken for questions and are none: they are refused with
what they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import (
    Record,
    any_passages,
    check_no_passages,
    is_titled,
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
    unquote,
)
from beatrice.extract.datasets.readers.multihop import is_twowiki
from beatrice.extract.records import Passage, Split

_QUESTIONS = ("question", "query", "input", "Question", "problem")


def question_of(record: Record) -> str:
    """Return the question under whichever of its names is there."""
    name = next((name for name in _QUESTIONS if name in record), _QUESTIONS[0])
    return unquote(fields.text(record, name))


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
        return "2wikimultihopqa" if has_content or is_twowiki(meta) else "hotpotqa"
    return dataset_marked(meta)


def read_flashrag(record: Record) -> Question:
    """Read `{"id", "question", "golden_answers", "metadata"}` of FlashRAG or UltraRAG.

    A list `context` of passages may stand beside them.
    """
    question, meta = question_of(record), _metadata(record)
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


def read_plain(record: Record) -> Question:
    """Read any object with a question and an answer or a list of them."""
    return Question(
        id=fields.identity(record, "id", "_id", "question_id", "qid"),
        dataset=dataset_marked(record),
        question=question_of(record),
        golds=fields.any_answers(record),
        passages=any_passages(record),
    )


def read_example(record: Record) -> Question:
    """Read one line of an `examples.jsonl` that this program wrote."""
    dataset = fields.text(record, "dataset")
    name = fields.identity(record, "id")
    splits: dict[str, Split] = {split: split for split in get_args(Split)}
    split = splits.get(fields.text(record, "split"))
    if split is None:
        raise ValueError(
            f"'split': expected one of {', '.join(splits)}, found {record['split']!r}"
        )
    passages = titled_passages(record, "passages") if record.get("passages") else ()
    return Question(
        split=split,
        id=name.removeprefix(f"{dataset}-") if name else None,
        dataset=dataset,
        question=fields.text(record, "question"),
        golds=fields.field_answers(record.get("golds"), "golds"),
        passages=passages,
    )


def _response(record: Record) -> str | None:
    """Return the model's answer in a log: filtered if there, else as generated."""
    for name in ("filtered_resps", "resps"):
        response = record.get(name)
        while isinstance(response, list) and response:
            response = response[0]
        if isinstance(response, str):
            return response
    return None


def read_lm_eval(
    record: Record, *, read_document: Callable[[Record], Question | None]
) -> Question:
    """Read one line of lm-eval's `samples_*.jsonl`; keeps the model's answer.

    Args:
      record: the line.
      read_document: reads `doc`, of any layout; returns None where it knows none.
    """
    document = fields.expect(record.get("doc"), dict, "doc")
    try:
        question = read_document(document)
        passages = () if question is not None else any_passages(document)
    except ValueError as error:
        raise ValueError(f"in 'doc': {error}") from None
    if question is None:
        if record.get("target") is None:
            raise ValueError("neither 'doc' nor 'target' holds an answer")
        question = Question(
            id=fields.identity(document, "id", "question_id"),
            dataset=None,
            question=question_of(document),
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


def read_kilt(record: Record) -> Question:
    """Read one line of KILT: the pages are named, their text is not in the file."""
    if "input" not in record:
        raise ValueError(
            "no 'input': KILT's TriviaQA names questions by id only; give TriviaQA's "
            "own files"
        )
    outputs = fields.expect(record.get("output"), list, "output")
    texts = [item.get("answer") for item in outputs if isinstance(item, dict)]
    golds = [text for text in texts if isinstance(text, str)]
    name = fields.identity(record, "id")
    return Question(
        id=name,
        dataset=dataset_of_id(name),
        question=fields.text(record, "input"),
        golds=fields.answers(golds, "output[].answer"),
    )


def read_retrievalqa(record: Record) -> Question:
    """Read one line of RetrievalQA: passages were retrieved, none is marked gold."""
    passages: tuple[Passage, ...] = ()
    if record.get("context"):
        passages = titled_passages(record, "context", is_supporting=False)
    return Question(
        id=fields.identity(record, "question_id", "id"),
        dataset=dataset_named(record.get("data_source")),
        question=fields.text(record, "question"),
        golds=fields.any_answers(record),
        passages=passages,
    )


def _wordings(answer: Record) -> list[Any]:
    """Return the wordings in one of IRCoT's answer objects."""
    spans = list(fields.listed(answer, "spans")) if answer.get("spans") else []
    number, date = answer.get("number"), answer.get("date")
    if number not in (None, ""):
        spans.append(str(number))
    if isinstance(date, dict):
        words = (str(date.get(key) or "") for key in ("day", "month", "year"))
        spans.append(" ".join(words).strip())
    return spans


def read_ircot(record: Record) -> Question:
    """Read one line of the processed files of IRCoT and Adaptive-RAG."""
    objects = fields.objects(record, "answers_objects")
    golds = [wording for answer in objects for wording in _wordings(answer)]
    name = fields.identity(record, "question_id")
    return Question(
        id=name,
        dataset=dataset_tagged(record) or dataset_named(name),
        question=fields.text(record, "question_text"),
        golds=fields.any_answers({"answers": golds}),
        passages=titled_passages(record, "contexts"),
    )


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
FORMATS = (
    Format("FlashRAG", lambda r: "golden_answers" in r, read_flashrag),
    Format("examples of this program",
           lambda r: {"golds", "question", "split", "dataset"} <= r.keys(),
           read_example),
    Format("KILT", _fits_kilt, read_kilt),
)  # fmt: skip
OTHER_FORMATS = (
    Format("RetrievalQA", lambda r: {"data_source", "ground_truth"} <= r.keys(),
           read_retrievalqa),
    Format("IRCoT / Adaptive-RAG", _fits_ircot, read_ircot),
    Format("passages (FlashRAG corpus)",
           lambda r: "contents" in r and not {"question", "query"} & r.keys(),
           refusal=f"holds passages (a FlashRAG corpus), {_NOT_READ}"),
    Format("passages (titles and texts)", _fits_titles,
           refusal=f"holds passages (titles and texts, as psgs_w100.tsv), {_NOT_READ}"),
)  # fmt: skip
WEAK_FORMATS = (
    Format("questions and answers",
           lambda r: bool({"question", "query", "Question"} & r.keys()),
           read_plain, is_weak=True),
)  # fmt: skip
