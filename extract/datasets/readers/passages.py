"""Passages that are objects with a title and a text, under their several names."""

from collections.abc import Sequence
from typing import Any

from extract.datasets.fields import Record, kind_of, objects, text, unfold
from extract.datasets.readers.question import Question
from extract.records import Passage

_BODIES = ("sentences", "content", "text", "paragraph_text", "contents")


def is_titled(value: Any) -> bool:
    """Tell whether a context is of titled sentences, in one of their layouts."""
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, list):
            is_pair = len(first) == 2 and isinstance(first[1], list)
            return is_pair and isinstance(first[0], str)
        value = first
    return isinstance(value, dict) and (
        "title" in value and bool({"sentences", "content"} & value.keys())
    )


def _object_pairs(items: Sequence[Any], name: str, second: tuple[str, ...]) -> Any:
    """Return the pairs of a list of objects; a text stands for its one sentence."""
    pairs = []
    for i, item in enumerate(items):
        key = next((key for key in second if key in item), None)
        if "title" not in item or key is None:
            raise ValueError(
                f"{f'{name}[{i}]'!r}: expected an object with 'title' and {second[0]!r}"
            )
        inner = item[key]
        is_text = second is _BODIES and isinstance(inner, str)
        pairs.append((item["title"], [inner] if is_text else inner))
    return pairs


def _pairs(value: Any, name: str, second: tuple[str, ...]) -> Sequence[Sequence[Any]]:
    """Return the pairs of a list of pairs, of objects, or of an object of two lists."""
    value = unfold(value, name)
    if value is None:
        raise ValueError(f"{name!r} is null")
    if isinstance(value, dict):
        key = next((key for key in second if key in value), second[0])
        columns = value.get("title"), value.get(key)
        if not all(isinstance(column, list) for column in columns):
            raise ValueError(f"{name!r}: expected the lists 'title' and {key!r}")
        if len(columns[0]) != len(columns[1]):
            raise ValueError(
                f"{name!r}: {len(columns[0])} titles but {len(columns[1])} {key}"
            )
        return list(zip(*columns, strict=True))
    if not isinstance(value, list):
        raise ValueError(f"{name!r}: expected a list, found {kind_of(value)}")
    if {type(item) for item in value} == {list} and {len(item) for item in value} == {
        2
    }:
        return value  # nearly every record; told faster than item by item
    if {type(item) for item in value} == {dict}:
        return _object_pairs(value, name, second)
    for i, item in enumerate(value):
        if not isinstance(item, list) or len(item) != 2:
            raise ValueError(
                f"{f'{name}[{i}]'!r}: expected a pair of title and {second[0]}, found "
                f"{kind_of(item)}"
            )
    return value


def join_sentences(sentences: Sequence[str]) -> str:
    """Return a paragraph; HotpotQA's sentences bring their spaces, 2Wiki's do not."""
    if len(sentences) < 2 or sentences[1][:1].isspace():  # nearly every paragraph
        return "".join(sentences).strip()
    if any(sentence[:1].isspace() for sentence in sentences[2:]):
        return "".join(sentences).strip()
    return " ".join(sentence for sentence in sentences if sentence).strip()


def supporting_titles(value: Any) -> list[str]:
    """Return the gold titles in order, each once.

    The sentence numbers beside them are not used: published files hold some that are
    out of range.
    """
    titles = {}
    for i, (title, _) in enumerate(_pairs(value, "supporting_facts", ("sent_id",))):
        if not isinstance(title, str):
            raise ValueError(
                f"'supporting_facts[{i}]': expected a title, found {kind_of(title)}"
            )
        titles[title] = None
    return list(titles)


