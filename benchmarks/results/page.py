"""The report page of a run: tables, figures and plain words, in one HTML file.

Equal data give equal bytes. The headline is also printed on the terminal.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import pandas

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.results import figures, findings, names, paper, rivals, tables
from beatrice.benchmarks.results.anatomy import anatomy_parts
from beatrice.benchmarks.results.figures import Picture, picture
from beatrice.benchmarks.results.shown import (
    Control,
    Curves,
    Point,
    ShownAnswer,
    ShownSet,
)
from beatrice.benchmarks.results.tables import (
    POOLED,
    by_pair,
    by_subject,
    excludes_zero,
    find,
    interval,
    number,
    of_rival,
    row_value,
    subjects_in,
    where,
)
from beatrice.extract.label.labels import too_few_answers
from beatrice.extract.records import IN_DOMAIN, SETTINGS, Setting
from beatrice.extract.run.rows import MACRO, ResultRow, Subject
from beatrice.jaxprobe.stages import LayerCurve
from beatrice.pgir.controllers import CONTROLLERS, OPTIONAL, titles_of
from beatrice.pgir.score_files import P_STEPS

if TYPE_CHECKING:  # this loads JAX
    from beatrice.selection.analysis import CaseStudy

PerSetting = Mapping[Setting, Mapping[str, Any]]
SETTINGS_IN_WORDS = {"closed_book": "from memory", "with_context": "with passages"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the page shows; the section of an empty field is left out."""

    facts: Mapping[str, str]  # model, seed, preset, counts, ..., in display order
    stage_seconds: Mapping[str, float]  # wall time per stage, in order
    rows: Sequence[ResultRow]
    # `{dataset, split, setting, variant, n, n_correct}` of the model's own answers.
    accuracy: Sequence[Mapping[str, Any]]
    sweep: Mapping[Setting, LayerCurve]
    # Per setting `{"rounds": [{"added", "auroc", "candidates"}], "selected": [names],
    # "stop": why it stopped}`.
    selection: PerSetting
    reliability: Mapping[Setting, Curves]
    control: Control | None
    shown: Sequence[ShownSet] = ()  # example answers, by setting and set
    # Per setting the value of `selection.exhaustive.ranking_summary`.
    ranking: PerSetting = dataclasses.field(default_factory=dict)
    # Names of the encoders that each variant reads, by setting and variant.
    ablations: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    studies: "Sequence[CaseStudy]" = ()  # cases of `beatrice anatomy`
    judged: Sequence[DetectorCost] = ()  # detectors of `beatrice baselines`, with costs


