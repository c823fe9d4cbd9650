"""Layouts in which others re-published the six sets with passages."""

from typing import Any

from extract.datasets.fields import Record, any_answers, identity, listed, objects, text
from extract.datasets.readers.passages import is_list_of_objects, titled_passages
from extract.datasets.readers.question import (
    Format,
    Question,
    dataset_named,
    dataset_tagged,
)


def read_retrievalqa(record: Record) -> Question:
    """Read one line of RetrievalQA: passages were retrieved, none is marked gold."""
    name = identity(record, "question_id", "id")
    return Question(
        id=name,
        dataset=dataset_named(record.get("data_source")),
        question=text(record, "question"),
        golds=any_answers(record),
        passages=titled_passages(record, "context", is_supporting=False)
        if record.get("context")
        else (),
    )


def _spoken(answer: Record) -> list[str]:
    """Return the wordings in one of IRCoT's answer objects."""
    spans: list[Any] = list(listed(answer, "spans") if answer.get("spans") else [])
    number, date = answer.get("number"), answer.get("date")
    if number not in (None, ""):
        spans.append(str(number))
    if isinstance(date, dict):
        words = " ".join(str(date.get(k) or "") for k in ("day", "month", "year"))
        spans.append(words.strip())
    return spans


def read_ircot(record: Record) -> Question:
    """Read one line of the processed files of IRCoT and Adaptive-RAG."""
    found = [w for a in objects(record, "answers_objects") for w in _spoken(a)]
    name = identity(record, "question_id")
    return Question(
        id=name,
        dataset=dataset_tagged(record) or dataset_named(name),
        question=text(record, "question_text"),
        golds=any_answers({"answers": found}),
        passages=titled_passages(record, "contexts"),
    )


FORMATS = (
    Format(
        name="RetrievalQA",
        fits=lambda r: {"data_source", "ground_truth"} <= r.keys(),
        read=read_retrievalqa,
    ),
    Format(
        name="MuSiQue as its authors made it",
        dataset="musique",
        fits=lambda r: {"question_text", "answer_text", "contexts"} <= r.keys(),
        refusal=(
            "is MuSiQue in the layout of its authors' own programs (question_text, "
            "answer_text, contexts); give the published musique_ans_v1.0_*.jsonl"
        ),
    ),
    Format(
        name="IRCoT / Adaptive-RAG",
        fits=lambda r: (
            "question_text" in r and bool({"answers_objects", "contexts"} & r.keys())
        ),
        read=read_ircot,
    ),
    Format(
        name="SQuAD",
        fits=lambda r: (
            is_list_of_objects(r.get("paragraphs")) and "qas" in r["paragraphs"][0]
        ),
        refusal="is SQuAD, which is none of the six question sets",
    ),
    Format(
        name="2WikiMultihopQA aliases",
        fits=lambda r: {"Q_id", "aliases"} <= r.keys(),
        refusal=(
            "holds the aliases of 2WikiMultihopQA (id_aliases.json), not questions; "
            "give train.json or dev.json"
        ),
    ),
    Format(
        name="passages (FlashRAG corpus)",
        fits=lambda r: "contents" in r and not {"question", "query"} & r.keys(),
        refusal=(
            "holds passages (a FlashRAG corpus), not questions; a retriever searches "
            "it, `beatrice data` does not read it"
        ),
    ),
    Format(
        name="passages (titles and texts)",
        fits=lambda r: (
            {"title", "text"} <= r.keys()
            and not {"question", "query", "answers", "answer"} & r.keys()
        ),
        refusal=(
            "holds passages (titles and texts, as psgs_w100.tsv), not questions; a "
            "retriever searches it, `beatrice data` does not read it"
        ),
    ),
)
