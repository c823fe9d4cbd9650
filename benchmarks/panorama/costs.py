"""What every rival detector is and costs: the stage's record of it, as a table."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.results.tables import number
from extract.records import IN_DOMAIN, Setting
from extract.run.directory import RunDir
from extract.run.files import read_json
from extract.run.results import SETTING_LABELS, ResultRow, ResultTable
from extract.run.stages import bytes_in_words

HEADS = (
    "Detector",
    "AUROC",
    "Seconds a question",
    "Peak memory",
    "Forwards more",
    "Tokens more",
    "Needs",
    "Differs from the published one",
)
NEEDS = {
    "samples": "drawn answers",
    "entailment": "an NLI model",
    "second_prompt": "a second prompt",
    "swapped": "other passages",
    "encoder": "a text encoder",
    "labels": "training labels",
}


class Judged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a detector is, and what it costs a question.

    Attributes:
      needs: beyond the pass that gave the answer, see `detector.Need`.
      seconds: of scoring, its share of the readings, and of drawing its samples;
        fitting included, which is paid once, over all answers of the setting. None
        where its samples were drawn before drawing was timed.
      peak_bytes: most memory of the process while it was read and scored, with all
        that the process holds, such as the backbone; of the host, not of a device.
        None in records from before it was measured.
      n_forwards: beside the pass that gave the answer, none of which generates.
      n_new_tokens: generated beside the answer, mean.
      n_rows: answers that it was asked about.
      reason: why it gives no score at all; empty where it does.
    """

    name: str
    title: str
    setting: Setting
    source: str
    variant: str
    needs: tuple[str, ...]
    is_trained: bool
    seconds: float | None
    peak_bytes: int | None = None
    n_forwards: int
    n_new_tokens: float
    n_rows: int
    reason: str = ""


def judged_file(run: RunDir) -> Path:
    """Return where what the detectors are and cost is written, for the report."""
    return run.path / "baselines" / "detectors.json"


def read_judged(run: RunDir) -> list[Judged]:
    """Return what the rivals of a run are and cost.

    Raises:
      ValueError: it is missing, or not as it was written.
    """
    file = judged_file(run)
    return read_json(file, list[Judged], "run `beatrice baselines` again")


def titles_of(judged: Iterable[Judged]) -> dict[str, str]:
    """Return the printed names of detectors by those in the rows."""
    return {one.name: one.title for one in judged}


def measured(
    judged: Sequence[Judged], rows: Sequence[ResultRow]
) -> list[tuple[Judged, float | None]]:
    """Return each detector with its AUROC on the pooled in-domain test questions.

    The better ones of a setting come first; those without an AUROC (None) last.
    """
    table = ResultTable(rows)
    where = {"experiment": "detection", "dataset": IN_DOMAIN, "split": "test"}

    def auroc(one: Judged) -> float | None:
        own = {"detector": one.name, "setting": one.setting, "seed": "mean"}
        row = table.find(metric="auroc", **where, **own)
        return row and row.value

    found = [(one, auroc(one)) for one in judged]
    return sorted(found, key=lambda pair: 1.0 if pair[1] is None else -pair[1])


def _needs(one: Judged) -> str:
    needs = [*one.needs, *(["labels"] if one.is_trained else [])]
    return ", ".join(NEEDS.get(need, need) for need in needs) or "nothing"


def _cells(one: Judged, auroc: float | None) -> tuple[str, ...]:
    """Spell a detector, a text for each of `HEADS`."""
    return (
        one.title,
        "–" if auroc is None else number(auroc),
        "–" if one.seconds is None else f"{one.seconds:.2g}",
        "–" if one.peak_bytes is None else bytes_in_words(one.peak_bytes),
        str(one.n_forwards),
        f"{one.n_new_tokens:.3g}",
        _needs(one),
        "; ".join(part for part in (one.variant, one.reason) if part),
    )


def cost_tables(
    judged: Sequence[Judged], rows: Sequence[ResultRow]
) -> Mapping[str, list[tuple[str, ...]]]:
    """Return the cells of every detector, by setting in words."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for one, auroc in measured(judged, rows):
        found.setdefault(SETTING_LABELS[one.setting], []).append(_cells(one, auroc))
    return dict(sorted(found.items()))


def as_markdown(judged: Sequence[Judged], rows: Sequence[ResultRow]) -> str:
    """Spell the tables as Markdown; empty where no rival was judged."""
    parts = []
    for heading, lines in cost_tables(judged, rows).items():
        spelled = ["| " + " | ".join(cells) + " |" for cells in (HEADS, *lines)]
        spelled.insert(1, "|---" * len(HEADS) + "|")
        parts.append(f"### What each costs, {heading.lower()}\n")
        parts.append("\n".join(spelled) + "\n")
    return "\n".join(parts)
