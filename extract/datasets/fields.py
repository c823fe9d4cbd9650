"""Values and passages out of a raw record, and the question that they make.

What is missing or of another type is a ValueError that names the field, the reason of
the refusal. A question is as its file has it, before it belongs to a split.
"""

import ast
import dataclasses
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard, TypeVar, get_args

import msgspec

from beatrice.extract.datasets.splits import Context
from beatrice.extract.records import Example, Passage, Split

T = TypeVar("T")
Record = Mapping[str, Any]  # as it lies in a file
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
# The one known table without a header is DPR's: question, list of answers.
HEADERLESS = ("column 1", "column 2")
# A text ends and another begins, which Python would join: NumPy prints lists like that.
_NO_COMMA = re.compile(r"""[^\\\s\[,](['"])\s+['"]""")
_OPENS_A_LIST = re.compile(r"""[\[{]\s*['"\]}]""")
MISSING = ("null", "NULL", "nan", "NaN", "None", "<NA>")  # as tables and logs write it
_SINGULAR = ("answer", "reference", "target")  # names under which a plain text is usual
# Gold names go first: `answer` beside them is a model's, as in RAGAS's rows.
_GOLDS = ("golds", "gold_answers", "golden_answers", "ground_truth", "ground_truths",
          "reference")  # fmt: skip
_ANSWERS = (*_GOLDS, "answers", "answer", "short_answers", "possible_answers")

_SENTENCES = ("sentences", "content", "text", "paragraph_text", "contents")
_TEXTS = ("text", "paragraph_text", "contents", "content", "page_content")
_MARKS = ("is_supporting", "isgold")
# A list or an object as text; "[1] It is said" and "{{cite}}" are passages.
_IN_JSON = re.compile(r"""\s*(\[\s*(\[?\s*['"]|\{|\]\s*$)|\{\s*['"}])""")
# Names under which a record keeps passages, whoever wrote it.
_HOLDERS = ("paragraphs", "ctxs", "context", "contexts", "retrieved_contexts",
            "passages", "passage", "documents", "positive_ctxs",
            "positive_passages")  # fmt: skip


def kind_of(value: Any) -> str:
    """Return a value's kind in words."""
    return _KINDS.get(type(value), type(value).__name__)


def expect(value: Any, kind: type[T], name: str) -> T:
    """Return a value of a kind; `name` is the field's, for the message."""
    if isinstance(value, kind):
        return value
    raise ValueError(f"{name!r}: expected {_KINDS[kind]}, found {kind_of(value)}")


def required(
    record: Record, key: str, kind: type[T], *, within: str = "", why: str = ""
) -> T:
    """Return a field that must be there; `within` says in which object it lies."""
    if key not in record:
        raise ValueError(f"no {within + key!r}{why}")
    return expect(record[key], kind, within + key)


def text(record: Record, key: str, *, within: str = "") -> str:
    """Return a text that must be there and not empty, without outer white space."""
    value = required(record, key, str, within=within).strip()
    if not value:
        raise ValueError(f"{within + key!r} is empty")
    return value


def text_or_empty(value: Any) -> str:
    """Return a text; of anything else, which is not worth a refusal, nothing."""
    return value if isinstance(value, str) else ""


def objects(record: Record, key: str, *, within: str = "") -> list[Record]:
    """Return a list of objects that must be there."""
    items = required(record, key, list, within=within)
    return [expect(item, dict, f"{within}{key}[{i}]") for i, item in enumerate(items)]


def identity(record: Record, *keys: str) -> str | None:
    """Return the first id that is there as text; ids may be whole numbers."""
    for key in keys:
        value = record.get(key)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(
                f"{key!r}: expected an id (text or a whole number), found "
                f"{kind_of(value)}"
            )
        return str(value).strip() or None
    return None


_MOST_LITERAL = 1 << 20  # characters; Python's parser takes hundreds of bytes for each