def render_report(data: ReportData) -> str:
    """Return the page as HTML, made from the template `page.html.j2`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,  # raise on undefined names
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"number": number, "interval": interval, "row_value": row_value}
    filters["setting"] = names.SETTING_LABELS.__getitem__
    filters["tint"] = lambda p: sum(p >= step for step in P_STEPS)
    environment.filters |= filters
    results = tables.results_of(data.rows)
    answered = findings.findings(results, data.accuracy)
    verdicts, undecided = findings.verdicts_in_words(answered)
    first, rest = answers_to_show(data.shown)
    frontier = frontier_pictures(data.control, results)
    return environment.get_template("page.html.j2").render(
        data=data,
        rows=results,
        titles=rivals.titles_of(data.judged),
        tables=tables,
        names=names,
        rivals=rivals,
        paper=paper,
        findings=findings,
        headline=headline(results, data.shown),
        too_few=too_few_in_words(data.accuracy),
        numbers=numbers(results, data.reliability),
        answers_first=first,
        answers_rest=rest,
        grids=findings.grids(answered),
        verdicts=verdicts,
        undecided=undecided,
        facts=findings.facts(results, data.accuracy, data.sweep, data.selection),
        accuracy=accuracy_grid(data.accuracy),
        missing=missing(data, results),
        anatomy=anatomy_parts(results, data.studies),
        verdict_of=folds_in_words(results, data.facts, data.selection),
        p_steps=P_STEPS,
        reliability=reliability_pictures(data.reliability),
        figures=[
            *sweep_pictures(data.sweep),
            *frontier[:1],
            *synergy_pictures(results),
        ],
        frontier=frontier[1:],
        selection=selection_pictures(data.selection),
        ranking=ranking_pictures(data.ranking),
    )


ShownRow = tuple[ShownSet, str, ShownAnswer]  # an answer with its set and kind


def answers_to_show(shown: Sequence[ShownSet]) -> tuple[list[ShownRow], list[ShownRow]]:
    """Return the answers to show first (some of each setting), and the others."""
    first, rest, settings = [], [], set()
    for shown_set in shown:
        n = 0 if shown_set.setting in settings else 2
        settings.add(shown_set.setting)
        for kind in shown_set.kinds:
            rows = [(shown_set, kind.name, answer) for answer in kind.answers]
            first += rows[:n]
            rest += rows[n:]
    return first, rest


def accuracy_grid(accuracy: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the model's own accuracy by dataset, and by setting and variant.

    If a column has several in-domain sets of a split, a line at the end pools them.
    """
    columns = list(dict.fromkeys((x["setting"], x["variant"]) for x in accuracy))
    lines: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for entry in accuracy:
        line = lines.setdefault((entry["dataset"], entry["split"]), {})
        line[(entry["setting"], entry["variant"])] = entry
    n_sets = Counter((x["split"], x["setting"], x["variant"]) for x in accuracy)
    for entry in accuracy:
        at = entry["setting"], entry["variant"]
        if (split := entry["split"]) != "ood" and n_sets[split, *at] > 1:
            line = lines.setdefault((IN_DOMAIN, split), {})
            counts = line.get(at, {"n": 0, "n_correct": 0})
            line[at] = {name: counts[name] + entry[name] for name in counts}
    heads = [f"{names.SETTING_LABELS[at]}, {variant}" for at, variant in columns]
    body = [
        (dataset, names.SPLIT_LABELS.get(split, split), [line.get(c) for c in columns])
        for (dataset, split), line in lines.items()
    ]
    return {"heads": heads, "lines": body}


def missing(data: ReportData, results: pandas.DataFrame) -> list[str]:
    """Return the titles of detectors and controllers that this run lacks."""
    measured = subjects_in(where(results, experiment=("detection", "controller")))
    expected = {**names.DETECTORS, **names.CONTROLS}
    if len(data.selection) == 1:  # it exists only in runs with both settings
        del expected[Subject("without_closed_book")]
    if data.control is not None:
        required = (name for name in CONTROLLERS if name not in OPTIONAL)
        expected |= {Subject(name): CONTROLLERS[name] for name in required}
    return [title for subject, title in expected.items() if subject not in measured]


# Sentences and numbers at the top of the page.


def _champion_and_perplexity(
    results: pandas.DataFrame, setting: str
) -> tuple[ResultRow | None, ResultRow | None, ResultRow | None]:
    """Return both AUROCs on the pooled in-domain test questions, and the difference."""
    at = {**POOLED, "setting": setting, "metric": "auroc"}
    rows = by_subject(results, experiment="detection", **at)
    gains = by_pair(results, experiment="paired", **at)
    gain = gains.get((names.CHAMPION, names.PERPLEXITY))
    return rows.get(names.CHAMPION), rows.get(names.PERPLEXITY), gain


def _ranking_in_words(results: pandas.DataFrame) -> str:
    """Say how often our score and perplexity rank a right answer above a wrong one."""
    ours, theirs = [], []
    for setting, words in SETTINGS_IN_WORDS.items():
        row, rival, gain = _champion_and_perplexity(results, setting)
        if row is None or row.value is None:
            continue
        ours.append(f"{100 * row.value:.0f} of 100 pairs {words}")
        if rival is not None and rival.value is not None:
            compared = ""
            if gain is not None and gain.value is not None:
                compared = " (worse)" if gain.value > 0 else " (better)"
                compared = compared if excludes_zero(gain) else " (no clear difference)"
            theirs.append(f"{100 * rival.value:.0f}{compared}")
    if not ours:
        return ""
    text = f"A right answer scores above a wrong one in {' and in '.join(ours)}"
    if theirs:
        text += f"; by the model's own perplexity in {' and in '.join(theirs)}"
    return f"{text}."


