"""One JSON object out of bytes, or the reason in words why it is none."""

import json
import re
from typing import Any

import orjson

_PYTHON = re.compile(r"\s*\{\s*'")  # single quotes around the first key
KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def parse_object(raw: bytes | memoryview) -> tuple[dict[str, Any] | None, str | None]:
    """Parse one JSON object; returns it, or None and what is wrong."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value, problem = _parse_slowly(bytes(raw), error)
        if problem is not None:
            return None, problem
    if not isinstance(value, dict):
        return None, f"expected a JSON object, found {KINDS[type(value)]}"
    return value, None


def is_json(raw: bytes | memoryview) -> bool:
    """Tell whether the bytes are one JSON value of any kind."""
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True


def _parse_slowly(raw: bytes, error: orjson.JSONDecodeError) -> tuple[Any, str | None]:
    """Say why text is no JSON; accept the NaN and Infinity that Python writes."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as wrong:
        return None, (
            f"not UTF-8: byte 0x{raw[wrong.start]:02x} at position {wrong.start} "
            "of the record"
        )
    if "NaN" in text or "Infinity" in text:
        try:
            value = json.loads(text)
            orjson.dumps(value)  # refuses lone surrogates, which json lets through
            return value, None
        except (ValueError, TypeError, RecursionError):
            pass
    if _PYTHON.match(text):
        return None, "not valid JSON (Python's notation; save it with json.dumps)"
    return None, f"not valid JSON ({error.msg}, at character {error.pos})"
