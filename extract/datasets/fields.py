"""Read values, passages and the question out of a raw record.

A field that is missing or of another type raises a ValueError that names it; this is
the reason of a refusal. A `Question` is as its file has it, not yet in a split.
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
Record = Mapping[str, Any]  # as stored in a file
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
# Names of the question, of which the first that exists counts.
QUESTIONS = ("question", "query", "input", "Question", "problem")
# The one known table without a header is DPR's: question, list of answers.
HEADERLESS = ("column 1", "column 2")
# Two texts without a comma between them, as NumPy prints lists; Python would join them.
_NO_COMMA = re.compile(r"""[^\\\s\[,](['"])\s+['"]""")
_OPENS_A_LIST = re.compile(r"""[\[{]\s*['"\]}]""")
MISSING = ("null", "NULL", "nan", "NaN", "None", "<NA>")  # as tables and logs write it
_SINGULAR = ("answer", "reference", "target")  # names that usually hold a plain text
# Gold names go first: next to them, `answer` is a model's, as in RAGAS's rows.
_GOLDS = ("golds", "gold_answers", "golden_answers", "ground_truth", "ground_truths",
          "reference")  # fmt: skip
_ANSWERS = (*_GOLDS, "answers", "answer", "short_answers", "possible_answers")
_ALIASES = "answer_aliases"  # further accepted answers, as in copies of MuSiQue
# Fields of plain records besides question, answers and passages that are read or tell
# a question set.
_NAMES_AND_MARKS = {"id", "_id", "question_id", "qid", "example_id", "dataset", "type",
                    "level", _ALIASES}  # fmt: skip

_SENTENCES = ("sentences", "content", "text", "paragraph_text", "contents")
_TEXTS = ("text", "paragraph_text", "contents", "content", "page_content")
_MARKS = ("is_supporting", "isgold")
# A list or an object as text; but "[1] It is said" and "{{cite}}" are passages.
_IN_JSON = re.compile(r"""\s*(\[\s*(\[?\s*['"]|\{|\]\s*$)|\{\s*['"}])""")
# Names under which records of any kind keep passages.
_HOLDERS = ("paragraphs", "ctxs", "context", "contexts", "retrieved_contexts",
            "passages", "passage", "documents", "positive_ctxs",
            "positive_passages")  # fmt: skip


def kind_of(value: Any) -> str:
    """Return a value's kind in words."""
    return _KINDS.get(type(value), type(value).__name__)


def expect(value: Any, kind: type[T], name: str) -> T:
    """Return a value after checking its type; `name` is its field in the error."""
    if isinstance(value, kind):
        return value
    raise ValueError(f"{name!r}: expected {_KINDS[kind]}, found {kind_of(value)}")


def required(
    record: Record, key: str, kind: type[T], *, within: str = "", why: str = ""
) -> T:
    """Return a field that must exist; `within` is the path of its object in errors."""
    if key not in record:
        raise ValueError(f"no {within + key!r}{why}")
    return expect(record[key], kind, within + key)


def text(record: Record, key: str, *, within: str = "") -> str:
    """Return a text, stripped; it must exist and not be empty."""
    value = required(record, key, str, within=within).strip()
    if not value:
        raise ValueError(f"{within + key!r} is empty")
    return value


def text_or_empty(value: Any) -> str:
    """Return a text, or "" for any other value, which is not worth a refusal."""
    return value if isinstance(value, str) else ""


def objects(record: Record, key: str, *, within: str = "") -> list[Record]:
    """Return a list of objects that must exist."""
    items = required(record, key, list, within=within)
    return [expect(item, dict, f"{within}{key}[{i}]") for i, item in enumerate(items)]


def identity(record: Record, *keys: str) -> str | None:
    """Return the first id found under some keys, as text; it may be a whole number.

    In a column that lacks some, pandas writes 1 as 1.0, and a missing id as NaN.
    """
    for key in keys:
        value = record.get(key)
        if value is None or value == "" or value != value:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(
                f"{key!r}: expected an id (text or a whole number), found "
                f"{kind_of(value)}"
            )
        return str(value).strip() or None
    return None


_MOST_LITERAL = 1 << 20  # characters; each costs Python's parser hundreds of bytes


def parse_nested(value: Any, name: str) -> Any:
    """Return the value in a text that begins like a list or an object.

    It may be JSON, or a Python literal as in DPR's files and copies of PopQA. Any other
    value is returned unchanged.
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
                warnings.simplefilter("ignore")  # about "\ " and such inside a string
                return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    raise ValueError(
        f"{name!r}: expected a list as JSON or as a Python literal, with commas "
        f"between its texts, found {text[:40]!r}"
    )


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the stripped texts in order, without empty or repeated ones."""
    stripped = (text.strip() for text in texts)
    return tuple(dict.fromkeys(text for text in stripped if text))


def answers(value: Any, name: str) -> tuple[str, ...]:
    """Return the accepted answers in a text or a list, without repeated or empty ones.

    An empty answer would accept everything.
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
    """Return the accepted answers under the first of their names that exists."""
    name = next((name for name in _ANSWERS if name in record), None)
    if name is None:
        raise ValueError("no answer field (a test set without answers?)")
    if name == "answer" and "label" in record:
        raise ValueError(
            "'label' says whether 'answer' is right, so 'answer' is not a gold answer; "
            "give labelled answers to `beatrice fit` with --labelled, or rename the "
            "field of accepted answers to 'golds'"
        )
    golds = field_answers(record[name], name)
    aliases = record.get(_ALIASES)
    if aliases in (None, "", []):
        return golds
    return distinct([*golds, *field_answers(aliases, _ALIASES)])


def unread_fields(record: Record) -> list[str]:
    """Return the fields of a plain record that are not read and not empty.

    They may be what the user meant as accepted answers or passages.
    """
    lowered = {name.lower(): value for name, value in record.items()}
    named = (next((name for name in names if name in lowered), None)
             for names in (QUESTIONS, _ANSWERS))  # fmt: skip
    known = {*named, passage_field(lowered), *_NAMES_AND_MARKS}
    filled = (name for name, value in record.items() if value and str(value).strip())
    return [name for name in filled if name.lower() not in known]


def field_answers(value: Any, name: str) -> tuple[str, ...]:
    """Return the accepted answers in a field that may hold a list written as text.

    In a field with a singular name a text may begin with a bracket ("[Chorus] hey").
    """
    text = value.strip() if isinstance(value, str) else ""
    if text in MISSING:
        raise ValueError(
            f"{name!r}: expected an answer, found {text!r}, the mark of a missing value"
        )
    is_plural = name not in _SINGULAR
    if "|" in text and is_plural and text[0] != "[":
        raise ValueError(
            f"{name!r}: expected a list, found {text[:40]!r}; it is not clear whether "
            "the bars separate answers, so save the list as JSON"
        )
    may_be_list = is_plural or _OPENS_A_LIST.match(text)
    return answers(parse_nested(value, name) if may_be_list else value, name)


def has_answers(record: Record) -> bool:
    """Return whether a record has a known answer field."""
    return any(name in record for name in _ANSWERS)


def is_list_of_objects(value: Any) -> TypeGuard[list[Record]]:
    """Return whether a value is a list whose first entry is an object."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def is_titled(value: Any) -> bool:
    """Return whether a context has titled sentences, in one of their layouts."""
    if isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, list):
            is_pair = len(value) == 2 and isinstance(value[1], list)
            return is_pair and isinstance(value[0], str)
    return isinstance(value, dict) and (
        "title" in value and bool({"sentences", "content"} & value.keys())
    )


def _pairs(value: Any, name: str, second: tuple[str, ...]) -> Sequence[Sequence[Any]]:
    """Return pairs from a list of pairs or objects, or from an object of two lists."""
    value = parse_nested(value, name)
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
            # A text stands for a list of one sentence.
            item = [item.get("title"), [body] if isinstance(body, str) else body]
        if not isinstance(item, list) or len(item) != 2:
            raise ValueError(
                f"{f'{name}[{i}]'!r}: expected a pair of title and {second[0]}, or an "
                f"object with both, found {kind_of(value[i])}"
            )
        pairs.append(item)
    return pairs


def supporting_titles(value: Any) -> list[str]:
    """Return the gold titles in order, each once."""
    # Sentence numbers are not used: published files hold some that are out of range.
    pairs = enumerate(_pairs(value, "supporting_facts", ("sent_id",)))
    titles = (expect(title, str, f"supporting_facts[{i}]") for i, (title, _) in pairs)
    return list(dict.fromkeys(titles))


def read_context(value: Any, gold_titles: Sequence[str]) -> tuple[Passage, ...]:
    """Return the paragraphs; those under a gold title are supporting."""
    pairs = _pairs(value, "context", _SENTENCES)
    for i, (title, sentences) in enumerate(pairs):
        if not (
            isinstance(title, str)
            and isinstance(sentences, list)
            and all(isinstance(sentence, str) for sentence in sentences)
        ):
            raise ValueError(
                f"'context[{i}]': expected a title and a list of sentences, found "
                f"{kind_of(title)} and {kind_of(sentences)}"
            )
    if not pairs:
        raise ValueError("'context' holds no paragraph")
    # HotpotQA's sentences include spaces, though not each; 2Wiki's do not.
    has_spaces = any(x[:1].isspace() for _, body in pairs for x in body[1:])
    between = "" if has_spaces else " "
    return tuple(
        Passage(
            title=title,
            text=between.join(filter(None, sentences)).strip(),
            is_supporting=title in gold_titles,
        )
        for title, sentences in pairs
    )


def _passage(item: Any, name: str, is_supporting: bool | None) -> Passage:
    """Return a passage from an object, or from a text, which has no title or mark."""
    if isinstance(item, str):
        return Passage(title="", text=item.strip(), is_supporting=bool(is_supporting))
    item, within = expect(item, dict, name), f"{name}."
    title = "" if item.get("title") is None else item["title"]
    title = expect(title, str, f"{within}title").strip()
    name = next((name for name in _TEXTS if name in item), _TEXTS[0])
    # It may be empty; such a passage is left out later.
    body = "" if item.get(name) == "" else text(item, name, within=within)
    if is_supporting is None:
        mark = next((name for name in _MARKS if name in item), None)
        is_supporting = mark is not None and expect(item[mark], bool, within + mark)
    return Passage(title=title, text=body, is_supporting=is_supporting)


def read_passages(
    value: Any, name: str, *, is_supporting: bool | None = None
) -> tuple[Passage, ...]:
    """Return the passages in a field's value: objects with a title and a text.

    Plain texts may stand for objects, one text for a list, and JSON for either, as in
    the cell of a table. White space alone is not a passage. `is_supporting` holds for
    all passages; if None, the file's own marks count.
    """
    items = enumerate(expect(as_listed(value, name), list, name))
    return tuple(_passage(item, f"{name}[{i}]", is_supporting) for i, item in items)


def as_listed(value: Any, name: str) -> Any:
    """Return the list written in a text, or a list of the text; keep other values."""
    if not isinstance(value, str):
        return value
    if value.strip() in MISSING:
        raise ValueError(
            f"{name!r}: expected passages, found {value.strip()!r}, the mark of a "
            "missing value; leave it empty if the model was shown none"
        )
    if _IN_JSON.match(value):
        return parse_nested(value, name)
    return [value] if value.strip() else []


def passage_field(record: Record) -> str | None:
    """Return the name of the field in which a record has passages, or None."""
    for name in _HOLDERS:
        value = as_listed(record.get(name), name)
        first = value[0] if isinstance(value, list) and value else None
        has_text = isinstance(first, dict) and not first.keys().isdisjoint(_TEXTS)
        if has_text or isinstance(first, str):
            return name
    return None


def any_passages(record: Record) -> tuple[Passage, ...]:
    """Return the passages of a record, from whichever field holds them."""
    name = passage_field(record)
    return () if name is None else read_passages(record[name], name)


def check_no_passages(record: Record, *, within: str = "") -> None:
    """Check that a record read without passages has no field that should hold some."""
    for name in _HOLDERS:
        value = record.get(name)
        if not value or (isinstance(value, str) and not value.strip()):
            continue
        what = kind_of(value)
        if isinstance(value, list):
            what = f"a list that begins with {kind_of(value[0])}"
        raise ValueError(
            f"{within}{name!r}: expected passages as a list of texts, or of objects "
            f"with 'title' and 'text', found {what}; convert them, or remove the field "
            "to read the question without passages"
        )


DatasetName = Literal[
    "hotpotqa", "musique", "2wikimultihopqa", "popqa", "nq", "triviaqa"
]
DATASETS: tuple[DatasetName, ...] = get_args(DatasetName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A page of evidence in a file of its own (TriviaQA)."""

    folder: str  # its folder inside the evidence folder
    filename: str
    title: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One question, its accepted answers, and the passages that came with it."""

    id: str | None  # the file's own, or None
    dataset: str | None  # name of the question set; None if the record names none
    question: str
    golds: tuple[str, ...]  # accepted answers as published, each once; at least one
    passages: tuple[Passage, ...] = ()  # in file order; `is_supporting` marks gold ones
    rewritten: tuple[Passage, ...] = ()  # all passages in other words
    documents: tuple[Document, ...] = ()  # evidence in files of its own
    # Other fields worth keeping (JSON values only).
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_made_id: bool = False  # whether the id was made from the question's text
    split: Split | None = None  # the split that the record names, or None

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
        """The id of its example, unique over all sets."""
        return "-".join(filter(None, (self.dataset, self.id)))

    def as_example(self, split: Split, passages: tuple[Passage, ...]) -> Example:
        """Return the example; `rewritten` is kept only if it has all the passages."""
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

    name: str  # as shown to the user
    fits: Callable[[Record], bool]  # whether a record's keys are those of this layout
    # Turns a record into a question; a ValueError says why it cannot. None for a layout
    # without questions, which `refusal` then explains.
    read: Callable[[Record], Question] | None = None
    # The question set with this layout, if there is only one.
    dataset: str | None = None
    refusal: str = ""
    is_weak: bool = False  # whether damaged records of a richer layout fit it too


def question_of(record: Record, *names: str) -> str:
    """Return the question under the first of its names that exists."""
    # Some of TriviaQA's questions still have a layer of CSV quotes.
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
    """Return a reader for a layout; of several names the first that exists counts."""

    def read(record: Record) -> Question:
        return Question(
            question=question_of(record, *questions),
            golds=golds(record),
            passages=passages(record),
            id=identity(record, *ids),
            dataset=dataset(record),  # after the fields that it looks at are checked
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
# Question sets other than the six that are published in the same layouts.
_FOREIGN = re.compile(
    r"squad|web[-_ ]?q|curated|(?<![a-z])trec|ms[-_ ]?marco|boolq|newsqa|searchqa|"
    r"quasar|quac|coqa|narrativeqa|bamboogle|strategyqa|eli5|asqa|gsm8k|truthfulqa|"
    r"mmlu|fever|wizard|(?<![a-z])(drop|arc|race|zsre|trex|t-rex)(?![a-z])"
)


def dataset_named(name: Any) -> DatasetName | None:
    """Return the question set that a name refers to, or None."""
    lowered = name.lower() if isinstance(name, str) else ""
    return next((x for pattern, x in _NAMES if re.search(pattern, lowered)), None)


def is_foreign(name: Any) -> bool:
    """Return whether a name is that of a known question set other than the six."""
    is_ours = not isinstance(name, str) or dataset_named(name) is not None
    return not is_ours and _FOREIGN.search(name.lower()) is not None


def dataset_tagged(record: Record) -> DatasetName | None:
    """Return the question set that a record's field `dataset` names, or None."""
    name = record.get("dataset")
    if is_foreign(name):
        raise ValueError(
            f"its 'dataset' is {name!r}, which is none of the six question sets"
        )
    return dataset_named(name)


def dataset_marked(record: Record) -> DatasetName | None:
    """Return the question set that a plain record's own marks indicate, or None.

    Hexadecimal ids do not count: SQuAD's look like HotpotQA's, checksums like 2Wiki's.
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
    """Guess NQ or TriviaQA from the style of questions and answers; else return None.

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
