"""The rivals of the selected set: is its lead significant, and what do they cost?

The leads are the paper's app:significance. Differences, intervals and p come from the
`paired` rows. Two methods give each of these: a bootstrap over questions, with both
detectors on the same resamples, and placements; rows have the wider interval and the
larger p (`jaxprobe.evaluation`). Holm's correction runs over all columns of a
comparison, in both settings: the pooled in-domain test questions and every held-out
set. Our own encoders are not rivals here.

The strongest rival of a column is furthest ahead of the set, or least behind it, on the
answers that both have scores for. If every rival has a score for every answer, it is
the one with the highest AUROC, as in the paper. The best of many looks better than it
is, so a lead over it is understated, a lag overstated. Resamples do not choose it anew.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas

from beatrice.benchmarks.baselines.detector import DetectorCost, is_rival
from beatrice.benchmarks.results import names
from beatrice.benchmarks.results.figures import CostKind, Picture, cost_figure, picture
from beatrice.benchmarks.results.names import CHAMPION, SETTING_LABELS
from beatrice.benchmarks.results.rendering import latex, markdown, md, small_print, tex
from beatrice.benchmarks.results.tables import (
    EVALUATED,
    POOLED,
    Place,
    Titles,
    by_pair,
    by_subject,
    excludes_zero,
    in_domain_or_held_out,
    interval,
    number,
    p_text,
    places_of,
    row_value,
    title_of,
    where,
)
from beatrice.extract.records import SETTINGS
from beatrice.extract.run.rows import ResultRow, Subject
from beatrice.extract.run.stages import bytes_in_words

Against = Literal["strongest", "hidden_only"]
COMPARISONS: dict[Against, str] = {
    "strongest": "Against the strongest rival of each column",
    "hidden_only": "Against hidden states only",
}
HEADS = ("Set", "Rival", "AUROC", "Rival's", "Difference", "p", "Holm",
         "SD over seeds, 95 % over questions")  # fmt: skip
FEWER = (
    "If a line says n of N answers, only n have a score from both detectors; all its "
    "numbers are of these n, and – is a number that is unknown for them."
)


class Lead(NamedTuple):
    """The selected set and a rival on one set."""

    place: Place
    rival: Subject | None  # None if no rival was measured
    ours: ResultRow | None  # AUROC of the selected set
    theirs: ResultRow | None  # AUROC of the rival
    difference: ResultRow | None
    # SD of the selected set's AUROC over training seeds; None with one seed.
    seeds_sd: float | None
    # Detectors with a higher AUROC than the rival but without a paired row.
    uncompared: tuple[Subject, ...]
    p_holm: float | None = None  # corrected p; None if the difference is undefined

    @property
    def n(self) -> int:
        """The number of answers compared: those with a score from both detectors."""
        row = self.difference or self.ours or self.theirs
        return 0 if row is None else row.n

    @property
    def n_all(self) -> int:
        """The larger of the two detectors' numbers of scored answers."""
        return max([self.n, *(x.n for x in (self.ours, self.theirs) if x)])

    @property
    def aurocs(self) -> tuple[float | None, float | None]:
        """AUROC of the selected set and of the rival on the compared answers.

        A row with `n` answers is of the compared ones. If only one row is, the other
        AUROC is computed from it and the difference.
        """
        ours, theirs = (
            x.value if x is not None and x.n == self.n else None
            for x in (self.ours, self.theirs)
        )
        gap = None if self.difference is None else self.difference.value
        if gap is not None and ours is None and theirs is not None:
            ours = theirs + gap
        elif gap is not None and theirs is None and ours is not None:
            theirs = ours - gap
        return ours, theirs

    @property
    def is_sure(self) -> bool:
        """Whether the lead or lag is significant: its corrected p is below .05."""
        return self.p_holm is not None and self.p_holm < 0.05


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons by Holm's step-down method."""
    order = np.argsort(p_values)
    corrected = np.array(p_values)
    steps = corrected[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected.tolist()


def seed_spread(results: pandas.DataFrame, place: Place) -> float | None:
    """Return the SD of the selected set's AUROC over training seeds; None with one."""
    at = {**names.CHAMPION._asdict(), **place._asdict()}
    rows = where(results, experiment="detection", metric="auroc", **at)["row"]
    values = [r.value for r in rows if r.seed != "mean" and r.value is not None]
    return statistics.stdev(values) if len(values) > 1 else None


def _lead(results: pandas.DataFrame, place: Place, against: Against) -> Lead:
    at = {"metric": "auroc", **place._asdict()}
    paired = by_pair(results, experiment="paired", **names.CHAMPION._asdict(), **at)
    differences = {rival: row for (_, rival), row in paired.items()}
    aurocs = by_subject(results, experiment="detection", **at)
    rival, uncompared = names.HIDDEN_ONLY, ()
    if against == "strongest":
        known = {
            x: row.value
            for x, row in aurocs.items()
            if is_rival(x.detector) and row.value is not None
        }
        ranked = sorted(known, key=lambda x: (-known[x], x.detector, x.families or ""))
        gaps = {x: differences[x].value for x in ranked if x in differences}
        gaps = {x: gap for x, gap in gaps.items() if gap is not None}
        rival = min(gaps, key=gaps.__getitem__, default=None)
        above = ranked[: ranked.index(rival)] if rival else ranked
        uncompared = tuple(x for x in above if x not in gaps)
    return Lead(
        place=place,
        rival=rival,
        ours=aurocs.get(names.CHAMPION),
        theirs=None if rival is None else aurocs.get(rival),
        difference=None if rival is None else differences.get(rival),
        seeds_sd=seed_spread(results, place),
        uncompared=uncompared,
    )


def leads(results: pandas.DataFrame, against: Against) -> list[Lead]:
    """Return the selected set's lead on every column, Holm-corrected over all."""
    tested = where(results, experiment=("paired", "detection"), split=EVALUATED)
    tested = in_domain_or_held_out(tested)
    compared = [_lead(tested, x, against) for x in places_of(tested, EVALUATED)]
    p_values = [lead.difference and lead.difference.p_value for lead in compared]
    corrected = iter(holm([p for p in p_values if p is not None]))
    return [
        lead if p is None else lead._replace(p_holm=next(corrected))
        for lead, p in zip(compared, p_values, strict=True)
    ]


def cells_of(lead: Lead, titles: Titles | None = None) -> tuple[str, ...]:
    """Format a lead as a text for each of `HEADS`; † if its interval excludes zero."""
    row, ours = lead.difference, lead.ours
    if row is None:
        difference = "not compared"
    elif row.value is None:
        difference = f"n/a ({row.reason})"
    else:
        mark = "†" if excludes_zero(row) else ""
        difference = f"{row_value(row)}{mark} [{interval(row)}]"
    seeds = "–"
    if ours is not None and ours.n != lead.n:
        ours = None  # its interval and seeds are of more answers than are compared
    if lead.seeds_sd is not None and ours is not None and ours.ci_low is not None:
        half = ((ours.ci_high or 0.0) - ours.ci_low) / 2
        seeds = f"{number(lead.seeds_sd)}, questions ±{number(half)}"
    rival = lead.rival
    fewer = f", {lead.n:,} of {lead.n_all:,} answers" if lead.n < lead.n_all else ""
    return (
        f"{names.SETTING_LABELS[lead.place.setting]}, {lead.place.title}{fewer}",
        "none" if rival is None else title_of(rival, titles),
        *("–" if x is None else number(x) for x in lead.aurocs),
        difference,
        p_text(row and row.p_value),
        p_text(lead.p_holm),
        seeds,
    )


def lead_counts(
    compared: Sequence[Lead], titles: Titles | None = None
) -> dict[str, str]:
    """Count the columns with a significant lead or lag; list what was not compared."""
    values = [x.difference.value or 0.0 for x in compared if x.is_sure and x.difference]
    above = {title_of(x, titles) for lead in compared for x in lead.uncompared}
    return {
        "Columns compared": str(sum(x.p_holm is not None for x in compared)),
        "Significant leads (Holm p < .05)": str(sum(value > 0 for value in values)),
        "Significant lags": str(sum(value <= 0 for value in values)),
        "Stronger on some set, but not compared": ", ".join(sorted(above)) or "none",
    }


def leads_as_markdown(results: pandas.DataFrame, titles: Titles | None = None) -> str:
    """Format both comparisons as Markdown; a corrected p below .05 is bold."""
    parts = []
    for against, title in COMPARISONS.items():
        compared = leads(results, against)
        table = markdown(HEADS, lead_lines(compared, titles, "**%s**"))
        notes = [f"{note}\n\n" for note in lead_notes(compared)]
        counts = lead_counts(compared, titles).items()
        notes += [f"* {name}: {md(text)}\n" for name, text in counts]
        parts.append(f"### {title}\n\n{table}\n{''.join(notes)}")
    return "\n".join(parts)


def leads_as_latex(results: pandas.DataFrame, titles: Titles | None = None) -> str:
    """Format both comparisons as LaTeX tables (booktabs)."""
    parts = []
    for against, title in COMPARISONS.items():
        compared = leads(results, against)
        lines = lead_lines(compared, titles, r"\textbf{%s}", tex)
        table = latex("lllllrrl", HEADS, lines) + small_print(lead_notes(compared))
        parts.append(f"% {title}\n{table}")
    return "\n".join(parts)


def lead_notes(compared: Sequence[Lead]) -> list[str]:
    """Return the note that lines of fewer answers than their set's need, if any."""
    return [FEWER] if any(x.n < x.n_all for x in compared) else []


def lead_lines(
    compared: Sequence[Lead],
    titles: Titles | None,
    bold: str,
    escape: Callable[[str], str] = str,
) -> Iterator[list[str]]:
    """Yield the cells of every lead; a significant corrected p is put into `bold`."""
    for lead in compared:
        cells = [escape(cell) for cell in cells_of(lead, titles)]
        if lead.is_sure:
            cells[HEADS.index("Holm")] = bold % cells[HEADS.index("Holm")]
        yield cells


# What each rival needs and costs: a table, and figures with AUROC.


COST_HEADS = (
    "Detector",
    "AUROC",
    "Seconds per question",
    "Peak memory",
    "Extra forward passes",
    "Extra tokens",
    "Needs",
    "Differences from the publication",
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
    """Return a detector's AUROC on the pooled in-domain test questions."""
    at = {**POOLED, "setting": setting, "metric": "auroc"}
    row = by_subject(results, experiment="detection", **at).get(subject)
    return row and row.value


def detectors_by_auroc(
    judged: Sequence[DetectorCost], results: pandas.DataFrame
) -> list[tuple[DetectorCost, float | None]]:
    """Return each detector with its AUROC on the in-domain test, best first."""
    pairs = [(x, _test_auroc(results, x.setting, Subject(x.name))) for x in judged]
    return sorted(pairs, key=lambda pair: 1.0 if pair[1] is None else -pair[1])


def _plain(value: float, n_digits: int) -> str:
    """Format a value with `n_digits` significant digits and no exponent."""
    return np.format_float_positional(
        value, n_digits, unique=False, fractional=False, trim="-"
    )


def _cells(detector: DetectorCost, auroc: float | None) -> tuple[str, ...]:
    """Format a detector as a text for each of `COST_HEADS`."""
    needs = [*detector.needs, *(["labels"] if detector.is_trained else [])]
    seconds, peak = detector.seconds, detector.peak_bytes
    n_new = detector.n_new_tokens
    return (
        detector.title,
        "–" if auroc is None else number(auroc),
        "–" if seconds is None else _plain(seconds, 2),
        "–" if peak is None else bytes_in_words(peak),
        str(detector.n_forwards),
        "–" if n_new is None else _plain(n_new, 3),
        ", ".join(NEEDS.get(need, need) for need in needs) or "nothing",
        "; ".join(filter(None, (detector.variant, detector.reason))),
    )


def cost_tables(
    judged: Sequence[DetectorCost], results: pandas.DataFrame
) -> Mapping[str, list[tuple[str, ...]]]:
    """Return the cells of every detector, by the printed name of the setting."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for detector, auroc in detectors_by_auroc(judged, results):
        heading = SETTING_LABELS[detector.setting]
        tables.setdefault(heading, []).append(_cells(detector, auroc))
    return dict(sorted(tables.items()))


def costs_as_markdown(judged: Sequence[DetectorCost], results: pandas.DataFrame) -> str:
    """Format the cost tables as Markdown; empty if no rival was judged."""
    return "\n".join(
        f"### Cost per question, {heading.lower()}\n\n{markdown(COST_HEADS, lines)}"
        for heading, lines in cost_tables(judged, results).items()
    )


def kind_of(detector: DetectorCost) -> CostKind:
    """Return how to draw a detector; one that samples and is trained is "sampled"."""
    if "samples" in detector.needs or detector.n_new_tokens != 0:
        return "sampled"
    return "trained" if detector.is_trained else "plain"


_COSTS = (
    ("seconds", "seconds per question", "seconds"),
    ("forwards", "extra forward passes", "n_forwards"),
    ("tokens", "extra tokens generated", "n_new_tokens"),
)
_CAPTION = (
    "The five best are numbered. Dashed: the selected encoders, whose signals come "
)
_ONE_PASS = "from the pass that gave the answer."
_TWO_PASSES = (
    "also from a closed-book answer (one more generation). Dotted: encoders selected "
    "from those of the with-context pass only."
)
_TIMED = (
    " Time is measured on this machine, including fitting; a detector without a time "
    "has no point."
)


def _selected_lines(
    results: pandas.DataFrame, setting: str, selection: Mapping[str, Any]
) -> tuple[dict[str, float], str]:
    """Return the AUROC of selected sets by label, and the source of their signals."""
    selected = selection[setting]["selected"] if setting in selection else ()
    is_two = setting == "with_context" and any(x.startswith("(") for x in selected)
    subjects = {"BEATRICE": CHAMPION}
    if is_two:
        alone = Subject("without_closed_book")
        subjects[names.DETECTORS[alone]] = alone
    aurocs = {x: _test_auroc(results, setting, y) for x, y in subjects.items()}
    lines = {label: auroc for label, auroc in aurocs.items() if auroc is not None}
    return lines, _TWO_PASSES if is_two else _ONE_PASS


def cost_pictures(
    judged: Sequence[DetectorCost],
    results: pandas.DataFrame,
    selection: Mapping[str, Any],
) -> list[Picture]:
    """Draw AUROC against each cost that differs among a setting's detectors.

    `selection` has by setting the selected encoders, named as `pool_names` prints them.
    """
    pictures = []
    for setting in SETTINGS:
        ours, source = _selected_lines(results, setting, selection)
        known = [
            (detector, auroc)
            for detector, auroc in detectors_by_auroc(judged, results)
            if detector.setting == setting and auroc is not None
        ]
        for name, axis, field in _COSTS:
            points = [
                (detector.title, kind_of(detector), cost, auroc)
                for detector, auroc in known
                if (cost := getattr(detector, field)) is not None
            ]
            if len({cost for *_, cost, _ in points}) < 2:
                continue
            is_time = name == "seconds"
            figure = cost_figure(points, setting, axis, ours, is_log=is_time)
            title = f"{SETTING_LABELS[setting]}: AUROC against {axis}"
            caption = _CAPTION + source + _TIMED * is_time
            if not is_time and len(points) < len(known):
                caption += " A detector without a count has no point."
            pictures.append(picture(figure, f"cost-{name}-{setting}", title, caption))
    return pictures
