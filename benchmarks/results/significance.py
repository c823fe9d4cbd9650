"""Is the lead of the selected set sure? Against the strongest rival, and hidden states.

The paper's app:significance. Differences, intervals and p come from the `paired` rows:
a bootstrap over questions, both detectors on the same resamples. Holm's correction runs
over all columns of one comparison, in both settings: the pooled in-domain test
questions and every held-out set. Own encoders are no rivals here.

The strongest rival of a column is the one with the highest AUROC on the column's own
questions, as in the paper: the best of many looks better there than it is, so a lead
over it is understated and a lag overstated. The bootstrap does not choose anew.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas

from beatrice.benchmarks.baselines.detector import is_rival
from beatrice.benchmarks.results import names
from beatrice.benchmarks.results.printing import latex, markdown, tex
from beatrice.benchmarks.results.tables import (
    EVALUATED,
    Place,
    Titles,
    by_pair,
    by_subject,
    excludes_zero,
    in_domain_or_held_out,
    interval,
    number,
    of_subject,
    p_text,
    places_of,
    row_value,
    where,
)
from beatrice.extract.run.rows import ResultRow, Subject

Against = Literal["strongest", "hidden_only"]
TITLES: dict[Against, str] = {
    "strongest": "Against the strongest rival of each column",
    "hidden_only": "Against hidden states only",
}
LEVEL = 0.05
HEADS = ("Set", "Rival", "AUROC", "Rival's", "Difference", "p", "Holm", "Seeds ± SD")


class Lead(NamedTuple):
    """The selected set and a rival on one set.

    Attributes:
      rival: what it is compared with; None where no rival was measured.
      ours: AUROC of the selected set.
      theirs: AUROC of the rival.
      seeds_sd: SD of the selected set's AUROC over training seeds; None with one seed.
      uncompared: detectors with a higher AUROC than the rival that no paired row has.
      p_holm: corrected p; None where the difference is undefined.
    """

    place: Place
    rival: Subject | None
    ours: ResultRow | None
    theirs: ResultRow | None
    difference: ResultRow | None
    seeds_sd: float | None
    uncompared: tuple[Subject, ...]
    p_holm: float | None = None

    @property
    def is_sure(self) -> bool:
        """Whether the corrected p is below .05, of a lead or of a lag."""
        return self.p_holm is not None and self.p_holm < LEVEL


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's step-down method, in order.

    Args:
      p_values: two-sided, in (0, 1].
    """
    if not p_values:
        return []
    from statsmodels.stats.multitest import multipletests  # a second to load

    _, corrected, *_ = multipletests(p_values, method="holm")
    return np.asarray(corrected).tolist()


def seed_spread(results: pandas.DataFrame, place: Place) -> float | None:
    """Return the SD of the selected set's AUROC over training seeds; None with one."""
    at = {**of_subject(names.CHAMPION), **place._asdict()}
    rows = where(results, experiment="detection", metric="auroc", **at)["row"]
    values = [r.value for r in rows if r.seed != "mean" and r.value is not None]
    return statistics.stdev(values) if len(values) > 1 else None


def _lead(results: pandas.DataFrame, place: Place, against: Against) -> Lead:
    at = {"metric": "auroc", **place._asdict()}
    paired = by_pair(results, experiment="paired", **of_subject(names.CHAMPION), **at)
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
        compared = (
            x for x in ranked if x in differences and differences[x].value is not None
        )
        rival = next(compared, None)
        uncompared = tuple(ranked[: ranked.index(rival)] if rival else ranked)
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
    """Return the lead of the selected set on every column, Holm over all of them."""
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
    """Format a lead, a text for each of `HEADS`; † where its interval excludes zero."""
    printed = {**names.DETECTORS, **names.RIVALS, **(titles or {})}
    row, ours = lead.difference, lead.ours
    if row is None:
        difference = "not compared"
    elif row.value is None:
        difference = f"n/a ({row.reason})"
    else:
        mark = "†" if excludes_zero(row) else ""
        difference = f"{row_value(row)}{mark} [{interval(row)}]"
    seeds = "–"
    if lead.seeds_sd is not None and ours is not None and ours.ci_low is not None:
        half = ((ours.ci_high or 0.0) - ours.ci_low) / 2
        seeds = f"{number(lead.seeds_sd)}, questions ±{number(half)}"
    rival = lead.rival
    return (
        f"{names.SETTING_LABELS[lead.place.setting]}, {lead.place.title}",
        "none" if rival is None else printed.get(rival, rival.detector),
        *(
            "–" if x is None or x.value is None else number(x.value)
            for x in (ours, lead.theirs)
        ),
        difference,
        p_text(row and row.p_value),
        p_text(lead.p_holm),
        seeds,
    )


def counts(compared: Sequence[Lead], titles: Titles | None = None) -> dict[str, str]:
    """Return on how many columns a lead or a lag is sure, and what was not compared."""
    printed = {**names.DETECTORS, **names.RIVALS, **(titles or {})}
    known = [lead for lead in compared if lead.p_holm is not None]
    values = [x.difference.value or 0.0 for x in known if x.is_sure and x.difference]
    above = {printed.get(x, x.detector) for lead in compared for x in lead.uncompared}
    return {
        "Columns compared": str(len(known)),
        "Sure leads (p < .05)": str(sum(value > 0 for value in values)),
        "Sure lags": str(sum(value <= 0 for value in values)),
        "Stronger somewhere, not compared": ", ".join(sorted(above)) or "none",
    }


def as_markdown(results: pandas.DataFrame, titles: Titles | None = None) -> str:
    """Format both comparisons as Markdown; a corrected p below .05 is bold."""
    parts = []
    for against, title in TITLES.items():
        compared = leads(results, against)
        cells = lines(compared, titles, "**%s**")
        summary = "".join(f"* {k}: {v}\n" for k, v in counts(compared, titles).items())
        parts.append(f"### {title}\n\n{markdown(HEADS, cells)}\n{summary}")
    return "\n".join(parts)


def as_latex(results: pandas.DataFrame, titles: Titles | None = None) -> str:
    """Format both comparisons as LaTeX tables (booktabs)."""
    head = [" & ".join(map(tex, HEADS)) + r" \\"]
    return "\n".join(
        f"% {title}\n"
        + latex(
            "lllllrrl",
            head,
            lines(leads(results, against), titles, r"\textbf{%s}", tex),
        )
        for against, title in TITLES.items()
    )


def lines(
    compared: Sequence[Lead],
    titles: Titles | None,
    bold: str,
    escape: Callable[[str], str] = str,
) -> Iterator[list[str]]:
    """Yield the cells of every column; a sure corrected p is put into `bold`."""
    for lead in compared:
        cells = [escape(cell) for cell in cells_of(lead, titles)]
        if lead.is_sure:
            cells[HEADS.index("Holm")] = bold % cells[HEADS.index("Holm")]
        yield cells