def _trust_in_words(shown: Sequence[ShownSet], results: pandas.DataFrame) -> str:
    """Say what share of test answers is trusted, and how many of these are right."""
    parts, wanted = [], {x.wanted for x in shown if x.wanted is not None}
    for setting, words in SETTINGS_IN_WORDS.items():
        n: Counter[str] = Counter()
        is_certified = True
        for shown_set in shown:
            if (shown_set.setting, shown_set.split) == (setting, "test"):
                n.update({kind.name: kind.n for kind in shown_set.kinds})
                is_certified &= shown_set.is_certified
        if not n.total():
            continue
        right, all_right = n["right and trusted"], n["right and not trusted"]
        n_trusted = right + n["wrong and missed"]
        of_all = f"of {n.total():,} answers {words}"
        text, besides = f"{100 * n_trusted / n.total():.0f} % {of_all}", ""
        if not is_certified:
            text = f"none {of_all}"
            besides = _trust_at_most(results, setting)
        elif n_trusted:
            text += f", of which {100 * right / n_trusted:.0f} % are right"
        every = 100 * (right + all_right) / n.total()
        parts.append(f"{text} ({besides}all answers: {every:.0f} % right)")
    asked = "".join(f"At a requested precision of {100 * x:g} %, " for x in wanted)
    return f"{asked}beatrice trusts {' and '.join(parts)}." if parts else ""


def _trust_at_most(results: pandas.DataFrame, setting: str) -> str:
    """Say what is trusted at the highest precision that a P is certified for."""
    at = {"experiment": "decision", "kind": "trust", "setting": setting, **POOLED}
    rows = where(results, metric="precision", **at)["row"]
    certified = {row.wanted: row.value for row in rows if row.value is not None}
    if not certified:
        return "no P is certified for any precision; "
    most = max(certified)
    coverage = find(results, metric="coverage", wanted=most, **at)
    share = 0.0 if coverage is None else coverage.value or 0.0
    right = f"of which {100 * certified[most]:.0f} % are right"
    return f"at {100 * most:g} % it trusts {100 * share:.0f} %, {right}; "


def _distrust_in_words(results: pandas.DataFrame) -> str:
    """Say what share of test answers is distrusted, and how many of these are wrong."""
    parts = []
    for setting, words in SETTINGS_IN_WORDS.items():
        about = {"experiment": "decision", "kind": "distrust", "wanted": 0.9}
        at = {"setting": setting, **about, **POOLED}
        coverage, wrong = (
            find(results, metric=x, **at) for x in ("coverage", "precision")
        )
        if coverage is not None and wrong is not None and wrong.value is not None:
            share = f"{100 * (coverage.value or 0.0):.0f} % of the answers {words}"
            parts.append(f"{share}, of which {100 * wrong.value:.0f} % are wrong")
    text = f"At a requested precision of 90 %, it distrusts {' and '.join(parts)}."
    return text if parts else ""


def headline(results: pandas.DataFrame, shown: Sequence[ShownSet]) -> list[str]:
    """Return sentences on how well answers are ranked, trusted and distrusted."""
    sentences = (
        _ranking_in_words(results),
        _trust_in_words(shown, results),
        _distrust_in_words(results),
    )
    return list(filter(None, sentences))


def too_few_in_words(accuracy: Sequence[Mapping[str, Any]]) -> str:
    """Say which settings have too few training answers for conclusions, if any."""
    reasons = too_few_answers(accuracy).items()
    return " ".join(f"{names.SETTING_LABELS[x]}: {reason}." for x, reason in reasons)


def _gain(row: ResultRow | None, title: str) -> str:
    """Format the difference to a rival; empty if it was not measured."""
    if row is None or row.value is None:
        return ""
    return f"{row_value(row)} [{interval(row)}] against {title[0].lower()}{title[1:]}"


