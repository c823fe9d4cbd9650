"""A question as a published file has it, before it belongs to a split."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import Record
from beatrice.extract.datasets.splits import Context
from beatrice.extract.records import Example, Passage, Split

DatasetName = Literal[
    "hotpotqa", "musique", "2wikimultihopqa", "popqa", "nq", "triviaqa"
]
DATASETS: tuple[DatasetName, ...] = get_args(DatasetName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A page of evidence that lies in a file of its own (TriviaQA)."""

    kind: Literal["wikipedia", "web"]
    filename: str
    title: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One question, its accepted answers, and the passages that came with it."""

    id: str | None  # the file's own, or None where it has none
    dataset: str | None  # of the question set; None where the record is silent
    question: str
    golds: tuple[str, ...]  # accepted answers as published, each once; at least one
    passages: tuple[Passage, ...] = ()  # in file order; `is_supporting`: the gold ones
    documents: tuple[Document, ...] = ()  # evidence on the side
    # What else is worth keeping (JSON values only).
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_made_id: bool = False  # the id was made of the question's text
    split: Split | None = None  # the one that the record names, or None

    def context(self, context: Context) -> tuple[Passage, ...]:
        """Return the passages that become an example's context."""
        if context == "none":
            return ()
        if context == "all":
            return self.passages
        supporting = tuple(p for p in self.passages if p.is_supporting)
        return supporting[:1] if context == "first" else supporting

    def as_example(self, split: Split, passages: tuple[Passage, ...]) -> Example:
        """Return the example of a split, with the passages chosen as its context."""
        if self.id is None or self.dataset is None:
            raise ValueError(
                f"the question {self.question[:60]!r} has no id or no dataset yet; "
                "read it through `open_dataset`"
            )
        return Example(
            id=f"{self.dataset}-{self.id}",
            dataset=self.dataset,
            split=split,
            question=self.question,
            golds=self.golds,
            passages=passages,
            meta=self.meta,
        )


@dataclasses.dataclass(frozen=True)
class Format:
    """One published layout of a record."""

    name: str  # in words, as shown to a person
    fits: Callable[[Record], bool]  # tells from the keys of a record of this layout
    # Turns a record into a question; a ValueError says why it cannot. None for a layout
    # that holds no questions, which `refusal` then explains.
    read: Callable[[Record], Question] | None = None
    # The only question set that is published so, if there is only one.
    dataset: str | None = None
    refusal: str = ""
    is_weak: bool = False  # a damaged record of a richer layout fits it too


def unquote(question: str) -> str:
    """Remove the layer of CSV quotes that is left on some TriviaQA questions."""
    inner = question[1:-1]
    is_quoted = len(question) > 2 and question[0] == question[-1] == '"'
    return inner.replace('""', '"') if is_quoted and '""' in inner else question


def question_of(record: Record, *names: str) -> str:
    """Return the question under the first of its names that is there."""
    name = next((name for name in names if name in record), names[0])
    return unquote(fields.text(record, name))


def reader(
    *,
    dataset: Callable[[Record], str | None] = lambda record: None,
    ids: tuple[str, ...] = ("id",),
    questions: tuple[str, ...] = ("question",),
    golds: Callable[[Record], tuple[str, ...]] = fields.any_answers,
    passages: Callable[[Record], tuple[Passage, ...]] = lambda record: (),
    meta: Callable[[Record], dict[str, Any]] = lambda record: {},
) -> Callable[[Record], Question]:
    """Return the reader of a layout each of whose fields is read by itself.

    Args:
      dataset: the question set that a record is of, if it tells.
      ids: names of the id; the first that is there counts.
      questions: likewise of the question.
      golds: the accepted answers.
      passages: what came with the question.
      meta: what else is kept.
    """

    def read(record: Record) -> Question:
        return Question(
            question=question_of(record, *questions),
            golds=golds(record),
            passages=passages(record),
            id=fields.identity(record, *ids),
            dataset=dataset(record),  # after what it looks into
            meta=meta(record),
        )

    return read


