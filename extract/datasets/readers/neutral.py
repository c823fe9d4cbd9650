"""Layouts of no question set: FlashRAG's, lm-eval's, our own, plain pairs."""

from collections.abc import Callable
from typing import Any

from extract.datasets.fields import (
    Record,
    answers,
    any_answers,
    field_answers,
    identity,
    kind_of,
    text,
)
from extract.datasets.readers.dpr import unquote
from extract.datasets.readers.multihop import is_twowiki
from extract.datasets.readers.passages import (
    any_passages,
    check_all_read,
    is_titled,
    read_context,
    supporting_titles,
    titled_passages,
)
from extract.datasets.readers.question import (
    Format,
    Question,
    dataset_marked,
    dataset_of_id,
)
from extract.records import Passage

_QUESTIONS = ("question", "query", "input", "Question", "problem")


def question_of(record: Record) -> str:
    """Return the question under whichever of its names is there."""
    name = next((name for name in _QUESTIONS if name in record), _QUESTIONS[0])
    return unquote(text(record, name))


def _metadata(record: Record) -> dict[str, Any]:
    """Return what FlashRAG keeps of the source, which is nested twice in places."""
    found = record.get("metadata", record.get("meta_data"))
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"'metadata': expected an object, found {kind_of(found)}")
    inner = found.get("metadata")
    return {**found, **inner} if isinstance(inner, dict) else found


def _source(meta: Record) -> str | None:
    """Return the question set that a FlashRAG record was made of, or None."""
    if "question_decomposition" in meta:
        return "musique"
    context = meta.get("context")
    if "supporting_facts" in meta or is_titled(context):
        has_content = isinstance(context, dict) and "content" in context
        return "2wikimultihopqa" if has_content or is_twowiki(meta) else "hotpotqa"
    return dataset_marked(meta)


def _gold_titles(meta: Record) -> list[str]:
    """Return the titles of MuSiQue's steps; FlashRAG keeps no more of its passages."""
    steps = meta.get("question_decomposition")
    found = []
    for step in steps if isinstance(steps, list) else []:
        support = step.get("support_paragraph") if isinstance(step, dict) else None
        title = support.get("title") if isinstance(support, dict) else None
        found += [title] if isinstance(title, str) else []
    return list(dict.fromkeys(found))


def read_flashrag(record: Record) -> Question:
    """Read `{"id", "question", "golden_answers", "metadata"}` of FlashRAG or UltraRAG.

    A list `context` of passages may stand beside them.
    """
    question, meta = question_of(record), _metadata(record)
    golds = any_answers({"golden_answers": record.get("golden_answers")})
    passages: tuple[Passage, ...] = ()
    kept: dict[str, Any] = {}
    if "context" in record:
        passages = titled_passages(record, "context")
    elif meta.get("context"):
        # Without the facts the paragraphs are read, and none of them is gold.
        facts = meta.get("supporting_facts")
        titles = [] if facts is None else supporting_titles(facts)
        passages = read_context(meta["context"], titles)
    elif titles := _gold_titles(meta):
        kept["supporting_titles"] = titles
    else:
        passages = any_passages(record) or any_passages(meta)
    for key in ("type", "level", "prop", "subj", "s_wiki_title", "s_pop"):
        if isinstance(meta.get(key), str | int):
            kept[key] = meta[key]
    return Question(
        id=identity(record, "id"),
        dataset=_source(meta) or dataset_marked(record),
        question=question,
        golds=golds,
        passages=passages,
        meta=kept,
    )


def read_plain(record: Record) -> Question:
    """Read any object with a question and an answer or a list of them."""
    name = identity(record, "id", "_id", "question_id", "qid")
    return Question(
        id=name,
        dataset=dataset_marked(record),
        question=question_of(record),
        golds=any_answers(record),
        passages=any_passages(record),
    )


