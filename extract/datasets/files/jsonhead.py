"""The first object of a JSON text, as far as the beginning of a file shows it."""

import re
from collections.abc import Iterator

# A list under one of these names, in an object around it, is the list of records.
LIST_KEYS = ("Data", "data", "rows", "examples", "questions", "instances")
# An object with one of these is a record, not something around records.
_RECORD_KEYS = {"question", "Question", "question_text", "query", "golden_answers"}
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_KEY = re.compile(rb"[\s,{]*+(" + _STRING + rb")\s*+:\s*+", re.S)
_TO_BRACKET = re.compile(rb"(?:[^{}\[\]\"]++|" + _STRING + rb")*+[{}\[\]]", re.S)
# Up to the first object of a list, or to its end.
_LIST_HEAD = re.compile(rb"\[((?:" + _STRING + rb"|[^\[\]{}\"]++)*+)(?=[{\]])", re.S)
_SCALAR = re.compile(rb"(?:" + _STRING + rb"|[^\s,{}\[\]\"]++)", re.S)


def list_key_of(text: bytes) -> str | None:
    """Return the name of the list of objects that the first object is around.

    A record is no such object, though a third party gave it a list under one of the
    names; and a damaged first entry does not make another list of it.

    Args:
      text: begins with `{`; may end anywhere.
    """
    at, found = 0, None
    while key := _KEY.match(text, at):
        name = key[1][1:-1].decode("utf-8", "replace")
        at = key.end()
        if name in _RECORD_KEYS:
            return None
        if found is None and name in LIST_KEYS and _is_list_of_objects(text, at):
            found = name
        at = behind_value(text, at)
        if found == name and text[at - 1 : at] != b"]":
            break  # damaged inside, or longer than the text
    return found


def _is_list_of_objects(text: bytes, at: int) -> bool:
    """Tell whether the value at `at` is an empty list, or one with an object in it."""
    head = _LIST_HEAD.match(text, at)
    if head is None:
        return False
    return text[head.end() : head.end() + 1] == b"{" or not head[1].strip()


def top_keys(text: bytes, at: int) -> Iterator[str]:
    """Yield the keys of the object at `at`, as far as it can be followed."""
    while key := _KEY.match(text, at):
        yield key[1][1:-1].decode("utf-8", "replace")
        at = behind_value(text, key.end())


def behind_value(text: bytes, at: int) -> int:
    """Return the position behind the JSON value at `at`; the end if it is cut off."""
    if text[at : at + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(text, at)
        return scalar.end() if scalar else len(text)
    depth = 0
    while found := _TO_BRACKET.match(text, at):
        at = found.end()
        depth += 1 if text[at - 1] in b"{[" else -1
        if depth == 0:
            return at
    return len(text)
