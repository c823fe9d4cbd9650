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
    is_list_of_objects,
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
    is_twowiki,
    unquote,
)
from beatrice.extract.records import Passage, Split

_QUESTIONS = ("question", "query", "input", "Question", "problem")


def question_of(record: Record) -> str:
    """Return the question under whichever of its names is there."""
    name = next((name for name in _QUESTIONS if name in record), _QUESTIONS[0])
    return unquote(fields.text(record, name))


def _metadata(record: Record) -> dict[str, Any]:
    """Return what FlashRAG keeps of the source, which is nested twice in places."""
    found = record.get("metadata", record.get("meta_data"))
    if found is None:
        return {}
    inner = fields.expect(found, dict, "metadata").get("metadata")
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


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _gold_titles(meta: Record) -> list[str]:
    """Return the titles of MuSiQue's steps; FlashRAG keeps no more of its passages."""
    steps = [
        s for s in _list(meta.get("question_decomposition")) if isinstance(s, dict)
    ]
    pages = [step.get("support_paragraph") for step in steps]
    titles = [page.get("title") for page in pages if isinstance(page, dict)]
    return list(dict.fromkeys(title for title in titles if isinstance(title, str)))


def read_flashrag(record: Record) -> Question:
    """Read `{"id", "question", "golden_answers", "metadata"}` of FlashRAG or UltraRAG.

    A list `context` of passages may stand beside them.
    """
    question, meta = question_of(record), _metadata(record)
    golds = fields.field_answers(record.get("golden_answers"), "golden_answers")
    passages: tuple[Passage, ...] = ()
    kept: dict[str, Any] = {}
    if record.get("context") not in (None, ""):
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
        id=fields.identity(record, "id"),
        dataset=_source(meta) or dataset_marked(record),
        question=question,
        golds=golds,
        passages=passages,
        meta=kept,
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
    name, split = fields.identity(record, "id"), fields.text(record, "split")
    if split not in get_args(Split):
        known = ", ".join(get_args(Split))
        raise ValueError(f"'split': expected one of {known}, found {split!r}")
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
    return fields.field_answers(record["target"], "target")


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
        read = read_document(document)
        passages = () if read is not None else any_passages(document)
    except ValueError as error:
        raise ValueError(f"in 'doc': {error}") from None
    if read is None:
        read = Question(
            id=fields.identity(document, "id", "question_id"),
            dataset=None,
            question=question_of(document),
            golds=_target(record),
            passages=passages,
        )
    if not (read.passages or read.documents):
        check_no_passages(document, within="in 'doc': ")
    response = _response(record)
    if response is None:
        raise ValueError("no response in 'filtered_resps' or 'resps'")
    meta: dict[str, Any] = {**read.meta, "response": response}
    for key in ("doc_id", "filter"):
        if isinstance(record.get(key), str | int):
            meta[key] = record[key]
    return dataclasses.replace(read, meta=meta)


def read_kilt(record: Record) -> Question:
    """Read one line of KILT: the pages are named, their text is not in the file."""
    if "input" not in record:
        raise ValueError(
            "no 'input': KILT's TriviaQA names questions by id only; give TriviaQA's "
            "own files"
        )
    outputs = fields.expect(record.get("output"), list, "output")
    found = [one for one in outputs if isinstance(one, dict)]
    golds = [one["answer"] for one in found if isinstance(one.get("answer"), str)]
    pages = [
        page["title"]
        for output in found
        for page in _list(output.get("provenance"))
        if isinstance(page, dict) and isinstance(page.get("title"), str)
    ]
    name = fields.identity(record, "id")
    return Question(
        id=name,
        dataset=dataset_of_id(name),
        question=fields.text(record, "input"),
        golds=fields.answers(golds, "output[].answer"),
        meta={"supporting_titles": list(dict.fromkeys(pages))},
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


def _spoken(answer: Record) -> list[str]:
    """Return the wordings in one of IRCoT's answer objects."""
    spans: list[Any] = list(
        fields.listed(answer, "spans") if answer.get("spans") else []
    )
    number, date = answer.get("number"), answer.get("date")
    if number not in (None, ""):
        spans.append(str(number))
    if isinstance(date, dict):
        words = " ".join(str(date.get(k) or "") for k in ("day", "month", "year"))
        spans.append(words.strip())
    return spans


def read_ircot(record: Record) -> Question:
    """Read one line of the processed files of IRCoT and Adaptive-RAG."""
    found = [w for a in fields.objects(record, "answers_objects") for w in _spoken(a)]
    name = fields.identity(record, "question_id")
    return Question(
        id=name,
        dataset=dataset_tagged(record) or dataset_named(name),
        question=fields.text(record, "question_text"),
        golds=fields.any_answers({"answers": found}),
        passages=titled_passages(record, "contexts"),
    )


def _fits_kilt(record: Record) -> bool:
    # Instructions (Alpaca) have a text there.
    has_output = "output" in record and not isinstance(record["output"], str)
    return has_output and bool({"input", "id"} & record.keys())


def _fits_titles(record: Record) -> bool:
    asked = {"question", "query", "answers", "answer"}
    return {"title", "text"} <= record.keys() and not asked & record.keys()


_NOT_READ = "not questions; a retriever searches it, `beatrice data` does not read it"
FORMATS = (
    Format("FlashRAG", lambda r: "golden_answers" in r, read_flashrag),
    Format(
        "examples of this program",
        lambda r: {"golds", "question", "split", "dataset"} <= r.keys(),
        read_example,
    ),
    Format("KILT", _fits_kilt, read_kilt),
)
OTHER_FORMATS = (
    Format(
        "RetrievalQA",
        lambda r: {"data_source", "ground_truth"} <= r.keys(),
        read_retrievalqa,
    ),
    Format(
        "MuSiQue as its authors made it",
        lambda r: {"question_text", "answer_text", "contexts"} <= r.keys(),
        dataset="musique",
        refusal="is MuSiQue in the layout of its authors' own programs (question_text, "
        "answer_text, contexts); give the published musique_ans_v1.0_*.jsonl",
    ),
    Format(
        "IRCoT / Adaptive-RAG",
        lambda r: (
            "question_text" in r and bool({"answers_objects", "contexts"} & r.keys())
        ),
        read_ircot,
    ),
    Format(
        "SQuAD",
        lambda r: (
            is_list_of_objects(r.get("paragraphs")) and "qas" in r["paragraphs"][0]
        ),
        refusal="is SQuAD, which is none of the six question sets",
    ),
    Format(
        "2WikiMultihopQA aliases",
        lambda r: {"Q_id", "aliases"} <= r.keys(),
        refusal="holds the aliases of 2WikiMultihopQA (id_aliases.json), not "
        "questions; give train.json or dev.json",
    ),
    Format(
        "passages (FlashRAG corpus)",
        lambda r: "contents" in r and not {"question", "query"} & r.keys(),
        refusal=f"holds passages (a FlashRAG corpus), {_NOT_READ}",
    ),
    Format(
        "passages (titles and texts)",
        _fits_titles,
        refusal=f"holds passages (titles and texts, as psgs_w100.tsv), {_NOT_READ}",
    ),
)
WEAK_FORMATS = (
    Format(
        "questions and answers",
        lambda r: bool({"question", "query", "Question"} & r.keys()),
        read_plain,
        is_weak=True,
    ),
)