def unfold(value: Any, name: str) -> Any:
    """Return what a text holds that begins like a list or an object.

    JSON, or a Python literal as DPR's files and copies of PopQA have it; anything else
    is returned as it is.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] not in ("[", "{"):
        return value
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    try:
        if len(text) <= _MOST_LITERAL and not _NO_COMMA.search(text):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of "\ " and the like inside a string
                return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    raise ValueError(
        f"{name!r}: expected a list as JSON or as a Python literal, commas between "
        f"its texts, found {text[:40]!r}"
    )


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts in order, stripped, without empty and repeated ones."""
    stripped = (text.strip() for text in texts)
    return tuple(dict.fromkeys(text for text in stripped if text))


def answers(value: Any, name: str) -> tuple[str, ...]:
    """Return the accepted answers in a field's value, one text or a list of texts.

    Repetitions and empty entries are left out: an empty answer accepts everything.
    """
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(
            f"{name!r}: expected text or a list of texts, found {kind_of(value)}"
        )
    golds = distinct(expect(item, str, f"{name}[{i}]") for i, item in enumerate(items))
    if not golds:
        what = "is an empty list" if not items else "holds no word"
        raise ValueError(f"{name!r} {what}: there is no answer")
    return golds


def any_answers(record: Record) -> tuple[str, ...]:
    """Return the accepted answers under whichever of their names is there."""
    name = next((name for name in _ANSWERS if name in record), None)
    if name is None:
        raise ValueError("no answer field (a test set without answers?)")
    if name == "answer" and "label" in record:
        raise ValueError(
            "'label' says whether 'answer' is right, so that is no gold; give lines of "
            "answers with labels to `beatrice fit` with --labelled, or name the "
            "accepted answers 'golds'"
        )
    return field_answers(record[name], name)


def field_answers(value: Any, name: str) -> tuple[str, ...]:
    """Return the accepted answers in a field that may hold a list written as text.

    Under a singular name a text may begin with a bracket ("[Chorus] hey").
    """
    text = value.strip() if isinstance(value, str) else ""
    if text in MISSING:
        raise ValueError(
            f"{name!r}: expected an answer, found {text!r}, the sign of a missing value"
        )
    is_plural = name not in _SINGULAR
    if "|" in text and is_plural and text[0] != "[":
        raise ValueError(
            f"{name!r}: expected a list, found {text[:40]!r}; whether the bars part "
            "several answers cannot be told, save the list as JSON"
        )
    may_be_list = is_plural or _OPENS_A_LIST.match(text)
    return answers(unfold(value, name) if may_be_list else value, name)


def has_answers(record: Record) -> bool:
    """Return whether any known name of an answer field is there."""
    return any(name in record for name in _ANSWERS)


