"""What a person sees while a verb runs: bars on a terminal, plain lines elsewhere."""

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

# What TensorStore adds to its messages, each a page long.
_DUMPS = re.compile(
    r"\s*\[(os_error_code|tensorstore_spec|source locations|transform)=.*", re.DOTALL
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_IN_WORDS = tuple(map(os.strerror, _FULL))


def in_one_sentence(error: Exception) -> str:
    """Return what a person is told of an expected failure: what, where, what to do."""
    message = " ".join(_DUMPS.sub("", str(error)).split())
    # A path or a text given by a user may hold what no terminal can show.
    message = message.encode("utf-8", "backslashreplace").decode()
    if isinstance(error, MemoryError):
        return f"not enough memory ({message or 'none is left'}); ask for less at once"
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL or any(words in message for words in _FULL_IN_WORDS):
        return (
            f"a file cannot grow, as on a full disk ({message}); make room and run the "
            "same line again: it continues"
        )
    if number is not None and isinstance(error, OSError):
        names = " and ".join(str(n) for n in (error.filename, error.filename2) if n)
        shown = f"{names or 'a file'}: {error.strerror}"
        shown = shown.encode("utf-8", "backslashreplace").decode()
        return f"{shown}; look whether it is there and may be read and written"
    return message


Update = Callable[[int, int], None]  # (done, total)


class Progress:
    """Bars with rates on a terminal, plain lines otherwise, all on stderr."""

    def note(self, text: str) -> None:
        """Print one line for the person who waits."""
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """Show one stage; yields what is told (done, total)."""
        began = time.monotonic()
        if sys.stderr.isatty():
            with _bar(name) as update:
                yield update
        else:
            yield _plain_lines(name)
        self.note(f"{name}: done in {time.monotonic() - began:.1f} s")


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Update]:
    """Show a bar with done, total, rate and time left."""
    from rich import console, progress

    with progress.Progress(
        progress.TextColumn("{task.description:<10}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
        transient=True,
    ) as bars:
        task = bars.add_task(name, total=None, rate="")
        rate_of = rates(time.monotonic)

        def update(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, rate=rate_of(done))

        yield update


def rates(clock: Callable[[], float]) -> Callable[[int], str]:
    """Return what says how many a second were done, given the count; "" at first.

    A stage counts anew for each setting: the earlier one's time is not this one's.
    """
    began, before = clock(), 0

    def rate_of(done: int) -> str:
        nonlocal began, before
        now = clock()
        if done < before:
            began = now
        before = done
        return f"{done / (now - began):.3g}/s" if now > began else ""

    return rate_of


def _plain_lines(name: str) -> Update:
    """Return an update that prints a line with the rate every ten seconds."""
    rate_of, last = rates(time.monotonic), time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        rate, now = rate_of(done), time.monotonic()
        if now - last >= 10:
            last = now
            counted = (f"{name}: {done} of {total}", rate)
            print(", ".join(filter(None, counted)), file=sys.stderr, flush=True)

    return update


def table_row(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_head(names: Sequence[str]) -> str:
    """Return the two lines above a Markdown table's rows."""
    return f"{table_row(names)}\n{table_row(['---'] * len(names))}"


def quiet() -> None:
    """Silence what other libraries print while they load."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