def numbers(
    results: pandas.DataFrame, reliability: Mapping[Setting, Curves]
) -> list[tuple[str, str, str]]:
    """Return label, value and detail of each number at the top of the page."""
    shown = []
    for setting, words in SETTINGS_IN_WORDS.items():
        row, _, gain = _champion_and_perplexity(results, setting)
        label = f"AUROC {words}"
        if row is not None and row.value is None:
            shown.append((label, "–", str(row.reason)))
        elif row is not None:
            compared = _gain(gain, names.COMPARED[names.PERPLEXITY])
            detail = (f"{interval(row)}", compared, f"{row.n:,} answers")
            shown.append((label, row_value(row), "; ".join(filter(None, detail))))
    for setting, curves in reliability.items():
        label = f"Calibration error {SETTINGS_IN_WORDS[setting]}"
        detail = f"{number(curves.ece_raw)} before calibration"
        if is_worse(curves):
            detail = f"worse than the {detail}: here P ranks answers, but is less exact"
        detail += _by_chance(curves)
        shown.append((label, number(curves.ece_calibrated), detail))
    pgir = {"experiment": "controller_macro", "detector": "pgir", "dataset": MACRO}
    em, cost = (find(results, metric=m, **pgir) for m in ("em", "generations"))
    if em is not None and cost is not None:
        once = {"experiment": "controller_paired", "dataset": MACRO, "metric": "em"}
        once |= of_rival(Subject("vanilla_rag"))
        gain = _gain(find(results, **once), CONTROLLERS["vanilla_rag"])
        detail = (gain, f"{row_value(cost)} generations per question")
        label = "Exact match, PGIR, mean of the sets"
        shown.append((label, row_value(em), "; ".join(filter(None, detail))))
    return shown


def _by_chance(curves: Curves) -> str:
    """Say how large the error may be by chance; empty if that is unknown."""
    chance = curves.ece_by_chance
    return "" if chance is None else f"; up to {number(chance)} is chance"


def is_worse(curves: Curves) -> bool:
    """Whether calibration made the error larger, and larger than by chance."""
    chance = curves.ece_by_chance
    return chance is not None and curves.ece_calibrated > max(curves.ece_raw, chance)


def folds_in_words(
    results: pandas.DataFrame, facts: Mapping[str, str], selection: PerSetting
) -> dict[str, str]:
    """Return a few words on some of the folded sections, by their ids."""
    chosen = (
        f"{names.SETTING_LABELS[setting]} {' '.join(search['selected'])}"
        for setting, search in selection.items()
    )
    macro = where(results, experiment="controller_macro", metric="em", seed="mean")
    em = {row.detector: row for row in macro["row"] if row.value is not None}
    known = [x for x in ("pgir", "vanilla_rag", "no_rag") if x in em]
    shown = ", ".join(f"{CONTROLLERS[x]} {row_value(em[x])}" for x in known)
    nouns = {"Backbone": "", "Questions": " questions"}
    run = [facts[name] + noun for name, noun in nouns.items() if name in facts]
    return {
        "selection": "; ".join(chosen),
        "controller": f"Exact match: {shown}" if shown else "",
        "run": "; ".join(run),
    }


# Figures with their titles and captions.


def reliability_pictures(reliability: Mapping[Setting, Curves]) -> list[Picture]:
    """Draw the reliability curve of each setting."""
    pictures = []
    for setting, curves in reliability.items():
        worse = " (worse on these answers)" if is_worse(curves) else ""
        caption = (
            f"Brier {number(curves.brier_raw)} raw, {number(curves.brier_calibrated)} "
            f"calibrated; calibration error (ECE) {number(curves.ece_raw)} raw, "
            f"{number(curves.ece_calibrated)} calibrated{worse}{_by_chance(curves)}. "
            "Dashed: perfect calibration; upright lines: 95 % intervals of the "
            "calibrated shares. Below: answers per bin."
        )
        figure = figures.reliability(curves, setting)
        title = names.SETTING_LABELS[setting]
        pictures.append(picture(figure, f"reliability-{setting}", title, caption))
    return pictures


def sweep_pictures(sweep: Mapping[Setting, LayerCurve]) -> list[Picture]:
    """Draw validation AUROC by layer, both settings in one picture."""
    if not sweep:
        return []
    caption = (
        "Pale points are seeds, the line is their mean, and the ring marks the best "
        "layer."
    )
    for setting, curve in sweep.items():
        caption += (
            f" {names.SETTING_LABELS[setting]}: {curve.n_train:,} training and "
            f"{curve.n_validation:,} validation answers."
        )
    figure = figures.layer_sweep(sweep)
    return [picture(figure, "sweep", "Hidden states, layer by layer", caption)]


