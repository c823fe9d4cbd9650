"""One page for one run: self-contained, readable offline, the same bytes every time."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from beatrice.benchmarks.anatomy.parts import anatomy_parts
from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.panorama.costs import HEADS as COST_HEADS
from beatrice.benchmarks.panorama.costs import cost_tables, titles_of
from beatrice.benchmarks.panorama.layout import panoramas
from beatrice.benchmarks.panorama.scatter import cost_pictures
from beatrice.benchmarks.panorama.significance import (
    HEADS,
    TITLES,
    cells_of,
    leads,
    sentence,
)
from beatrice.benchmarks.results.findings import (
    findings,
    grids,
    measured,
    remarks,
    sentences,
)
from beatrice.benchmarks.results.names import (
    CONTROLS,
    DETECTORS,
    METRIC_LABELS,
    SETTING_LABELS,
    SPAN_DECISIONS,
    SPLIT_LABELS,
)
from beatrice.benchmarks.results.paired import (
    annotated_table,
    answer_table,
    equal_length_table,
    floor_table,
    gain,
    noise_table,
    paired_table,
)
from beatrice.benchmarks.results.pictures import (
    frontier_pictures,
    ranking_pictures,
    reliability_pictures,
    selection_pictures,
    sweep_pictures,
    synergy_pictures,
)
from beatrice.benchmarks.results.saved import N_SHOWN
from beatrice.benchmarks.results.tables import (
    controller_table,
    detection_table,
    exhaustive_table,
    family_table,
    feature_table,
    interval,
    number,
    set_names,
    span_table,
)
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.files import write_text_atomic
from beatrice.extract.run.rows import MACRO, ResultRow, ResultTable
from beatrice.pgir.controllers import CONTROLLERS, OPTIONAL
from beatrice.pgir.score_files import P_STEPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the page shows. An empty field is a section that says it is empty.

    Attributes:
      facts: the run in words (model, seed, preset, counts), in order.
      stage_seconds: wall time per stage, in order.
      rows: result rows; which ones are read is said in `tables` and here.
      accuracy: `{dataset, split, setting, variant, n, n_correct}` of the model's own
        answers.
      sweep: per setting `{"layers", "auroc": [[per seed] per layer], "best"}`.
      selection: per setting `{"rounds": [{"added", "auroc", "candidates"}],
        "selected": [names], "stop": why it stopped}`.
      reliability: per setting `{"raw": bins, "calibrated": bins, "brier_raw",
        "brier_calibrated", "ece_raw", "ece_calibrated"}`; a bin is `{lower, upper,
        mean_p, accuracy, n}`.
      control: `{"tau", "budget", "cap", "frontier": [{controller, dataset, budget, em,
        f1, generations}]}`.
      why_no_control: why there are no controllers, in words; empty where there are.
      cases: `{dataset, question, golds, action, verdict, drafts}`; a draft is
        `{setting, answer, p_correct, correct, passages, tokens}`; a token `{text, span,
        p, surprisal, entropy, margin}`, the span one of context, question, answer, the
        numbers those of the position that emits this token.
      shown: answers to look at, by setting and set, as `saved.ShownSet` has them.
      ranking: per setting what `selection.exhaustive.ranking_summary` returns.
      ablations: per setting and variant the names of the encoders it reads.
      studies: cases of `beatrice anatomy`, as its `Case` has them.
      judged: what the rivals of `beatrice baselines` are and cost.
    """

    facts: dict[str, str]
    stage_seconds: dict[str, float]
    rows: Sequence[ResultRow]
    accuracy: Sequence[Mapping[str, Any]]
    sweep: Mapping[str, Mapping[str, Any]]
    selection: Mapping[str, Mapping[str, Any]]
    reliability: Mapping[str, Mapping[str, Any]]
    control: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]]
    shown: Sequence[Mapping[str, Any]] = ()
    why_no_control: str = ""
    ranking: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    ablations: Mapping[str, Mapping[str, Sequence[str]]] = dataclasses.field(
        default_factory=dict
    )
    studies: Sequence[Mapping[str, Any]] = ()
    judged: Sequence[DetectorCost] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """One of the large numbers at the top."""

    label: str
    value: str
    detail: str


def _detection_headlines(table: ResultTable) -> list[Headline]:
    """The champion's AUROC on all in-domain test questions of each setting."""
    found = []
    for setting in ("closed_book", "with_context"):
        where = {"setting": setting, "dataset": IN_DOMAIN, "split": "test"}
        where["seed"] = "mean"
        for row in table.select(
            experiment="detection", detector="champion", metric="auroc", **where
        ):
            label = f"AUROC {SETTING_LABELS[setting].lower()}, in-domain test"
            if row.value is None:
                found.append(Headline(label=label, value="–", detail=str(row.reason)))
                continue
            where |= {"experiment": "paired", "metric": "auroc_difference"}
            than = gain(table.rows, "perplexity", **where)
            parts = (f"95 % interval {interval(row)}", than, f"n = {row.n}")
            detail = "; ".join(part for part in parts if part)
            found.append(Headline(label=label, value=number(row.value), detail=detail))
    return found