def is_list_of_objects(value: Any) -> TypeGuard[list[Record]]:
    """Return whether a value is a list whose first entry is an object."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def is_titled(value: Any) -> bool:
    """Return whether a context is of titled sentences, in one of their layouts."""
    if isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, list):
            is_pair = len(value) == 2 and isinstance(value[1], list)
            return is_pair and isinstance(value[0], str)
    return isinstance(value, dict) and (
        "title" in value and bool({"sentences", "content"} & value.keys())
    )


def _pairs(value: Any, name: str, second: tuple[str, ...]) -> Sequence[Sequence[Any]]:
    """Return pairs: of a list of pairs or of objects, or an object of two lists."""
    value = unfold(value, name)
    if isinstance(value, dict):
        key = next((key for key in second if key in value), second[0])
        titles, others = value.get("title"), value.get(key)
        if not isinstance(titles, list) or not isinstance(others, list):
            raise ValueError(f"{name!r}: expected the lists 'title' and {key!r}")
        if len(titles) != len(others):
            raise ValueError(f"{name!r}: {len(titles)} titles but {len(others)} {key}")
        return list(zip(titles, others, strict=True))
    pairs = []
    for i, item in enumerate(expect(value, list, name)):
        if isinstance(item, dict):
            body = next((item[key] for key in second if key in item), None)
            # A text stands for the list of its one sentence.
            item = [item.get("title"), [body] if isinstance(body, str) else body]
        if not isinstance(item, list) or len(item) != 2:
            raise ValueError(
                f"{f'{name}[{i}]'!r}: expected a pair of title and {second[0]}, or an "
                f"object with both, found {kind_of(value[i])}"
            )
        pairs.append(item)
    return pairs


def _joined(sentences: Sequence[str]) -> str:
    """Return a paragraph; HotpotQA's sentences bring their spaces, 2Wiki's do not."""
    has_spaces = any(sentence[:1].isspace() for sentence in sentences[1:])
    return ("" if has_spaces else " ").join(filter(None, sentences)).strip()


def supporting_titles(value: Any) -> list[str]:
    """Return the gold titles in order, each once.

    The sentence numbers beside them are not used: published files hold some that are
    out of range.
    """
    pairs = enumerate(_pairs(value, "supporting_facts", ("sent_id",)))
    titles = (expect(title, str, f"supporting_facts[{i}]") for i, (title, _) in pairs)
    return list(dict.fromkeys(titles))


def read_context(value: Any, gold_titles: Sequence[str]) -> tuple[Passage, ...]:
    """Return the paragraphs; those under a gold title are supporting."""
    passages = []
    for i, (title, sentences) in enumerate(_pairs(value, "context", _SENTENCES)):
        if not (
            isinstance(title, str)
            and isinstance(sentences, list)
            and all(isinstance(sentence, str) for sentence in sentences)
        ):
            raise ValueError(
                f"'context[{i}]': expected a title and a list of sentences, found "
                f"{kind_of(title)} and {kind_of(sentences)}"
            )
        body, is_gold = _joined(sentences), title in gold_titles
        passages.append(Passage(title=title, text=body, is_supporting=is_gold))
    if not passages:
        raise ValueError("'context' holds no paragraph")
    return tuple(passages)


def _passage(item: Any, name: str, is_supporting: bool | None) -> Passage:
    """Return a passage of an object, or of a text, which has no title and no mark."""
    if isinstance(item, str):
        return Passage(title="", text=item.strip(), is_supporting=bool(is_supporting))
    item, within = expect(item, dict, name), f"{name}."
    title = "" if item.get("title") is None else item["title"]
    title = expect(title, str, f"{within}title").strip()
    name = next((name for name in _TEXTS if name in item), _TEXTS[0])
    # It may be empty, and is then left out later.
    body = "" if item.get(name) == "" else text(item, name, within=within)
    if is_supporting is None:
        mark = next((name for name in _MARKS if name in item), None)
        is_supporting = mark is not None and expect(item[mark], bool, within + mark)
    return Passage(title=title, text=body, is_supporting=is_supporting)


def read_passages(
    value: Any, name: str, *, is_supporting: bool | None = None
) -> tuple[Passage, ...]:
    """Return the passages in a field's value: objects with a title and a text.

    Plain texts may stand for objects, one text for a list, and JSON for either, as a
    cell of a table has it. Nothing but white space is no passage. Whether they are
    supporting is the same for all, or None: then the file's own marks are believed.
    """
    items = enumerate(expect(unfolded(value, name), list, name))
    return tuple(_passage(item, f"{name}[{i}]", is_supporting) for i, item in items)


def unfolded(value: Any, name: str) -> Any:
    """Return a text as the list that it holds, or of which it is the one passage."""
    if not isinstance(value, str):
        return value
    if _IN_JSON.match(value):
        return unfold(value, name)
    return [value] if value.strip() else []


def passage_field(record: Record) -> str | None:
    """Return under which of their names a record has passages."""
    for name in _HOLDERS:
        value = unfolded(record.get(name), name)
        first = value[0] if isinstance(value, list) and value else None
        has_text = isinstance(first, dict) and not first.keys().isdisjoint(_TEXTS)
        if has_text or isinstance(first, str):
            return name
    return None


def any_passages(record: Record) -> tuple[Passage, ...]:
    """Return the passages under whichever of their names holds texts."""
    name = passage_field(record)
    return () if name is None else read_passages(record[name], name)


def check_no_passages(record: Record, *, within: str = "") -> None:
    """Check that a record without passages has none that no reader understood."""
    for name in _HOLDERS:
        value = record.get(name)
        if not value or (isinstance(value, str) and not value.strip()):
            continue
        what = kind_of(value)
        if isinstance(value, list):
            what = f"a list that begins with {kind_of(value[0])}"
        raise ValueError(
            f"{within}{name!r}: expected passages as a list of texts, or of objects "
            f"with 'title' and 'text', found {what}; convert them, or take the field "
            "out to read the question without passages"
        )


DatasetName = Literal[
    "hotpotqa", "musique", "2wikimultihopqa", "popqa", "nq", "triviaqa"
]
DATASETS: tuple[DatasetName, ...] = get_args(DatasetName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A page of evidence that lies in a file of its own (TriviaQA)."""

    folder: str  # of the evidence, in which it lies
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
    rewritten: tuple[Passage, ...] = ()  # all of them in other words
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

    @property
    def example_id(self) -> str:
        """What its example is called, unlike those of all sets."""
        return "-".join(filter(None, (self.dataset, self.id)))

    def as_example(self, split: Split, passages: tuple[Passage, ...]) -> Example:
        """Return the example of a split; rewritten where it has all the passages."""
        assert self.dataset is not None, "a file's reader gives it its set"
        return Example(
            id=self.example_id,
            dataset=self.dataset,
            split=split,
            question=self.question,
            golds=self.golds,
            passages=passages,
            rewritten=self.rewritten if passages == self.passages else (),
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


def question_of(record: Record, *names: str) -> str:
    """Return the question under the first of its names that is there.

    The layer of CSV quotes that is left on some of TriviaQA is taken away.
    """
    question = text(record, next((name for name in names if name in record), names[0]))
    inner = question[1:-1]
    is_quoted = '""' in inner and question[0] == question[-1] == '"'
    return inner.replace('""', '"') if is_quoted else question


def reader(
    *,
    dataset: Callable[[Record], str | None] = lambda record: None,
    ids: tuple[str, ...] = ("id",),
    questions: tuple[str, ...] = ("question",),
    golds: Callable[[Record], tuple[str, ...]] = any_answers,
    passages: Callable[[Record], tuple[Passage, ...]] = lambda record: (),
    meta: Callable[[Record], dict[str, Any]] = lambda record: {},
) -> Callable[[Record], Question]:
    """Return the reader of a layout; of several names the first there counts."""

    def read(record: Record) -> Question:
        return Question(
            question=question_of(record, *questions),
            golds=golds(record),
            passages=passages(record),
            id=identity(record, *ids),
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
    return next((x for pattern, x in _NAMES if re.search(pattern, lowered)), None)


def is_foreign(name: Any) -> bool:
    """Return whether a name is that of a known question set beside the six."""
    is_ours = not isinstance(name, str) or dataset_named(name) is not None
    return not is_ours and _FOREIGN.search(name.lower()) is not None


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

    Hexadecimal ids mark none: SQuAD's are as HotpotQA's, checksums as 2Wiki's.
    """
    if (tagged := dataset_tagged(record)) is not None:
        return tagged
    if "s_wiki_title" in record or {"prop", "subj"} <= record.keys():
        return "popqa"
    names = (record.get(key) for key in ("id", "_id", "question_id", "qid"))
    dataset = dataset_of_id(next((n for n in names if isinstance(n, str)), None))
    return None if dataset in ("hotpotqa", "2wikimultihopqa") else dataset


def dataset_of_id(name: Any) -> DatasetName | None:
    """Return the question set whose ids look like this one, or None."""
    name = name if isinstance(name, str) else ""
    return next((x for pattern, x in _IDS if re.fullmatch(pattern, name)), None)


def dataset_of_style(questions: Sequence[Question]) -> DatasetName | None:
    """Return NQ or TriviaQA by how questions ask and accept, or None.

    NQ's questions are search queries in lower case without a question mark; TriviaQA's
    are sentences with long lists of aliases (median 8 in DPR's development set, against
    1 in NQ's).
    """
    if not questions:
        return None
    texts = [q.question for q in questions]
    n_queries = sum(not text.endswith("?") and text == text.lower() for text in texts)
    if n_queries >= 0.8 * len(texts):
        return "nq"
    median = statistics.median_high(len(q.golds) for q in questions)
    return "triviaqa" if n_queries <= 0.1 * len(texts) and median >= 4 else None
