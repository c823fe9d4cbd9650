"""What every rival detector is and costs: a table, and figures beside AUROC."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.results.figures import CostKind, Picture, cost_figure, picture
from beatrice.benchmarks.results.names import CHAMPION, SETTING_LABELS
from beatrice.benchmarks.results.printing import markdown
from beatrice.benchmarks.results.tables import POOLED, by_subject, number
from beatrice.extract.records import SETTINGS
from beatrice.extract.run.rows import Subject
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


def titles_of(judged: Iterable[DetectorCost]) -> dict[Subject, str]:
    """Return the printed names of detectors."""
    return {Subject(x.name): x.title for x in judged}


def _test_auroc(
    results: pandas.DataFrame, setting: str, subject: Subject
) -> float | None:
    """Return AUROC on the pooled in-domain test questions."""
    at = {**POOLED, "setting": setting, "metric": "auroc"}
    row = by_subject(results, experiment="detection", **at).get(subject)
    return row and row.value


def measured(
    judged: Sequence[DetectorCost], results: pandas.DataFrame
) -> list[tuple[DetectorCost, float | None]]:
    """Return each detector with its AUROC on the pooled in-domain test questions.

    The better ones of a setting come first; those without an AUROC (None) last.
    """
    pairs = [(x, _test_auroc(results, x.setting, Subject(x.name))) for x in judged]
    return sorted(pairs, key=lambda pair: 1.0 if pair[1] is None else -pair[1])


def _cells(detector: DetectorCost, auroc: float | None) -> tuple[str, ...]:
    """Format a detector, a text for each of `HEADS`."""
    needs = [*detector.needs, *(["labels"] if detector.is_trained else [])]
    seconds, peak = detector.seconds, detector.peak_bytes
    return (
        detector.title,
        "–" if auroc is None else number(auroc),
        "–" if seconds is None else f"{seconds:.2g}",
        "–" if peak is None else bytes_in_words(peak),
        str(detector.n_forwards),
        f"{detector.n_new_tokens:.3g}",
        ", ".join(NEEDS.get(need, need) for need in needs) or "nothing",
        "; ".join(filter(None, (detector.variant, detector.reason))),
    )


def cost_tables(
    judged: Sequence[DetectorCost], results: pandas.DataFrame
) -> Mapping[str, list[tuple[str, ...]]]:
    """Return the cells of every detector, by setting in words."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for detector, auroc in measured(judged, results):
        heading = SETTING_LABELS[detector.setting]
        tables.setdefault(heading, []).append(_cells(detector, auroc))
    return dict(sorted(tables.items()))


def as_markdown(judged: Sequence[DetectorCost], results: pandas.DataFrame) -> str:
    """Format the tables as Markdown; empty where no rival was judged."""
    return "\n".join(
        f"### What each costs, {heading.lower()}\n\n{markdown(HEADS, lines)}"
        for heading, lines in cost_tables(judged, results).items()
    )


def kind_of(detector: DetectorCost) -> CostKind:
    """Return how a detector is drawn; one that samples and is trained samples."""
    if "samples" in detector.needs:
        return "sampled"
    return "trained" if detector.is_trained else "plain"


CostOf = Callable[[DetectorCost], float | None]
_COSTS: tuple[tuple[str, str, bool, CostOf], ...] = (
    ("seconds", "seconds a question", True, lambda x: x.seconds),
    ("forwards", "forwards more", False, lambda x: x.n_forwards),
    ("tokens", "tokens generated more", False, lambda x: x.n_new_tokens),
)
_CAPTION = (
    "The five best are numbered. Dashed: the selected encoders, whose signals come "
    "from the pass that gave the answer."
)
_TIMED = (
    " Time is measured on this machine, fitting included; what was not timed has no "
    "point."
)


def cost_pictures(
    judged: Sequence[DetectorCost], results: pandas.DataFrame
) -> list[Picture]:
    """Return AUROC against seconds, forwards and tokens, setting by setting.

    A cost that is the same for all detectors of a setting has no figure.
    """
    pictures = []
    for setting in SETTINGS:
        known = [
            (detector, auroc)
            for detector, auroc in measured(judged, results)
            if detector.setting == setting and auroc is not None
        ]
        for name, axis, is_log, cost_of in _COSTS:
            points = [
                (detector.title, kind_of(detector), cost, auroc)
                for detector, auroc in known
                if (cost := cost_of(detector)) is not None
            ]
            if len({cost for *_, cost, _ in points}) < 2:
                continue
            ours = _test_auroc(results, setting, CHAMPION)
            figure = cost_figure(points, setting, axis, ours, is_log=is_log)
            title = f"{SETTING_LABELS[setting]}: AUROC against {axis}"
            caption = _CAPTION + _TIMED * is_log
            pictures.append(picture(figure, f"cost-{name}-{setting}", title, caption))
    return pictures
