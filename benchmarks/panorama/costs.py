"""What every rival detector is and costs: the stage's record of it, as a table."""

from collections.abc import Iterable, Mapping, Sequence

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.results.names import SETTING_LABELS
from beatrice.benchmarks.results.tables import number
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, ResultTable
from beatrice.extract.run.stages import bytes_in_words

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


def titles_of(judged: Iterable[DetectorCost]) -> dict[str, str]:
    """Return the printed names of detectors by those in the rows."""
    return {one.name: one.title for one in judged}


def measured(
    judged: Sequence[DetectorCost], rows: Sequence[ResultRow]
) -> list[tuple[DetectorCost, float | None]]:
    """Return each detector with its AUROC on the pooled in-domain test questions.

    The better ones of a setting come first; those without an AUROC (None) last.
    """
    table = ResultTable(rows)
    where = {"experiment": "detection", "dataset": IN_DOMAIN, "split": "test"}

    def auroc(one: DetectorCost) -> float | None:
        own = {"detector": one.name, "setting": one.setting, "seed": "mean"}
        row = table.find(metric="auroc", **where, **own)
        return row and row.value

    found = [(one, auroc(one)) for one in judged]
    return sorted(found, key=lambda pair: 1.0 if pair[1] is None else -pair[1])


def _needs(one: DetectorCost) -> str:
    needs = [*one.needs, *(["labels"] if one.is_trained else [])]
    return ", ".join(NEEDS.get(need, need) for need in needs) or "nothing"


def _cells(one: DetectorCost, auroc: float | None) -> tuple[str, ...]:
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
    judged: Sequence[DetectorCost], rows: Sequence[ResultRow]
) -> Mapping[str, list[tuple[str, ...]]]:
    """Return the cells of every detector, by setting in words."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for one, auroc in measured(judged, rows):
        found.setdefault(SETTING_LABELS[one.setting], []).append(_cells(one, auroc))
    return dict(sorted(found.items()))


def as_markdown(judged: Sequence[DetectorCost], rows: Sequence[ResultRow]) -> str:
    """Spell the tables as Markdown; empty where no rival was judged."""
    parts = []
    for heading, lines in cost_tables(judged, rows).items():
        spelled = ["| " + " | ".join(cells) + " |" for cells in (HEADS, *lines)]
        spelled.insert(1, "|---" * len(HEADS) + "|")
        parts.append(f"### What each costs, {heading.lower()}\n")
        parts.append("\n".join(spelled) + "\n")
    return "\n".join(parts)
