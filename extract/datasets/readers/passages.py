"""Passages that are objects with a title and a text, under their several names."""

from collections.abc import Sequence
from typing import Any

from extract.datasets.readers.fields import kind_of, objects, text, unfold
from extract.datasets.readers.question import Question, Record
from extract.records import Passage

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
