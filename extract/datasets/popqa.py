"""PopQA: the published table, its hub copy, and the copies that carry paragraphs."""

from extract.datasets.fields import any_answers, identity, text
from extract.datasets.passages import any_passages, titled_passages
from extract.datasets.question import Format, Question, Record

_KEPT = ("subj", "prop", "obj", "s_wiki_title", "o_wiki_title", "s_pop", "o_pop")


def read_popqa(record: Record) -> Question:
    """Read one row; `possible_answers` is a JSON list written as text.

    The same question occurs in several rows, on subjects of the same name: the id
    tells them apart, the text does not.
    """
    question = text(record, "question")
    if "possible_answers" not in record:
        raise ValueError("no 'possible_answers'")
    golds = any_answers({"possible_answers": record["possible_answers"]})
    found = "paragraphs" in record
    passages = titled_passages(record, "paragraphs") if found else any_passages(record)
    return Question(
        id=identity(record, "id"),
        dataset="popqa",
        question=question,
        golds=golds,
        passages=passages,
        meta={key: record[key] for key in _KEPT if key in record},
    )


FORMATS = (
    Format(
        name="PopQA with paragraphs",
        dataset="popqa",
        fits=lambda r: "possible_answers" in r and "paragraphs" in r,
        read=read_popqa,
    ),
    Format(
        name="PopQA",
        dataset="popqa",
        fits=lambda r: "possible_answers" in r or {"s_wiki_title", "prop"} <= r.keys(),
        read=read_popqa,
    ),
)
