"""Is the lead of the selected set sure? Against the strongest rival, and hidden states.

The paper's app:significance. Differences, intervals and p come from the `paired` rows:
a bootstrap over questions, both detectors on the same resamples. Holm's correction runs
over all columns of one comparison, in both settings: the pooled in-domain test
questions and every held-out set. Own encoders are no rivals here.

The strongest rival of a column is the one with the highest AUROC on the column's own
questions, as in the paper: the best of many looks better there than it is, so a lead
over it is understated and a lag overstated. The bootstrap does not choose anew.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from beatrice.benchmarks.baselines.detector import is_rival
from beatrice.benchmarks.results.findings import place_name, seed_spread, tex
from beatrice.benchmarks.results.names import DETECTORS, RIVALS, SETTING_LABELS
from beatrice.benchmarks.results.tables import Place, interval, number, places_of
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import DIFFERENCE, ResultRow, ResultTable

Against = Literal["strongest", "hidden_only"]
TITLES: dict[Against, str] = {
    "strongest": "Against the strongest rival of each column",
    "hidden_only": "Against hidden states only",
}
LEVEL = 0.05
_SPLITS = ("test", "ood")
HEADS = ("Set", "Rival", "AUROC", "Rival's", "Difference", "p", "Holm", "Seeds ± SD")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lead:
    """The selected set and a rival on one set.

    Attributes:
      place: setting, dataset and split.
      rival: its name in rows; None where no rival was measured.
      ours: AUROC of the selected set.
      theirs: AUROC of the rival.
      difference: the paired row, or None.
      p_holm: corrected p; None where the difference is undefined.
      seeds_sd: SD of the selected set's AUROC over training seeds; None with one seed.
      uncompared: detectors with a higher AUROC than the rival that no paired row has.
    """

    place: Place
    rival: str | None
    ours: ResultRow | None
    theirs: ResultRow | None
    difference: ResultRow | None
    p_holm: float | None = None
    seeds_sd: float | None = None
    uncompared: tuple[str, ...] = ()

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
    # Loads pandas, which no other report needs.
    from statsmodels.stats.multitest import multipletests

    return multipletests(p_values, method="holm")[1].tolist()


def columns_of(rows: Sequence[ResultRow]) -> list[Place]:
    """Return the columns that are tested: pooled in-domain test, each held-out set."""
    measured = [r for r in rows if r.experiment == "detection" and r.split in _SPLITS]
    pooled = [r for r in measured if r.split == "ood" or r.dataset == IN_DOMAIN]
    return places_of(pooled, _SPLITS)


def _strongest(
    table: ResultTable, known: Sequence[str]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the compared rival of highest AUROC, and the uncompared above it.

    Args:
      table: the AUROC rows of one set.
      known: detectors that the selected set has a defined difference to.
    """
    rivals = [r for r in table.rows if is_rival(r.detector) and r.value is not None]
    best_first = sorted(rivals, key=lambda r: (-r.value, r.detector))
    names = [r.detector for r in best_first]
    first = next((i for i, name in enumerate(names) if name in known), None)
    return (None, tuple(names)) if first is None else (names[first], (*names[:first],))


def _lead(rows: ResultTable, place: Place, against: Against) -> Lead:
    setting, dataset, split = place
    where = {"setting": setting, "dataset": dataset, "split": split, "seed": "mean"}
    paired = rows.select(
        experiment="paired", detector="champion", metric=f"auroc{DIFFERENCE}", **where
    )
    by_rival = {row.against: row for row in paired}
    aurocs = ResultTable(rows.select(experiment="detection", metric="auroc", **where))
    defined = [name for name, row in by_rival.items() if row.value is not None]
    rival, uncompared = against, ()
    if against == "strongest":
        rival, uncompared = _strongest(aurocs, defined)
    return Lead(
        place=place,
        rival=rival,
        ours=aurocs.find(detector="champion"),
        theirs=None if rival is None else aurocs.find(detector=rival),
        difference=None if rival is None else by_rival.get(rival),
        seeds_sd=seed_spread(rows, place),
        uncompared=uncompared,
    )