def read_example(record: Record) -> Question:
    """Read one line of an `examples.jsonl` that this program wrote."""
    dataset = text(record, "dataset")
    name = identity(record, "id")
    passages = titled_passages(record, "passages") if record.get("passages") else ()
    return Question(
        id=name.removeprefix(f"{dataset}-") if name else None,
        dataset=dataset,
        question=text(record, "question"),
        golds=any_answers({"golds": record.get("golds")}),
        passages=passages,
    )


def _response(record: Record) -> str | None:
    """Return the model's answer in a log: filtered if there, else as generated."""
    for name in ("filtered_resps", "resps"):
        found = record.get(name)
        while isinstance(found, list) and found:
            found = found[0]
        if isinstance(found, str):
            return found
    return None


def _target(record: Record) -> tuple[str, ...]:
    """Return the accepted answers that a log compared with."""
    if record.get("target") is None:
        raise ValueError("neither 'doc' nor 'target' holds an answer")
    return field_answers(record["target"], "target")


def read_lm_eval(
    record: Record, *, read_document: Callable[[Record], Question | None]
) -> Question:
    """Read one line of lm-eval's `samples_*.jsonl`; keeps the model's answer.

    Args:
      record: the line.
      read_document: reads `doc`, in whatever layout it is; None if it knows none.
    """
    document = record.get("doc")
    if not isinstance(document, dict):
        raise ValueError(f"'doc': expected an object, found {kind_of(document)}")
    try:
        read = read_document(document)
        passages = () if read is not None else any_passages(document)
    except ValueError as error:
        raise ValueError(f"in 'doc': {error}") from None
    if read is None:
        read = Question(
            id=identity(document, "id", "question_id"),
            dataset=None,
            question=question_of(document),
            golds=_target(record),
            passages=passages,
        )
    check_all_read(document, read, within="in 'doc': ")
    response = _response(record)
    if response is None:
        raise ValueError("no response in 'filtered_resps' or 'resps'")
    meta: dict[str, Any] = {**read.meta, "response": response}
    for key in ("doc_id", "filter"):
        if isinstance(record.get(key), str | int):
            meta[key] = record[key]
    return Question(
        id=read.id,
        dataset=read.dataset,
        question=read.question,
        golds=read.golds,
        passages=read.passages,
        documents=read.documents,
        meta=meta,
    )


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def read_kilt(record: Record) -> Question:
    """Read one line of KILT: the pages are named, their text is not in the file."""
    if "input" not in record:
        raise ValueError(
            "no 'input': KILT's TriviaQA names questions by id only; give TriviaQA's "
            "own files"
        )
    outputs = record.get("output")
    if not isinstance(outputs, list):
        raise ValueError(f"'output': expected a list, found {kind_of(outputs)}")
    found = [o for o in outputs if isinstance(o, dict)]
    golds = [o["answer"] for o in found if isinstance(o.get("answer"), str)]
    pages = [
        page["title"]
        for output in found
        for page in _list_of(output.get("provenance"))
        if isinstance(page, dict) and isinstance(page.get("title"), str)
    ]
    name = identity(record, "id")
    return Question(
        id=name,
        dataset=dataset_of_id(name),
        question=text(record, "input"),
        golds=answers(golds, "output[].answer"),
        meta={"supporting_titles": list(dict.fromkeys(pages))},
    )


FORMATS = (
    Format(
        name="FlashRAG",
        fits=lambda r: "golden_answers" in r,
        read=read_flashrag,
    ),
    Format(
        name="examples of this program",
        fits=lambda r: {"golds", "question", "split", "dataset"} <= r.keys(),
        read=read_example,
    ),
    Format(
        name="KILT",
        fits=lambda r: (
            bool({"input", "id"} & r.keys())
            and "output" in r
            and not isinstance(r["output"], str)  # as instructions have (Alpaca)
        ),
        read=read_kilt,
    ),
)
WEAK_FORMATS = (
    Format(
        name="questions and answers",
        fits=lambda r: bool({"question", "query", "Question"} & r.keys()),
        read=read_plain,
        is_weak=True,
    ),
)
