"""What judging rivals would take: sequences and tokens counted, readings timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.baselines.detector import Detector, Evidence
from extract.run.contents import samples_file
from extract.run.stages import Forecast

# Answers that each group of readings is timed on, of all lengths.
_N_TIMED = 8
_N_SAMPLES = 10  # of `beatrice sample`, where none was drawn yet
# Of P(True): its words around question, answer and ideas, by the tokenizer of Gemma.
_TRUTH_TOKENS = 35


def forecast_of(
    left: Mapping[Evidence, Sequence[Detector]],
    lacks: Mapping[str, str],
    unread: Callable[[Evidence, Sequence[Detector]], Mapping[str, np.ndarray]],
    reading_of: Callable[[Evidence], Any],
) -> Forecast:
    """Return what is left to do; every group of readings is timed on a few answers.

    Args:
      left: by the evidence of each setting, the detectors that have no scores yet.
      lacks: why some cannot be judged, by name.
      unread: gives by name the rows whose readings some detectors still want.
      reading_of: gives what has `benchmarks.baselines.readings.Reading.some`.
    """
    lines, n_read, n_forwards, n_new = [], 0, 0, 0
    for evidence, detectors in left.items():
        setting = evidence.rows.setting
        lines.append(f"{setting}: {len(detectors)} detectors left of those asked for")
        wanted = unread(evidence, detectors)
        rows = {name: where for name, where in wanted.items() if len(where)}
        counts = _sequences(evidence, rows)
        n_forwards += sum(len(own) for own in counts.values())
        n_read += sum(sum(own) for own in counts.values())
        lines += _timed(evidence, rows, reading_of(evidence))
        if any("samples" in one.needs for one in detectors):
            n_new += _undrawn(evidence)
    lines.insert(0, f"{n_forwards:,} sequences are read, which write nothing")
    lines += [f"{name} {reason}" for name, reason in lacks.items()]
    lines.append(
        "seconds are those of this machine now, of reading alone; fitting and scoring "
        f"come on top. Timed on {_N_TIMED} answers of each setting"
    )
    return Forecast(
        stage="baselines",
        n_prompt_tokens=n_read,
        n_new_tokens=n_new,
        basis="\n  ".join(lines),
    )


def _sequences(
    evidence: Evidence, rows: Mapping[str, np.ndarray]
) -> dict[str, list[int]]:
    """Return the lengths of all sequences that are read, by kind."""
    own = [len(a.prompt_ids) + len(a.token_ids) for a in evidence.answers]
    first = sorted({int(i) for n, where in rows.items() for i in where if _is_own(n)})
    found = {"answers": [own[i] for i in first]}
    # The other passages are about as long as the question's own.
    found["swapped"] = [own[i] for i in rows.get("lumina_mmd", ())]
    found["truth"] = [
        _TRUTH_TOKENS
        + 2 * len(evidence.answers[i].token_ids)
        + len(evidence.examples[i].question) // 4
        + sum(len(s.token_ids or ()) for s in evidence.samples[i])
        for i in rows.get("p_true", ())
    ]
    found["samples"] = [
        len(evidence.answers[i].prompt_ids) + len(ids)
        for i in rows.get("sample_states", ())
        for ids in {s.token_ids for s in evidence.samples[i] if s.token_ids}
    ]
    return found


def _is_own(name: str) -> bool:
    return name not in ("p_true", "sample_states")


def _timed(
    evidence: Evidence, rows: Mapping[str, np.ndarray], reading: Any
) -> list[str]:
    """Say what each group of readings takes alone, and all that is left together."""
    if not rows:
        return []
    from extract.readings.reader import PARTS

    groups = [part.names for part in PARTS]
    groups += [("p_true",), ("sample_states",)]
    asked = [tuple(n for n in names if n in rows) for names in groups]
    lines = []
    places = _of_all_lengths(evidence, next(iter(rows.values())))
    reading.some(places[:1], list(rows))  # what is loaded or compiled once
    for names in (*filter(None, asked), tuple(rows)):
        n_left = max(len(rows[name]) for name in names)
        began = time.monotonic()
        reading.some(places, list(names))
        each = (time.monotonic() - began) / len(places)
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        if names == tuple(rows):
            what = "all of them, read together"
        spent = f"{each * 1000:.0f} s for 1,000 answers"
        lines.append(f"  {what}: {spent}, {each * n_left / 60:.1f} min for {n_left}")
    return lines


def _of_all_lengths(evidence: Evidence, rows: np.ndarray) -> list[int]:
    """Return a few rows, evenly spaced by the length of what is read."""
    lengths = [
        len(evidence.answers[i].prompt_ids) + 8 * len(evidence.answers[i].token_ids)
        for i in rows
    ]
    ordered = rows[np.argsort(lengths, kind="stable")]
    middles = (np.arange(_N_TIMED) + 0.5) / _N_TIMED * len(ordered)
    return sorted({int(ordered[int(at)]) for at in middles})


def _undrawn(evidence: Evidence) -> int:
    """Return how many tokens drawing the answers would take, at most; 0 if drawn."""
    if samples_file(evidence.run).exists():
        return 0
    from extract.generate.requests import answer_config

    most = answer_config(evidence.run, is_recorded=False).generation.max_new_tokens
    return len(evidence.rows.ids) * _N_SAMPLES * most