def leads(rows: Sequence[ResultRow], against: Against) -> list[Lead]:
    """Return the lead of the selected set on every column, Holm over all of them.

    Args:
      rows: of a run.
      against: the strongest rival of each column, or the encoder of hidden states.
    """
    wanted = [r for r in rows if r.experiment in ("paired", "detection")]
    table = ResultTable([r for r in wanted if r.metric.startswith("auroc")])
    found = [_lead(table, place, against) for place in columns_of(table.rows)]
    p_values = [one.difference and one.difference.p_value for one in found]
    corrected = iter(holm([p for p in p_values if p is not None]))
    return [
        one if p is None else dataclasses.replace(one, p_holm=next(corrected))
        for one, p in zip(found, p_values, strict=True)
    ]


def _printed(titles: Mapping[str, str] | None) -> dict[str | None, str]:
    return {**DETECTORS, **RIVALS, **(titles or {})}


def _auroc(row: ResultRow | None) -> str:
    return "–" if row is None or row.value is None else number(row.value)


def _p(p_value: float | None) -> str:
    return "–" if p_value is None else f"{p_value:.2g}".replace("0.", ".")


def _seeds(lead: Lead) -> str:
    """Spell the seeds' SD beside half the width of the questions' interval."""
    row = lead.ours
    if lead.seeds_sd is None or row is None or row.ci_low is None:
        return "–"
    half = (row.ci_high - row.ci_low) / 2
    return f"{number(lead.seeds_sd)}, questions ±{number(half)}"


def cells_of(lead: Lead, titles: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Spell a lead, a text for each of `HEADS`; † where its interval excludes zero.

    Args:
      lead: of a column.
      titles: printed names beyond those of `DETECTORS`.
    """
    row = lead.difference
    if row is None:
        spelled = "not compared"
    elif row.value is None:
        spelled = f"n/a ({row.reason})"
    else:
        excludes = row.ci_low is not None and row.ci_low * row.ci_high > 0
        mark = "†" if excludes else ""
        spelled = f"{number(row.value, row.metric)}{mark} [{interval(row)}]"
    return (
        f"{SETTING_LABELS[lead.place[0]]}, {place_name(lead.place)}",
        _printed(titles).get(lead.rival, lead.rival or "none"),
        _auroc(lead.ours),
        _auroc(lead.theirs),
        spelled,
        _p(row and row.p_value),
        _p(lead.p_holm),
        _seeds(lead),
    )


def sentence(found: Sequence[Lead], titles: Mapping[str, str] | None = None) -> str:
    """Say on how many columns the lead and the lag are sure after the correction."""
    known = [one for one in found if one.p_holm is not None]
    sure = [one.difference.value > 0 for one in known if one.is_sure]
    lags = len(sure) - sum(sure)
    told = (
        f"After Holm's correction over {len(known)} columns the selected set leads for "
        f"sure (p < .05) on {sum(sure)} and lags on {lags}."
    )
    printed = _printed(titles)
    above = {printed.get(x, x) for one in found for x in one.uncompared}
    if above:
        told += f" Stronger somewhere, but not compared: {', '.join(sorted(above))}."
    return told


def as_markdown(
    rows: Sequence[ResultRow], titles: Mapping[str, str] | None = None
) -> str:
    """Spell both comparisons as Markdown; a corrected p below .05 is bold."""
    parts = []
    for against, title in TITLES.items():
        found = leads(rows, against)
        lines = [f"### {title}", "", "| " + " | ".join(HEADS) + " |"]
        lines.append("|---" * len(HEADS) + "|")
        for one in found:
            cells = list(cells_of(one, titles))
            if one.is_sure:
                cells[6] = f"**{cells[6]}**"
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join([*lines, "", sentence(found, titles), ""]))
    return "\n".join(parts)


def as_latex(rows: Sequence[ResultRow], titles: Mapping[str, str] | None = None) -> str:
    """Spell both comparisons as LaTeX tables (booktabs)."""
    parts = []
    for against, title in TITLES.items():
        lines = [f"% {title}", r"\begin{tabular}{lllllrrl}", r"\toprule"]
        lines += [" & ".join(map(tex, HEADS)) + r" \\", r"\midrule"]
        for one in leads(rows, against):
            cells = list(map(tex, cells_of(one, titles)))
            if one.is_sure:
                cells[6] = rf"\textbf{{{cells[6]}}}"
            lines.append(" & ".join(cells) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]))
    return "\n".join(parts)
