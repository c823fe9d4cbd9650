"""What a stage will need, said before it is done, and held against what it took.

`--dry-run` writes a forecast into the run directory; the end of the real stage prints
both. Only what is left to do is forecast: a stage that was killed needs less.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extract.run.directory import RunDir
from extract.run.files import write_json_atomic

N_PROBED = 10  # rows that are really done, to time the others by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is left of a stage; None where a number does not apply or is not known.

    Attributes:
      n_rows: rows it will write.
      n_requests: texts a model has to write, retries not included.
      n_prompt_tokens: that it reads.
      n_new_tokens: that it writes, at most.
      gpu_bytes: weights, caches and logits of the largest batch, on the device that
        the model is loaded on (ordinary memory without a GPU).
      memory_bytes: of what a stage without such a model holds at once.
      disk_bytes: of what it writes, at most.
      seconds: of wall time, loading included.
      basis: what the time rests on, or why there is none.
    """

    stage: str
    n_rows: int | None = None
    n_requests: int | None = None
    n_prompt_tokens: int | None = None
    n_new_tokens: int | None = None
    gpu_bytes: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    seconds: float | None = None
    basis: str

    def as_text(self) -> str:
        """Return the forecast in lines."""
        lines = [f"{self.stage}: a dry run, nothing is written but this forecast"]
        for name, words, show in _SHOWN:
            value = getattr(self, name)
            if value is not None:
                lines.append(f"  {words:<24}{show(value)}")
        return "\n".join([*lines, f"  {self.basis}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """What is there of a stage: counted before and after, the difference was done."""

    n_rows: int = 0
    n_requests: int = 0
    n_prompt_tokens: int = 0
    n_new_tokens: int = 0
    disk_bytes: int = 0

    def since(self, before: "Tally") -> "Tally":
        """Return what came after `before` was counted."""
        names = [field.name for field in dataclasses.fields(self)]
        return Tally(**{n: getattr(self, n) - getattr(before, n) for n in names})


def bytes_in_words(n: int) -> str:
    """Return a size with its unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"


def seconds_in_words(seconds: float) -> str:
    """Return a time with its unit."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("n_rows", "rows", lambda n: f"{n:,}"),
    ("n_requests", "requests", lambda n: f"{n:,}"),
    ("n_prompt_tokens", "prompt tokens", lambda n: f"{n:,}"),
    ("n_new_tokens", "new tokens, at most", lambda n: f"{n:,}"),
    ("gpu_bytes", "memory of the model", bytes_in_words),
    ("memory_bytes", "memory", bytes_in_words),
    ("disk_bytes", "disk", bytes_in_words),
    ("seconds", "time", seconds_in_words),
)


def forecast_file(run: RunDir, stage: str) -> Path:
    """Return where a stage's forecast lies."""
    return run.path / "forecasts" / f"{stage}.json"


def keep_forecast(run: RunDir, forecast: Forecast) -> None:
    """Write a forecast down, for the end of the real stage."""
    write_json_atomic(forecast_file(run, forecast.stage), dataclasses.asdict(forecast))


def kept_forecast(run: RunDir, stage: str) -> Forecast | None:
    """Return the forecast of a dry run, or None if there was none."""
    path = forecast_file(run, stage)
    if not path.exists():
        return None
    try:
        return Forecast(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None  # of another version, or damaged: as if there was none


class Watch:
    """Times a stage, and says after its first rows how long all will take."""

    def __init__(
        self,
        update: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap what is told (done, total); the clock is in seconds."""
        self._update = update
        self._clock = clock
        self._began = clock()
        self._first: tuple[int, float] | None = None  # rows done, when
        self.promised: float | None = None

    def __call__(self, done: int, total: int) -> None:
        """Pass on; extrapolate once from the rows that follow the first word.

        What came before it (loading, compiling) is not paid again for every row.
        """
        if self._first is None:
            self._first = (done, self._clock())
        before, started = self._first
        if self.promised is None and done - before >= N_PROBED:
            per_row = (self._clock() - started) / (done - before)
            self.promised = started - self._began + per_row * (total - before)
        self._update(done, total)


def compare(
    stage: str,
    forecast: Forecast | None,
    promised: float | None,
    done: Tally,
    seconds: float,
) -> str:
    """Return one line: what a stage took, beside what was predicted."""
    took = {
        "n_rows": (done.n_rows, "rows"),
        "n_requests": (done.n_requests, "requests"),
        "n_prompt_tokens": (done.n_prompt_tokens, "prompt tokens"),
        "n_new_tokens": (done.n_new_tokens, "new tokens"),
        "disk_bytes": (done.disk_bytes, "disk"),
        "seconds": (seconds, "time"),
    }
    shows = {name: show for name, _, show in _SHOWN}
    parts = []
    for name, (value, words) in took.items():
        predicted = getattr(forecast, name) if forecast is not None else None
        if name == "seconds" and predicted is None:
            predicted = promised
        if predicted is not None:
            parts.append(f"{words} {shows[name](predicted)} → {shows[name](value)}")
        elif value:
            parts.append(f"{words} {shows[name](value)}")
    by = "a dry run" if forecast is not None else "its first rows, for time"
    known = forecast is not None or promised is not None
    head = f"predicted (by {by}) → actual" if known else "not predicted, took"
    return f"{stage}: {head}: {', '.join(parts)}"
