"""Contexts of titled sentences with supporting facts: HotpotQA and 2WikiMultihopQA.

Four layouts hold the same: lists of pairs (the official files), an object of lists
(hub copies), a list of objects (Parquet's structs, 2Wiki's `title` and `content`), and
any of them written as JSON text (some Parquet copies).
"""

from collections.abc import Sequence
from typing import Any

from extract.datasets.readers.fields import kind_of, unfold
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