def headlines(data: ReportData) -> list[Headline]:
    """Pick the numbers to see first: detection, calibration, controller."""
    table = ResultTable(data.rows)
    found = _detection_headlines(table)
    for setting, fit in data.reliability.items():
        label = f"Calibration error {SETTING_LABELS[setting].lower()}"
        detail = f"{number(fit['ece_raw'])} before calibration"
        value = number(fit["ece_calibrated"])
        found.append(Headline(label=label, value=value, detail=detail))
    pgir = {"experiment": "controller_macro", "detector": "pgir", "dataset": MACRO}
    em, cost = (table.find(metric=m, **pgir) for m in ("em", "generations"))
    if em is not None and cost is not None:
        where = {"experiment": "controller_paired", "dataset": MACRO}
        than = gain(data.rows, "vanilla_rag", metric="em_difference", **where)
        spent = f"{number(cost.value, 'generations')} generations per question"
        detail = "; ".join(part for part in (than, spent) if part)
        label = "Exact match, PGIR, mean of the sets"
        found.append(Headline(label=label, value=number(em.value), detail=detail))
    return found


def accuracy_grid(data: ReportData) -> dict[str, Any]:
    """Lay the model's own accuracy out as datasets against settings and variants."""
    columns = list(dict.fromkeys((a["setting"], a["variant"]) for a in data.accuracy))
    lines: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for entry in data.accuracy:
        line = lines.setdefault((entry["dataset"], entry["split"]), {})
        line[(entry["setting"], entry["variant"])] = entry
    heads = [f"{SETTING_LABELS[at]}, {variant}" for at, variant in columns]
    body = [
        (dataset, SPLIT_LABELS.get(split, split), [line.get(c) for c in columns])
        for (dataset, split), line in lines.items()
    ]
    return {"heads": heads, "lines": body}


def missing(data: ReportData) -> list[str]:
    """Name the detectors and controllers that a full run has and this one lacks."""
    expected = {"detection": {**DETECTORS, **CONTROLS}}
    if not data.why_no_control:
        expected["controller"] = CONTROLLERS
    if len(data.selection) == 1:  # of the with-context pass beside the other
        del expected["detection"]["without_closed_book"]
    return [
        label
        for experiment, labels in expected.items()
        for name, label in labels.items()
        if name not in OPTIONAL
        and not ResultTable(data.rows).select(experiment=experiment, detector=name)
    ]


def _environment() -> jinja2.Environment:
    """Set up the template engine: everything is escaped, nothing may be undefined."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["interval"] = interval
    environment.filters["measured"] = measured
    environment.filters["lead_cells"] = cells_of
    environment.filters["lead_sentence"] = sentence
    environment.filters["tint"] = lambda p: sum(p >= step for step in P_STEPS)
    return environment


def render_report(data: ReportData) -> str:
    """Return the page."""
    answered = findings(data.rows, data.accuracy)
    titles = titles_of(data.judged)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            data=data,
            headlines=headlines(data),
            findings=grids(answered),
            sentences=sentences(answered),
            remarks=remarks(data.rows, data.accuracy, data.sweep, data.selection),
            detection=detection_table(data.rows, titles=titles),
            panoramas=panoramas(data.rows, titles),
            titles=titles,
            cost_heads=COST_HEADS,
            cost_tables=cost_tables(data.judged, data.rows),
            cost_pictures=cost_pictures(data.judged, data.rows),
            paired=paired_table(data.rows),
            leads={title: leads(data.rows, name) for name, title in TITLES.items()},
            lead_heads=HEADS,
            floors=floor_table(data.rows),
            at_equal_length=equal_length_table(data.rows),
            at_equal_length_paired=paired_table(data.rows, "at_equal_length_paired"),
            permuted=detection_table(data.rows, labels=CONTROLS),
            spans=detection_table(
                data.rows,
                experiment="span_decision",
                labels=SPAN_DECISIONS,
                splits=("validation", "test", "ood"),
            ),
            controller=controller_table(data.rows),
            controller_paired=paired_table(data.rows, "controller_paired"),
            controller_query=paired_table(data.rows, "controller_query_paired"),
            accuracy=accuracy_grid(data),
            answers=answer_table(data.rows),
            noise=noise_table(data.rows),
            annotated=annotated_table(data.rows),
            reliability=reliability_pictures(data.reliability),
            sweep=sweep_pictures(data.sweep),
            synergy=synergy_pictures(data.rows),
            selection=selection_pictures(data.selection),
            optimism=ResultTable(data.rows).select(experiment="optimism"),
            frontier=frontier_pictures(data.control, data.rows),
            missing=missing(data),
            features=feature_table(data.rows),
            families=family_table(data.rows),
            dropped=span_table(data.rows),
            exhaustive=exhaustive_table(data.rows),
            set_names=set_names(data.selection, data.ablations),
            ranking=ranking_pictures(data.ranking),
            anatomy=anatomy_parts(data.rows, data.studies),
            setting_labels=SETTING_LABELS,
            split_labels=SPLIT_LABELS,
            metric_labels=METRIC_LABELS,
            p_steps=P_STEPS,
            n_shown=N_SHOWN,
        )
    )


def write_report(data: ReportData, path: Path) -> None:
    """Write the page to `path`; the same data give the same bytes."""
    write_text_atomic(path, render_report(data))
