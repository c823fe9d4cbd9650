"""The command line, and the public Python names.

Everything heavy is imported inside functions, so that `--help` is instant and a user
of `jaxprobe` never loads Torch.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from benchmarks.presets import RunConfig
    from extract.rundir import RunDir
    from pgir.scoring import Scorer

__all__ = ["load", "main"]

VERBS = (
    "world answer label extract verify sweep train select calibrate evaluate control "
    "report demo score"
).split()


def load(path: str | Path, *, model: str | Path | None = None) -> "Scorer":
    """Return the scorer of a finished run.

    Args:
      path: a run directory whose detector is calibrated.
      model: where the run's backbone lies, if it has moved.

    Returns:
      An object whose `score(question, answer, context=None)` is the calibrated
      probability that the answer is right.

    Raises:
      ValueError: the run has no detector yet, or the backbone is another one.
    """
    from pgir.scoring import Scorer

    return Scorer.load(Path(path), model=None if model is None else str(model))


class _Verbs(click.Group):
    """Lists verbs in data-flow order; a user's mistake is one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the data."""
        return [verb for verb in VERBS if verb in self.commands]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; expected failures become one sentence and exit code 1."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            raise click.ClickException(" ".join(str(error).split())) from error


class _Progress:
    """Bars with rates on a terminal, plain lines otherwise, all on stderr."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Print one line for the person who waits."""
        click.echo(text, err=True)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Show one stage; yields what is told (done, total)."""
        began = time.monotonic()
        if sys.stderr.isatty():
            with self._bar(name) as update:
                yield update
        else:
            yield _plain_updates(name, began)
        self.seconds[name] = time.monotonic() - began
        self.note(f"{name}: done in {self.seconds[name]:.1f} s")

    @contextlib.contextmanager
    def _bar(self, name: str) -> Iterator[Callable[[int, int], None]]:
        from rich import console, progress

        with progress.Progress(
            progress.TextColumn("{task.description:<24}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.speed:.3g}/s" if False else ""),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console.Console(stderr=True),
            transient=True,
        ) as bars:
            task = bars.add_task(name, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)


def _plain_updates(name: str, began: float) -> Callable[[int, int], None]:
    """Return an update that prints a line with the rate every ten seconds."""
    last = began

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 10:
            last = now
            rate = done / max(now - began, 1e-9)
            click.echo(f"{name}: {done}/{total}, {rate:.3g}/s", err=True)

    return update