def synergy_pictures(results: pandas.DataFrame) -> list[Picture]:
    """Draw all encoders' validation AUROC on the pooled in-domain sets."""
    at = {"experiment": "detection", "detector": "encoder", "metric": "auroc"}
    at |= {"dataset": IN_DOMAIN, "split": "validation", "seed": "mean"}
    pictures = []
    for setting in SETTINGS:
        rows = where(results, setting=setting, **at)["row"].tolist()
        auroc = {str(r.families): r.value for r in rows if r.value is not None}
        if not auroc:
            continue
        caption = (
            "Dots mark the families that an encoder reads; bars in full colour read "
            "hidden states. The axis is cropped."
        )
        if halves := [(r.ci_high - r.ci_low) / 2 for r in rows if r.ci_low is not None]:
            half = number(statistics.median_high(halves))
            caption += f" The 95 % interval of one bar is about ±{half}."
        for row in rows:
            if row.value is None:
                caption += f" {row.families} is undefined: {row.reason}."
        title = f"Encoders of all combinations, {names.SETTING_LABELS[setting].lower()}"
        figure = figures.synergy(auroc, setting)
        pictures.append(picture(figure, f"synergy-{setting}", title, caption))
    return pictures


def selection_pictures(selection: PerSetting) -> list[Picture]:
    """Draw the greedy search of each setting."""
    return [
        picture(
            figures.selection_path(search["rounds"], setting),
            f"selection-{setting}",
            names.SETTING_LABELS[setting],
            f"Selected: {', '.join(search['selected'])}. Stopped: {search['stop']}.",
        )
        for setting, search in selection.items()
        if search["rounds"]
    ]


def frontier_curve(
    entries: Sequence[Point],
) -> tuple[list[dict[str, float]], list[str]]:
    """Return `{budget, generations, em, f1}` of each budget, and the averaged sets."""
    points = pandas.DataFrame(map(msgspec.structs.asdict, entries))
    datasets = points["dataset"].unique().tolist()
    for budget, n in Counter(points["budget"]).items():
        if n != len(datasets):
            raise ValueError(
                f"the frontier at budget {budget} has {n} entries, expected one for "
                f"each set ({', '.join(datasets)})"
            )
    means = points.pivot_table(index="budget", values=["generations", "em", "f1"])
    return means.reset_index().to_dict("records"), datasets


def frontier_pictures(
    control: Control | None, results: pandas.DataFrame
) -> list[Picture]:
    """Draw EM and F1 against generations per question."""
    if control is None:
        return []
    by_name: dict[str, list[Point]] = {}
    for point in control.frontier:
        by_name.setdefault(point.controller, []).append(point)
    curves, datasets = {}, []
    for name, entries in by_name.items():
        curves[CONTROLLERS.get(name, name)], datasets = frontier_curve(entries)
    means = where(results, experiment="controller_macro", dataset=MACRO, seed="mean")
    values = {(row.detector, row.metric): row.value for row in means["row"]}
    pictures = []
    for metric in ("em", "f1"):
        points = {
            title: (values[x, "generations"], values[x, metric])
            for x, title in titles_of(means["detector"].unique()).items()
            if x not in by_name
            and None not in (values.get((x, "generations")), values.get((x, metric)))
        }
        figure = figures.frontier(curves, points, metric, control.budget)
        caption = (
            f"Mean over {', '.join(datasets)}. A line's numbers are budgets B, the "
            "most retrievals per question; the ring marks the chosen one."
        )
        title = f"{metric.upper()} against cost"
        pictures.append(picture(figure, f"frontier-{metric}", title, caption))
    return pictures


def ranking_pictures(ranked: PerSetting) -> list[Picture]:
    """Draw the ranking of all sets of three encoders, in each setting."""
    return [
        picture(
            figures.ranking(ranking, setting),
            f"ranking-{setting}",
            names.SETTING_LABELS[setting],
            f"{ranking['n_sets']:,} sets of three, best to worst. The greedy search's "
            f"{' '.join(ranking['greedy'])} is number {ranking['rank']:,} (dashed), "
            f"{ranking['gap']:.4f} AUROC below the best, "
            f"{' '.join(ranking['best'])}. Ribbons: how many of the three encoders "
            "read a family, with context in orange, closed-book in blue.",
        )
        for setting, ranking in ranked.items()
    ]
