"""The values of JSON one by one, in memory that does not grow with the file.

HotpotQA is one array of half a gigabyte. Python's own decoder reads one value from a
window of the file and says where it ends; at a value that is no JSON reading ends, with
its number and its byte. Of records of 6 kB (HotpotQA's layout, 50 MB, one core) this
file reads 28,000 a second, ijson's C backend 32,000.

The window holds a character for each byte (Latin-1), so that positions in it are those
in the file; what is not ASCII is decoded again as the UTF-8 that it is.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from beatrice.extract.datasets.fields import kind_of
from beatrice.extract.datasets.files.kinds import Readable

CHUNK = 1 << 20
MAX_RECORD = 32 << 20  # bytes; the largest published records (NQ pages) are below 5 MB
_PARTIAL = 16  # characters; an escape or a literal may be cut by the window's end
_SPACE = re.compile(r"\s*+", re.ASCII)
_SURROGATE = re.compile(r"\\u[dD]")  # a lone one is no JSON, and Python reads it
_PYTHON = re.compile(r"\s*\{\s*'")  # single quotes around the first key
_decode = json.JSONDecoder().raw_decode


class Window:
    """The part of a file that is looked at, and where it lies in the file."""

    def __init__(self, stream: Readable) -> None:
        """Begin before the first byte."""
        self._stream = stream
        self.text = ""  # a character for each byte
        self.start = 0  # offset of text[0] in the file

    def advance(self, keep: int, size: int = CHUNK) -> bool:
        """Forget what lies before `keep` and read on; at the end do neither.

        Returns:
          Whether there was more: positions in `text` are then smaller by `keep`.
        """
        more = self._stream.read(size).decode("latin-1")
        if more:
            self.text = self.text[keep:] + more
            self.start += keep
        return bool(more)

    def widen(self, at: int) -> bool:
        """Read on for the value at `at`, then at 0; False where it is too long already.

        Twice as much each time: a long value is not parsed again and again.
        """
        size = len(self.text) - at
        return size <= MAX_RECORD and self.advance(at, max(CHUNK, size))

    def skip_space(self, at: int) -> int:
        """Return the position of the next byte that is no space; may be the end."""
        while True:
            at = _SPACE.match(self.text, at).end()
            if at < len(self.text) or not self.advance(at):
                return at
            at = 0


def parse_object(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Parse one JSON object; returns it, or None and what is wrong."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value, problem = _parse_slowly(raw)
        if problem is not None:
            return None, problem
    if not isinstance(value, dict):
        return None, f"expected a JSON object, found {kind_of(value)}"
    return value, None


def _parse_slowly(raw: bytes) -> tuple[Any, str | None]:
    """Say why text is no JSON; accept the NaN and Infinity that Python writes."""
    try:
        text = raw.decode()
        value = json.loads(text)
        msgspec.json.encode(value)  # refuses lone surrogates, which json lets through
        return value, None
    except UnicodeDecodeError as error:
        return None, (
            f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start} "
            "of the record"
        )
    except UnicodeEncodeError:
        return None, "not valid JSON (half of a surrogate pair)"
    except RecursionError:
        return None, "not valid JSON (too many objects or lists inside each other)"
    except json.JSONDecodeError as error:
        if _PYTHON.match(text):
            return None, "not valid JSON (Python's notation; save it with json.dumps)"
        what = error.msg.removesuffix(" at")
        return None, f"not valid JSON ({what}, at character {error.pos})"
    except ValueError as error:  # a number of thousands of digits
        return None, f"not valid JSON ({error})"


@dataclasses.dataclass(frozen=True)
class RawRecord:
    """One record as it lies in the file, or what is wrong with it.

    Attributes:
      number: from 1, in file order; damaged ones count.
      at: where it lies, in words.
      value: its fields, or None if it is no record.
      problem: why it is not one.
    """

    number: int
    at: str
    value: dict[str, Any] | None
    problem: str | None = None


class JsonValues:
    """Walks over the values of an array, or over values with no array around."""

    def __init__(self, window: Window, name: str, *, in_array: bool = True) -> None:
        """Begin where `walk` is called for; `name` is the file's, for messages."""
        self._window, self._name, self._in_array = window, name, in_array
        self.end = 0  # after the walk: behind the closing bracket, in the window
        self.n_values = 0

    def walk(self, at: int) -> Iterator[RawRecord]:
        """Yield the values from position `at`, behind the opening bracket.

        Raises:
          ValueError: the array has no end, a value is no JSON, or something stands
            between two values that is no comma.
        """
        window = self._window
        while True:
            at = window.skip_space(at)
            byte = window.text[at : at + 1]
            if not byte and not self._in_array:
                return
            if byte == "]" and self._in_array:
                self.end = at + 1
                return
            if self.n_values and self._in_array:
                if byte != ",":
                    raise self._damage(at, "expected a comma or the end of the array")
                at = window.skip_space(at + 1)
            record, at = self._value(at)
            yield record

    def _value(self, at: int) -> tuple[RawRecord, int]:
        """Return the value at `at`, and the position behind it."""
        window, problem, end = self._window, "", None
        while True:
            try:
                value, end = _decode(window.text, at)
                may_go_on = end == len(window.text)  # a number has no end of its own
            except json.JSONDecodeError as error:
                problem = f"{error.msg}, at byte {window.start + error.pos}"
                if _PYTHON.match(window.text, at):
                    problem = "Python's notation; save it with json.dumps"
                may_go_on = _is_at_end(error, window.text)
            except (ValueError, RecursionError) as error:
                problem, may_go_on = str(error), False
            if not may_go_on or not window.widen(at):
                break
            at = 0
        if end is None:
            raise self._damage(at, problem, is_cut=may_go_on)
        self.n_values += 1
        raw, place = window.text[at:end], f"byte {window.start + at}"
        problem = None
        if len(raw) > MAX_RECORD:
            value, problem = None, f"longer than {MAX_RECORD >> 20} MiB"
        elif not (raw.isascii() and isinstance(value, dict)) or _SURROGATE.search(raw):
            value, problem = parse_object(raw.encode("latin-1"))
        return RawRecord(self.n_values, place, value, problem), end

    def _damage(self, at: int, what: str, *, is_cut: bool = False) -> ValueError:
        """Say what is wrong with the next record, and where it is."""
        window = self._window
        if len(window.text) - at > MAX_RECORD:
            what = f"it is longer than {MAX_RECORD >> 20} MiB"
        elif is_cut or at == len(window.text):
            what = "the file is cut off, or a quote or a bracket is left open"
        return ValueError(
            f"{self._name}: record {self.n_values + 1}, which begins at byte "
            f"{window.start + at}, cannot be read ({what}), nor can any behind it; "
            "fetch or mend the file"
        )


def _is_at_end(error: json.JSONDecodeError, text: str) -> bool:
    """Tell whether a value may be cut off by the window's end and not be damaged."""
    is_text = error.msg.startswith("Unterminated string")
    return is_text or error.pos >= len(text.rstrip()) - _PARTIAL
