"""Running controllers on many questions at once, so that the model works in batches.

All questions are advanced until each waits for a call; the kind of call that most wait
for is served, in batches, and so on: all first drafts, then all first searches. Every
call that was made is kept in a journal, with what it gave. A run that was killed reads
it there, plans the batches of the interrupted wave over the same calls as before, and
leaves out those that are there: its numbers are those of a run that was not killed.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from beatrice.extract.run.files import JsonLines
from beatrice.pgir.controllers.calls import VALUES, Call, Cost, Done, Plan

GROUP_SIZE = 256  # questions that go together; what is read of them is in memory


class Failed(msgspec.Struct, frozen=True):
    """A call that could not be made; its question is tried again by the next run."""

    reason: str


class Service(Protocol):
    """Serves the calls of one kind."""

    def batches(
        self, calls: Sequence[Call], done: Collection[int]
    ) -> Iterator[list[tuple[int, Any]]]:
        """Yield (place in `calls`, value or `Failed`) of each batch.

        Batches are planned over all calls; one is skipped if all of it is done.
        """

    def cost(self, call: Call, value: Any) -> Cost:
        """Return what a call costs, seconds apart."""


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it is kept; `check` is of the rest."""

    call: Call
    wave: str
    seconds: float
    value: Any
    check: str = ""

    def digest(self) -> str:
        content = msgspec.json.encode([self.call, self.wave, self.seconds, self.value])
        return hashlib.sha256(content).hexdigest()[:16]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a call gave, in which wave, and its share of the batch's seconds."""

    value: Any
    wave: str
    seconds: float


class Journal:
    """Every call that was made under one identity, in memory and in a file.

    Args:
      path: of the file, JSON lines; the first holds the identity. One of another
        identity is begun again, and so is it from the first damaged line on. None
        keeps calls in memory alone.
      key: of everything that values depend on beside the calls.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        """Open the file and read what is there."""
        self._entries: dict[Call, Entry] = {}
        self._waves: dict[str, list[Call]] = {}
        self._file: JsonLines | None = None
        if path is None:
            return
        head = msgspec.json.encode({"journal": key}).decode()
        n_good = self._read(path, head)
        if n_good is None:
            path.unlink(missing_ok=True)
        else:
            with path.open("r+b") as stream:
                stream.truncate(n_good)
        self._file = JsonLines.open(path)
        if n_good is None:
            self._file.append([head])

    def _read(self, path: Path, head: str) -> int | None:
        """Take the lines in; return how many bytes are good, None if not the head."""
        if not path.exists():
            return None
        with path.open("rb") as lines:
            if lines.readline() != head.encode() + b"\n":
                return None
            n_good = lines.tell()
            for raw in lines:
                try:
                    line = msgspec.json.decode(raw, type=_Line)
                    value = msgspec.convert(line.value, VALUES[line.call.kind])
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    break
                if line.digest() != line.check or not raw.endswith(b"\n"):
                    break
                self._take(line, value)
                n_good += len(raw)
        return n_good

    def _take(self, line: _Line, value: Any) -> None:
        self._entries[line.call] = Entry(
            value=value, wave=line.wave, seconds=line.seconds
        )
        self._waves.setdefault(line.wave, []).append(line.call)

    def find(self, call: Call) -> Entry | None:
        """Return what a call gave, or None."""
        return self._entries.get(call)

    def value(self, call: Call) -> Any:
        """Return what a call gave; it was made."""
        return self._entries[call].value

    def beside(self, call: Call) -> list[Call]:
        """Return the calls of a call's wave, in the order in which they were kept."""
        return self._waves[self._entries[call].wave]

    def add(
        self, wave: str, calls: Sequence[Call], values: Sequence[Any], seconds: float
    ) -> None:
        """Keep what a batch gave; `seconds` is each call's share of its time."""
        lines = []
        for call, value in zip(calls, values, strict=True):
            plain = msgspec.to_builtins(value)
            line = _Line(call=call, wave=wave, seconds=round(seconds, 6), value=plain)
            line = msgspec.structs.replace(line, check=line.digest())
            self._take(line, value)
            lines.append(msgspec.json.encode(line).decode())
        if self._file is not None:
            self._file.append(lines)


class Waves:
    """Runs controllers.

    Args:
      services: by kind of call.
      journal: of the calls.
      group_size: questions that go together; 1 is one question at a time.
    """

    def __init__(
        self,
        services: dict[str, Service],
        journal: Journal,
        group_size: int = GROUP_SIZE,
    ) -> None:
        """Take what serves calls, and where they are kept."""
        self.services = services
        self.journal = journal
        self.failed: dict[Call, str] = {}  # what could not be done, and why
        self._group_size = group_size

    def run(
        self,
        label: str,
        plans: Sequence[Plan[Any]],
        on_done: Callable[[int], None] = lambda n: None,
    ) -> list[Done | None]:
        """Run a controller on questions.

        Args:
          label: of this run, its own; it names the waves.
          plans: one per question.
          on_done: told how many questions are done.

        Returns:
          What each returned, and its cost; None where a call failed (see `failed`).
        """
        found: list[Done | None] = []
        for first in range(0, len(plans), self._group_size):
            group = plans[first : first + self._group_size]
            found += self._run_group(f"{label}/{first}", group)
            on_done(len(found))
        return found

    def _run_group(self, label: str, plans: Sequence[Plan[Any]]) -> list[Done | None]:
        found: list[Done | None] = [None] * len(plans)
        costs = [Cost()] * len(plans)
        waiting: dict[int, Call] = {}

        def advance(i: int, value: Any) -> None:
            try:
                waiting[i] = plans[i].send(value)
            except StopIteration as end:
                found[i] = Done(end.value, costs[i])

        for i in range(len(plans)):
            advance(i, None)
        number = 0
        while waiting:
            kinds = [call.kind for call in waiting.values()]
            kind = max(sorted(set(kinds)), key=kinds.count)
            served = [i for i in sorted(waiting) if waiting[i].kind == kind]
            self._serve(f"{label}/{number}/{kind}", kind, [waiting[i] for i in served])
            for i in served:
                call = waiting.pop(i)
                entry = self.journal.find(call)
                if entry is None:
                    plans[i].close()
                    continue
                cost = self.services[kind].cost(call, entry.value)
                costs[i] = costs[i].plus(cost._replace(seconds=entry.seconds))
                advance(i, entry.value)
            number += 1
        return found

    def _serve(self, wave: str, kind: str, calls: Sequence[Call]) -> None:
        """Make those calls that were not made in another wave."""
        entries = {call: self.journal.find(call) for call in calls}
        own = [c for c, entry in entries.items() if entry is None or entry.wave == wave]
        done = {place for place, call in enumerate(own) if entries[call] is not None}
        if len(done) == len(own):
            return
        batches = self.services[kind].batches(own, done)
        began = time.perf_counter()
        with contextlib.closing(batches):
            for batch in batches:
                seconds = (time.perf_counter() - began) / len(batch)
                fresh = [(own[i], value) for i, value in batch if i not in done]
                bad = {c: v.reason for c, v in fresh if isinstance(v, Failed)}
                self.failed |= bad
                good = [(c, v) for c, v in fresh if c not in bad]
                calls_of, values = [c for c, _ in good], [v for _, v in good]
                self.journal.add(wave, calls_of, values, seconds)
                began = time.perf_counter()