def read_context(value: Any, gold_titles: Sequence[str]) -> tuple[Passage, ...]:
    """Return the paragraphs; those under a gold title are supporting."""
    gold = set(gold_titles)
    passages = []
    pairs = _pairs(value, "context", _BODIES)
    for i, (title, sentences) in enumerate(pairs):
        if not (isinstance(title, str) and isinstance(sentences, list)):
            raise ValueError(
                f"'context[{i}]': expected a title and a list of sentences, found "
                f"{kind_of(title)} and {kind_of(sentences)}"
            )
        try:
            text = join_sentences(sentences)
        except (TypeError, AttributeError):
            raise ValueError(
                f"'context[{i}]': expected sentences as texts, found another type"
            ) from None
        passages.append(Passage(title=title, text=text, is_supporting=title in gold))
    if not passages:
        raise ValueError("'context' holds no paragraph")
    return tuple(passages)


_TEXTS = ("text", "paragraph_text", "contents", "content")
_MARKS = ("is_supporting", "isgold")
# Names under which a record keeps passages, whoever wrote it.
_HOLDERS = ("paragraphs", "ctxs", "context", "contexts", "passages", "documents",
            "positive_ctxs", "positive_passages")  # fmt: skip


def body_of(item: Record, within: str) -> str:
    """Return the text of a passage; it may be empty, and is then left out later."""
    name = next((name for name in _TEXTS if name in item), _TEXTS[0])
    if item.get(name) == "":
        return ""
    return text(item, name, within=within)


def title_of(item: Record, within: str) -> str:
    """Return the title of a passage; it may be empty, never of another type."""
    title = item.get("title", "")
    if title is None:
        return ""
    if not isinstance(title, str):
        raise ValueError(f"'{within}title': expected text, found {kind_of(title)}")
    return title.strip()


def is_marked(item: Record, within: str) -> bool:
    """Return whether the file marks a passage as gold."""
    for name in _MARKS:
        if name in item:
            mark: Any = item[name]
            if not isinstance(mark, bool):
                raise ValueError(
                    f"'{within}{name}': expected true or false, found {kind_of(mark)}"
                )
            return mark
    return False


def titled_passages(
    record: Record, key: str, *, is_supporting: bool | None = None
) -> tuple[Passage, ...]:
    """Return the passages of one field.

    Args:
      record: an object.
      key: a list of objects with `title` and a text.
      is_supporting: the same for all; None believes the file's own marks.

    Raises:
      ValueError: it is no such list.
    """
    return tuple(
        Passage(
            title=title_of(item, f"{key}[{i}]."),
            text=body_of(item, f"{key}[{i}]."),
            is_supporting=is_marked(item, f"{key}[{i}].")
            if is_supporting is None
            else is_supporting,
        )
        for i, item in enumerate(objects(record, key))
    )


def any_passages(record: Record) -> tuple[Passage, ...]:
    """Return the passages under whichever of their names holds titles and texts.

    Raises:
      ValueError: one of them is damaged.
    """
    for name in _HOLDERS:
        found = record.get(name)
        if isinstance(found, str) and found.lstrip()[:1] == "[":
            found = unfold(found, name)
        if is_list_of_objects(found) and any(key in found[0] for key in _TEXTS):
            return titled_passages({name: found}, name)
    return ()


def check_all_read(record: Record, question: Question, *, within: str = "") -> None:
    """Refuse a record whose passages no reader understood: they would be lost.

    Args:
      record: that was read.
      question: what it became.
      within: begins the message, where the record lies inside another.

    Raises:
      ValueError: the question has none, and the record holds some.
    """
    if question.passages or question.documents:
        return
    for name in _HOLDERS:
        if record.get(name):
            raise ValueError(
                f"{within}{name!r}: expected passages as a list of objects with "
                f"'title' and 'text', found {_kind_of_passages(record[name])}; convert "
                "them, or take the field out to read the question without passages"
            )


def _kind_of_passages(value: Any) -> str:
    """Return in words what stands where passages should."""
    if isinstance(value, list):
        return f"a list that begins with {kind_of(value[0])}"
    return kind_of(value)


def is_list_of_objects(value: Any) -> bool:
    """Tell whether a value is a list whose first entry is an object."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], dict)
