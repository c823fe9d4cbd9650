"""What the user sees while a verb runs: bars on a terminal, plain lines elsewhere."""

import contextlib
import dataclasses
import errno
import gc
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar, cast

from beatrice.extract.forks import ForkLock

# What TensorStore appends to its messages, up to a page long.
_DUMPS = re.compile(
    r"\s*\[(os_error_code|tensorstore_spec|source locations|transform)=.*", re.DOTALL
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Errors of Torch, JAX, threads and processes that are out of memory.
_NO_MEMORY = re.compile(
    "out of memory|can't allocate memory|can't start new thread|terminated abruptly",
    re.IGNORECASE,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_IN_WORDS = tuple(map(os.strerror, _FULL))


def is_of_machine(error: Exception) -> bool:
    """Return whether the machine caused an error: no memory, or no home folder."""
    is_full = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    return bool(is_full) or _is_homeless(error)


def _is_homeless(error: Exception) -> bool:
    return str(error) == "Could not determine home directory."


def in_one_sentence(error: Exception) -> str:
    """Return the message on an expected failure: what, where, what to do."""
    message = " ".join(_DUMPS.sub("", str(error)).split())
    number = error.errno if isinstance(error, OSError) else None
    if _is_homeless(error):
        message = "this user has no home folder; set HOME to a writable folder"
    elif isinstance(error, MemoryError) or is_of_machine(error):
        message = (
            f"not enough memory ({message or 'none is left'}); ask for less at once"
        )
    elif number in _FULL or any(words in message for words in _FULL_IN_WORDS):
        message = (
            f"a file cannot grow, as on a full disk ({message}); make room and run the "
            "same command again: it continues"
        )
    elif number is not None and isinstance(error, OSError):
        # Missing paths have a name, unless the current folder itself was removed.
        is_gone = error.strerror == os.strerror(errno.ENOENT)
        nameless = "the current folder" if is_gone else "a file"
        names = " and ".join(str(n) for n in (error.filename, error.filename2) if n)
        message = (
            f"{names or nameless}: {error.strerror}; check that it exists and may be "
            "read and written"
        )
    return printable(message)


def printable(text: str) -> str:
    """Escape the characters of a text that a terminal would obey or cannot show."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def shell_line(verb: str, path: Path, *words: str) -> str:
    """Return a command line of this program, with paths quoted for the shell."""
    return shlex.join(["beatrice", verb, str(path), *words])


Update = Callable[[int, int], None]  # (done, total)


def update_for_part(update: Update, index: int, n_parts: int) -> Update:
    """Return an update for one of `n_parts` parts of a stage, of equal weight."""
    return lambda done, total: update(index * total + done, n_parts * total)


def in_words(seconds: float) -> str:
    """Return a duration in words: "40 s", "9 min", "2 h 10 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


@dataclasses.dataclass
class Estimate:
    """How far a stage is, which never decreases, and how many seconds are left.

    Speed is measured from the first second of calls on: what came before was the work
    of another process, or compiling and loading.
    """

    clock: Callable[[], float] = time.monotonic
    share: float = 0.0
    _began: float | None = None
    _first: tuple[float, float] = (0.0, 0.0)  # time and share

    def add(self, done: int, total: int) -> None:
        """Update the share with `done` of `total`."""
        self.share = max(self.share, min(done / total, 1.0) if total else 0.0)
        now = self.clock()
        self._began = now if self._began is None else self._began
        if now - self._began < 1.0:
            self._first = now, self.share

    @property
    def left(self) -> float | None:
        """Seconds left at the speed so far; None if that is not known yet."""
        began, first = self._first
        gained, elapsed = self.share - first, self.clock() - began
        if not gained or elapsed < 1.0:  # a batch is counted all at once
            return None
        return elapsed * (1 - self.share) / gained


class Progress:
    """Bars on a terminal, plain lines otherwise, all on stderr; none with --quiet."""

    is_quiet: ClassVar[bool] = False

    def note(self, text: str) -> None:
        """Print one line for the user."""
        # It is None if the process was started without it; `print` would use stdout.
        if not self.is_quiet and sys.stderr is not None:
            print(printable(text), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """Show one stage; yields a function to call with (done, total)."""
        began = time.monotonic()
        is_terminal = getattr(sys.stderr, "isatty", bool)()  # loggers may lack it
        if is_terminal and not self.is_quiet:
            with _bar(name) as update:
                yield update
        else:
            yield self.plain_lines(name)
        self.note(f"{name}: done in {in_words(time.monotonic() - began)}")

    def plain_lines(
        self, name: str, clock: Callable[[], float] = time.monotonic
    ) -> Update:
        """Return an update that prints a line after 10, 30, 90, … s, later hourly."""
        estimate, began, due = Estimate(clock), clock(), 10.0

        def update(done: int, total: int) -> None:
            nonlocal due
            estimate.add(done, total)
            left, elapsed = estimate.left, clock() - began
            if elapsed >= due and left:
                due = max(min(3 * due, due + 3600), elapsed)
                self.note(f"{name}: {estimate.share:.0%}, about {in_words(left)} left")

        return update


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Update]:
    from rich import console, progress

    with progress.Progress(
        progress.TextColumn("{task.description:<10}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[left]}"),
        console=console.Console(stderr=True),
        transient=True,
    ) as bars:
        task, estimate = bars.add_task(name, total=1.0, left=""), Estimate()

        def update(done: int, total: int) -> None:
            estimate.add(done, total)
            left = estimate.left
            words = "" if left is None else f"about {in_words(left)} left"
            bars.update(task, completed=estimate.share, left=words)

        yield update


def table_row(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_head(names: Sequence[str]) -> str:
    """Return the two lines above a Markdown table's rows."""
    return f"{table_row(names)}\n{table_row(['---'] * len(names))}"


def silence_transformers() -> None:
    """Silence Transformers for good, in a process that runs a verb."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Import libraries faster by a quarter, in a process with a single task.

    SciPy, which Transformers imports for object detection if it is installed, is hidden
    in this block. The garbage collector, which would scan hundreds of thousands of
    lasting objects again and again, is off in the block and skips them afterwards.
    """
    is_absent = "scipy" not in sys.modules
    if is_absent:
        sys.modules["scipy"] = cast(ModuleType, None)  # Python's own way to hide one
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if is_absent:
            del sys.modules["scipy"]


_SILENCE = ForkLock()
_loud: list[tuple[bool, int]] = []  # of each block that silences: bars and verbosity


@contextlib.contextmanager
def transformers_silenced() -> Iterator[None]:
    """Silence Transformers and its progress bars in this block, for library calls."""
    from transformers.utils import logging

    with _SILENCE:
        _loud.append((logging.is_progress_bar_enabled(), logging.get_verbosity()))
        silence_transformers()
    try:
        yield
    finally:
        with _SILENCE:
            (was_shown, verbosity), _ = _loud[0], _loud.pop()
            if not _loud:  # the last of the threads that are in such a block
                logging.set_verbosity(verbosity)
                if was_shown:
                    logging.enable_progress_bar()
