"""The values of a JSON array one by one, in memory that does not grow with it.

HotpotQA is one array of half a gigabyte. Python's own decoder reads one value from a
window of the file and says where it ends; a value that is no JSON is refused alone, and
reading goes on at the next record. An event parser cannot do that: ijson stops at the
first wrong byte. Of records of 6 kB (HotpotQA's layout, 50 MB, one core) this file
reads 28,000 a second, ijson's C backend 32,000.

The window holds a character for each byte (Latin-1), so that positions in it are those
in the file; what is not ASCII is decoded again as the UTF-8 that it is.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from extract.datasets.fields import kind_of
from extract.datasets.files.kinds import Readable, end_of_value, top_keys

CHUNK = 1 << 20
MAX_RECORD = 32 << 20  # bytes; the largest published records (NQ pages) are below 5 MB
_N_KEYS = 3  # of a record's first keys, by which the next one is known
_PARTIAL = 16  # characters; an escape or a literal may be cut by the window's end
_SPACE = re.compile(r"\s*+", re.ASCII)
_SURROGATE = re.compile(r"\\u[dD]")  # a lone one is no JSON, and Python reads it
_PYTHON = re.compile(r"\s*\{\s*'")  # single quotes around the first key
_FIRST_KEY = re.compile(r'\{\s*+("(?:[^"\\]++|\\.)*+")\s*+:', re.ASCII | re.DOTALL)
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


class ArrayScanner:
    """Walks over the values of an array, or over values with no array around."""

    def __init__(self, window: Window, name: str, *, in_array: bool = True) -> None:
        """Begin where `walk` is told; `name` is for messages."""
        self._window, self._name, self._in_array = window, name, in_array
        self._first_key = ""  # of the first whole record, as it is written
        self._keys: set[str] = set()
        self.end = 0  # after the walk: behind the closing bracket, in the window
        self.n_values = 0

    def walk(self, at: int) -> Iterator[RawRecord]:
        """Yield the values from position `at`, behind the opening bracket.

        Raises:
          ValueError: the array has no end, or something stands between its values
            that is no comma.
        """
        needs_comma = False
        while True:
            at = self._window.skip_space(at)
            byte = self._window.text[at : at + 1]
            if not byte and not self._in_array:
                return
            if byte == "]" and self._in_array:
                if self.n_values and not needs_comma:
                    yield self._absent(at)
                self.end = at + 1
                return
            if byte == "," and self._in_array:
                if not needs_comma:
                    yield self._absent(at)
                needs_comma, at = False, at + 1
                continue
            if not byte or (needs_comma and self._in_array):
                raise self._no_comma(at)
            record, at = self._value(at)
            needs_comma = True
            yield record

    def _record(
        self, at: int, value: dict[str, Any] | None, problem: str | None = None
    ) -> RawRecord:
        """Count a value that begins at `at`."""
        self.n_values += 1
        where = f"byte {self._window.start + at}"
        return RawRecord(self.n_values, where, value, problem)

    def _absent(self, at: int) -> RawRecord:
        return self._record(at, None, "nothing stands before this comma or bracket")

    def _no_comma(self, at: int) -> ValueError:
        """Say that the array is cut off, or what stands where a comma should."""
        where = f"after record {self.n_values} (byte {self._window.start + at})"
        if at >= len(self._window.text):
            return ValueError(
                f"{self._name}: the JSON array is cut off {where}; fetch the file again"
            )
        found = self._window.text[at : at + 12].encode("latin-1")
        return ValueError(
            f"{self._name}: expected a comma or the end of the array {where}, found "
            f"{found.decode('utf-8', 'replace')!r}; the file is no valid JSON array"
        )

    def _value(self, at: int) -> tuple[RawRecord, int]:
        """Return the value at `at`, and the position behind it."""
        window = self._window
        while True:
            end = None
            try:
                value, end = _decode(window.text, at)
                may_go_on = end == len(window.text)  # a number has no end of its own
            except json.JSONDecodeError as error:
                may_go_on = _is_at_end(error, window.text)
            except (ValueError, RecursionError):
                may_go_on = False
            if not may_go_on or not window.widen(at):
                break
            at = 0
        if end is None:
            return self._damaged(at)
        raw = window.text[at:end]
        if len(raw) > MAX_RECORD:
            return self._record(at, None, f"longer than {MAX_RECORD >> 20} MiB"), end
        problem = None
        is_plain = raw.isascii() and not _SURROGATE.search(raw)
        if not (is_plain and isinstance(value, dict)):
            value, problem = parse_object(raw.encode("latin-1"))
        if not self._keys and value:
            self._first_key = _FIRST_KEY.match(raw)[1]
            self._keys = set(list(value)[:_N_KEYS])
        return self._record(at, value, problem), end

    def _damaged(self, at: int) -> tuple[RawRecord, int]:
        """Refuse what is no JSON; return it, and the position where reading goes on.

        That is the next record, if one begins before the brackets are balanced: a quote
        too many or a brace too few hides where the damaged one ends.

        Raises:
          ValueError: it has no end, and no record follows.
        """
        window = self._window
        if window.advance(at):  # the next record should be in the window as a whole
            at = 0
        while True:
            stop = end_of_value(window.text, at)
            resume = self._next_record(at, stop or len(window.text))
            if resume is not None or stop is not None or not window.widen(at):
                break
            at = 0
        if resume is None and stop is None:
            what = "never ends, the file is cut off"
            if len(window.text) - at > MAX_RECORD:
                what = f"is longer than {MAX_RECORD >> 20} MiB"
            raise ValueError(
                f"{self._name}: record {self.n_values + 1}, which begins at byte "
                f"{window.start + at}, {what}; fetch the file again"
            )
        problem = "not valid JSON (a quote or a brace is left open)"
        if stop is not None:
            problem = parse_object(window.text[at:stop].encode("latin-1"))[1]
        return self._record(at, None, problem), resume or stop or 0

    def _next_record(self, at: int, stop: int) -> int | None:
        """Return the position of the comma before the next whole record, or None.

        A record is known by the keys that it begins with, which objects inside records
        do not share; where none was read yet, by those of the damaged one.
        """
        text, first, keys = self._window.text, self._first_key, self._keys
        if not keys:
            found = _FIRST_KEY.match(text, at)
            if found is None:
                return None
            first, keys = found[1], set(top_keys(text, at))
        opening = re.compile(r",\s*+(?=\{\s*+" + re.escape(first) + r"\s*+:)", re.ASCII)
        for comma in opening.finditer(text, at, stop):
            try:
                value, _ = _decode(text, comma.end())
            except (ValueError, RecursionError):
                continue
            if keys <= value.keys():
                return comma.start()
        return None


def _is_at_end(error: json.JSONDecodeError, text: str) -> bool:
    """Tell whether a value may be cut off by the window's end and not be damaged."""
    is_text = error.msg.startswith("Unterminated string")
    return is_text or error.pos >= len(text.rstrip()) - _PARTIAL