_NAMES: tuple[tuple[str, DatasetName], ...] = (
    (r"2wiki|wikimulti", "2wikimultihopqa"),
    (r"hotpot", "hotpotqa"),
    (r"musique", "musique"),
    (r"popqa", "popqa"),
    (r"trivia|(?<![a-z])tqa", "triviaqa"),
    (r"(?<![a-z])nq(?![a-z])|natural[-_ ]?questions", "nq"),
)
_IDS: tuple[tuple[str, DatasetName], ...] = (
    (r"[234]hop\d?__.+", "musique"),
    (r"[0-9a-f]{24}", "hotpotqa"),
    (r"[0-9a-f]{32}", "2wikimultihopqa"),
    (r"(tc|q[bwzfg]|bb|bt|jp|wh|sfq|odql|dpql)_\d+(--.*)?", "triviaqa"),
    (r"-?\d{15,20}", "nq"),
)
# Question sets that are published in the same layouts, and are none of the six.
_FOREIGN = re.compile(
    r"squad|web[-_ ]?q|curated|(?<![a-z])trec|ms[-_ ]?marco|boolq|newsqa|searchqa|"
    r"quasar|quac|coqa|narrativeqa|bamboogle|strategyqa|eli5|asqa|gsm8k|truthfulqa|"
    r"mmlu|fever|wizard|(?<![a-z])(drop|arc|race|zsre|trex|t-rex)(?![a-z])"
)


def dataset_named(name: Any) -> DatasetName | None:
    """Return the question set that a name means, or None."""
    lowered = name.lower() if isinstance(name, str) else ""
    return next(
        (dataset for pattern, dataset in _NAMES if re.search(pattern, lowered)), None
    )


def is_foreign(name: Any) -> bool:
    """Return whether a name is that of a known question set beside the six."""
    if not isinstance(name, str) or dataset_named(name) is not None:
        return False
    return _FOREIGN.search(name.lower()) is not None


def dataset_tagged(record: Record) -> DatasetName | None:
    """Return the question set that a record's field `dataset` means, or None."""
    name = record.get("dataset")
    if is_foreign(name):
        raise ValueError(
            f"its 'dataset' is {name!r}, which is none of the six question sets"
        )
    return dataset_named(name)


def dataset_marked(record: Record) -> DatasetName | None:
    """Return the question set that a plain record's own marks mean, or None.

    Ids of hexadecimal digits mark none: SQuAD's are as HotpotQA's, and any checksum is
    as 2WikiMultihopQA's.
    """
    tagged = dataset_tagged(record)
    if tagged is not None:
        return tagged
    if "s_wiki_title" in record or {"prop", "subj"} <= record.keys():
        return "popqa"
    names = (record.get(key) for key in ("id", "_id", "question_id", "qid"))
    dataset = dataset_of_id(next((n for n in names if isinstance(n, str)), None))
    return None if dataset in ("hotpotqa", "2wikimultihopqa") else dataset


def dataset_of_id(name: Any) -> DatasetName | None:
    """Return the question set whose ids look like this one, or None."""
    name = name if isinstance(name, str) else ""
    return next(
        (dataset for pattern, dataset in _IDS if re.fullmatch(pattern, name)), None
    )


def dataset_of_style(questions: Sequence[Question]) -> DatasetName | None:
    """Return NQ or TriviaQA by how questions ask and accept, or None.

    NQ's questions are search queries in lower case without a question mark; TriviaQA's
    are sentences with long lists of aliases (median 8 in DPR's development set, against
    1 in NQ's).
    """
    texts = [q.question for q in questions]
    n_queries = sum(not text.endswith("?") and text == text.lower() for text in texts)
    if texts and n_queries >= 0.8 * len(texts):
        return "nq"
    median = sorted(len(q.golds) for q in questions)[len(texts) // 2] if texts else 0
    return "triviaqa" if n_queries <= 0.1 * len(texts) and median >= 4 else None
