"""The stage that writes the report: one page, self-contained, the same bytes each time.

And the same tables as Markdown and LaTeX, and the headline of a finished run.
"""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
import pandas

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.baselines.judge import costs_file, read_costs
from beatrice.benchmarks.results import costs, printing, significance, tables
from beatrice.benchmarks.results.anatomy import anatomy_parts
from beatrice.benchmarks.results.compare import Side
from beatrice.benchmarks.results.findings import (
    as_latex,
    as_markdown,
    facts,
    findings,
    grid_lines,
    grids,
    verdicts_in_words,
)
from beatrice.benchmarks.results.headline import (
    folds_in_words,
    headline,
    numbers,
    times_in_words,
    too_few_in_words,
)
from beatrice.benchmarks.results.ledger import Experiment
from beatrice.benchmarks.results.names import (
    CHAMPION,
    CONTROLS,
    DETECTORS,
    N_SHOWN,
    SETTING_LABELS,
    SPLIT_LABELS,
)
from beatrice.benchmarks.results.paper import verdict_counts
from beatrice.benchmarks.results.pictures import (
    PerSetting,
    frontier_pictures,
    ranking_pictures,
    reliability_pictures,
    selection_pictures,
    sweep_pictures,
    synergy_pictures,
)
from beatrice.benchmarks.results.tables import (
    interval,
    number,
    of_subject,
    results_of,
    row_value,
    subjects_in,
    where,
)
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import IN_DOMAIN, SETTINGS, Record, Setting, Share
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    question_files,
    read_examples,
    read_labels,
    settings_in_words,
    settings_of,
)
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.files import read_json, write_text_atomic
from beatrice.extract.run.rows import (
    ResultRow,
    Subject,
    gather,
    label_rule,
    published,
    read_result_rows,
    read_rows,
    rows_file,
)
from beatrice.extract.run.stages import Stage
from beatrice.extract.signals.extract import extract_config
from beatrice.jaxprobe.calibrate import run_bootstrap
from beatrice.jaxprobe.families import N_SUBSETS
from beatrice.jaxprobe.rows import read_sweep
from beatrice.jaxprobe.train import chosen_layer, grid_config, open_rows, run_outputs
from beatrice.pgir.controllers import CONTROLLERS, OPTIONAL
from beatrice.pgir.score_files import P_STEPS
from beatrice.selection.ablation import ablation_summary
from beatrice.selection.anatomy import Study
from beatrice.selection.anatomy.reach import Ranked
from beatrice.selection.exhaustive import ranking_summary
from beatrice.selection.stage import selection_summary

STUDIES = "anatomy/cases.json"  # in the run
IN_ORDER = (
    "data world answer label extract sweep train select calibrate evaluate control"
).split()


# What `evaluate`, `control` and `anatomy` leave for the report, read by type.


class Bin(Record, frozen=True, kw_only=True):
    """One bin of a reliability curve that holds `n` examples."""

    lower: Share
    upper: Share
    mean_p: Share
    accuracy: Share
    n: int


class Curves(Record, frozen=True, kw_only=True):
    """A setting's reliability, of the head's own probability and the calibrated one."""

    raw: tuple[Bin, ...]
    calibrated: tuple[Bin, ...]
    brier_raw: Share
    brier_calibrated: Share
    ece_raw: Share
    ece_calibrated: Share


class Point(Record, frozen=True, kw_only=True):
    """Quality and cost of PGIR on one set at one budget; "pgir" is the paper's."""

    controller: str
    dataset: str
    budget: int
    em: Share
    f1: Share
    generations: float


class Token(Record, frozen=True, kw_only=True):
    """A token of a case; the numbers are of the position that emitted it."""

    text: str
    span: str
    p: float
    surprisal: float
    entropy: float
    margin: float


class ShownDraft(Record, frozen=True, kw_only=True):
    """A draft of a case, with the passages that it was given."""

    setting: Setting
    answer: str
    p_correct: Share
    correct: bool
    passages: tuple[str, ...]
    tokens: tuple[Token, ...]


class Case(Record, frozen=True, kw_only=True):
    """A question of the controller's run, and what was made of it."""

    dataset: str
    question: str
    golds: tuple[str, ...]
    action: str
    verdict: str
    drafts: tuple[ShownDraft, ...]


class ShownAnswer(Record, frozen=True, kw_only=True):
    """An answer of a set; `golds` are the first of `n_golds`."""

    id: str
    question: str
    golds: tuple[str, ...]
    n_golds: int
    draft: ShownDraft


class ShownKind(Record, frozen=True, kw_only=True):
    """Some of the `n` answers of one kind, see `benchmarks.results.evaluate.KINDS`."""

    name: str
    n: int
    answers: tuple[ShownAnswer, ...]


class ShownSet(Record, frozen=True, kw_only=True):
    """What is shown of the `n` answers of a set; trusted from P = `threshold`.

    A threshold that is not certified divides the answers on the page alone.
    """

    setting: Setting
    dataset: str
    split: str
    n: int
    threshold: Share
    is_certified: bool = True
    kinds: tuple[ShownKind, ...]


class Control(Record, frozen=True, kw_only=True):
    """PGIR's policy, what it gives at each budget, and cases."""

    tau: Share
    budget: int
    cap: float
    frontier: tuple[Point, ...]
    cases: tuple[Case, ...]


def read_part(file: Path, kind: Any, verb: str) -> Any:
    """Return what a verb left for the report, as plain values."""
    value = read_json(file, kind, f"run `beatrice {verb}` again")
    return msgspec.to_builtins(list(value) if isinstance(value, tuple) else value)


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
      reliability: per setting as `Curves` has it.
      control: as `Control` has it, without its cases.
      why_no_control: why there are no controllers, in words; empty where there are.
      cases: as `Case` has them.
      shown: answers to look at, by setting and set, as `ShownSet` has them.
      ranking: per setting what `selection.exhaustive.ranking_summary` returns.
      ablations: per setting and variant the names of the encoders it reads.
      studies: cases of `beatrice anatomy`, as its `Study` has them.
      judged: what the rivals of `beatrice baselines` are and cost.
    """

    facts: Mapping[str, str]
    stage_seconds: Mapping[str, float]
    rows: Sequence[ResultRow]
    accuracy: Sequence[Mapping[str, Any]]
    sweep: PerSetting
    selection: PerSetting
    reliability: PerSetting
    control: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]]
    shown: Sequence[Mapping[str, Any]] = ()
    why_no_control: str = ""
    ranking: PerSetting = dataclasses.field(default_factory=dict)
    ablations: PerSetting = dataclasses.field(default_factory=dict)
    studies: Sequence[Mapping[str, Any]] = ()
    judged: Sequence[DetectorCost] = ()


# The page.


def answers_to_show(
    shown: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, str, Any]]]:
    """Return answers with their set and kind: some of each setting, and the others."""
    first, rest = [], []
    settings = set()
    for place in shown:
        n = 0 if place["setting"] in settings else 2
        settings.add(place["setting"])
        for kind in place["kinds"]:
            rows = [(place, kind["name"], answer) for answer in kind["answers"]]
            first += rows[:n]
            rest += rows[n:]
    return first, rest


def accuracy_grid(accuracy: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay the model's own accuracy out as datasets against settings and variants."""
    columns = list(dict.fromkeys((x["setting"], x["variant"]) for x in accuracy))
    lines: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for entry in accuracy:
        line = lines.setdefault((entry["dataset"], entry["split"]), {})
        line[(entry["setting"], entry["variant"])] = entry
    heads = [f"{SETTING_LABELS[at]}, {variant}" for at, variant in columns]
    body = [
        (dataset, SPLIT_LABELS.get(split, split), [line.get(c) for c in columns])
        for (dataset, split), line in lines.items()
    ]
    return {"heads": heads, "lines": body}


def missing(data: ReportData, results: pandas.DataFrame) -> list[str]:
    """Name the detectors and controllers that a full run has and this one lacks."""
    measured = subjects_in(where(results, experiment=("detection", "controller")))
    expected = {**DETECTORS, **CONTROLS}
    if len(data.selection) == 1:  # of the with-context pass beside the other
        del expected[Subject("without_closed_book")]
    if not data.why_no_control:
        names = (name for name in CONTROLLERS if name not in OPTIONAL)
        expected |= {Subject(name): CONTROLLERS[name] for name in names}
    return [title for subject, title in expected.items() if subject not in measured]


def optimism_table(results: pandas.DataFrame) -> tables.Table:
    """How much too good validation looks, in AUROC."""
    shown = where(results, experiment="optimism")
    lines = [
        ("The set searched", {"detector": "champion"}),
        ("One encoder, fixed before", {"detector": "early_fusion"}),
    ]
    return tables.by_place(shown, "Seen minus unseen half", lines)


def _environment() -> jinja2.Environment:
    """Set up the template engine: everything is escaped, nothing may be undefined."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"number": number, "interval": interval, "row_value": row_value}
    filters |= {"grid_lines": grid_lines, "verdict_counts": verdict_counts}
    filters |= {"counts_of": tables.counts_of, "lead_counts": significance.counts}
    environment.filters |= filters
    environment.filters["tint"] = lambda p: sum(p >= step for step in P_STEPS)
    return environment


def render_report(data: ReportData) -> str:
    """Return the page."""
    results = results_of(data.rows)
    titles = costs.titles_of(data.judged)
    answered = findings(results, data.accuracy)
    verdicts, undecided = verdicts_in_words(answered)
    first, rest = answers_to_show(data.shown)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            **_page_tables(data, results, titles),
            **_page_pictures(data, results),
            data=data,
            titles=titles,
            headline=headline(results, data.shown),
            too_few=too_few_in_words(data.accuracy),
            numbers=numbers(results, data.reliability),
            answers_first=first,
            answers_rest=rest,
            thresholds={
                x["setting"]: (x["threshold"], x.get("is_certified", True))
                for x in data.shown
            },
            findings=grids(answered),
            verdicts=verdicts,
            undecided=undecided,
            settings_shown=[SETTING_LABELS[x.setting] for x in grids(answered)],
            facts=facts(results, data.accuracy, data.sweep, data.selection),
            missing=missing(data, results),
            settings_of_ablations=[SETTING_LABELS[x] for x in data.ablations],
            anatomy=anatomy_parts(results, data.studies),
            stage_times=times_in_words(data.stage_seconds),
            verdict_of=folds_in_words(results, data.facts, data.selection),
            setting_labels=SETTING_LABELS,
            split_labels=SPLIT_LABELS,
            p_steps=P_STEPS,
            n_shown=N_SHOWN,
        )
    )


def _page_tables(
    data: ReportData, results: pandas.DataFrame, titles: dict[Subject, str]
) -> dict[str, Any]:
    permuted, spans = tables.control_tables(results)
    return {
        "main_detectors": tables.main_detectors(results, titles),
        "detection": tables.detection_table(results, titles=titles),
        "panoramas": tables.panoramas(results, titles),
        "cost_heads": costs.HEADS,
        "cost_tables": costs.cost_tables(data.judged, results),
        "paired": tables.paired_table(results),
        "leads": {
            title: significance.leads(results, name)
            for name, title in significance.TITLES.items()
        },
        "lead_heads": significance.HEADS,
        "lead_lines": lambda x: significance.lines(x, titles, "%s*"),
        "floors": tables.floor_table(results),
        "at_equal_length": tables.equal_length_table(results),
        "at_equal_length_paired": tables.paired_table(
            results, "at_equal_length_paired"
        ),
        "permuted": permuted,
        "spans": spans,
        "controller": tables.controller_table(results),
        "controller_paired": tables.paired_table(results, "controller_paired"),
        "controller_query": tables.paired_table(results, "controller_query_paired"),
        "accuracy": accuracy_grid(data.accuracy),
        "answers": tables.answer_table(results),
        "noise": tables.noise_table(results),
        "annotated": tables.annotated_table(results),
        "optimism": optimism_table(results),
        "features": tables.feature_table(results),
        "families": tables.family_table(results),
        "dropped": tables.span_table(results),
        "exhaustive": tables.exhaustive_table(results),
        "set_names": [
            (label, *names)
            for label, names in tables.set_names(data.selection, data.ablations)
        ],
    }


def _page_pictures(data: ReportData, results: pandas.DataFrame) -> dict[str, Any]:
    frontier = frontier_pictures(data.control, results)
    return {
        "cost_pictures": costs.cost_pictures(data.judged, results),
        "reliability": reliability_pictures(data.reliability),
        "figures": [
            *sweep_pictures(data.sweep),
            *frontier[:1],
            *synergy_pictures(results),
        ],
        "frontier": frontier[1:],
        "selection": selection_pictures(data.selection),
        "ranking": ranking_pictures(data.ranking),
    }


# The stage.


def _facts(run: RunDir) -> dict[str, str]:
    n_questions = Counter(example.split for example in read_examples(run))
    splits = ("train", "validation", "test", "ood")
    extract = extract_config(run)
    return {
        "Backbone": run.section("backbone", BackboneConfig).model,
        "Preset": run.preset,
        "Seed": str(run.seed),
        "Settings": settings_in_words(run),
        "Questions": ", ".join(f"{n_questions[split]} {split}" for split in splits),
        "Labels by": label_rule(run),
        "Layer of the hidden states": str(chosen_layer(run)),
        "Training seeds": str(grid_config(run).train.n_seeds),
        "Answer span": extract.answer_span,
        "Kept": extract.describe(),
    }


def _why_no_control(settings: Sequence[Setting]) -> str:
    if len(settings) < len(SETTINGS):
        return f"needs both settings, and this run has {settings[0]} alone"
    return "was not run: `beatrice control RUN_DIR` does it"


def report_data(run: RunDir) -> ReportData:
    """Collect what the report shows from the run's files."""
    settings, has_control = settings_of(run), run.stage_record("control") is not None
    on_request = published(run)
    ranked = settings if "exhaustive" in on_request else ()
    records = {n: run.stage_record(n) for n in (*IN_ORDER, "report", *on_request)}
    control: dict[str, Any] = {}
    if has_control:
        control = read_part(run.control / "control.json", Control, "control")
    studies: list[dict[str, Any]] = []
    if "anatomy" in on_request:
        studies = read_part(run.path / STUDIES, tuple[Study, ...], "anatomy")
    # What a question takes each controller, which differs from machine to machine.
    seconds = run.control / "seconds.jsonl"
    rows = [*read_result_rows(run), *(read_rows(seconds) if seconds.exists() else ())]
    curves = dict[Setting, Curves]
    return ReportData(
        facts=_facts(run),
        stage_seconds={name: r.seconds for name, r in records.items() if r is not None},
        rows=rows,
        accuracy=count_correct(read_examples(run), read_labels(run)),
        sweep=msgspec.to_builtins(read_sweep(run.sweep).settings),
        selection={setting: selection_summary(run, setting) for setting in settings},
        reliability=read_part(run.path / "reliability.json", curves, "evaluate"),
        shown=read_part(run.path / "shown.json", tuple[ShownSet, ...], "evaluate"),
        control={k: v for k, v in control.items() if k != "cases"},
        cases=control.get("cases", ()),
        why_no_control="" if has_control else _why_no_control(settings),
        ranking={setting: ranking_summary(run, setting) for setting in ranked},
        ablations=ablation_summary(run) if "ablate" in on_request else {},
        studies=studies,
        judged=read_costs(costs_file(run)) if "baselines" in on_request else (),
    )


def findings_files(run: RunDir) -> list[Path]:
    """Return where the answers to the paper's questions lie: Markdown and LaTeX."""
    return [run.path / f"findings.{kind}" for kind in ("md", "tex")]


def panorama_files(run: RunDir) -> list[Path]:
    """Return where the tables of all detectors lie: Markdown and LaTeX."""
    return [run.path / f"panorama.{kind}" for kind in ("md", "tex")]


def tables_as_text(data: ReportData) -> tuple[str, str, str, str]:
    """Return findings and the paper's panoramas, each as Markdown and as LaTeX."""
    results, titles = results_of(data.rows), costs.titles_of(data.judged)
    answered = findings(results, data.accuracy)
    beside = facts(results, data.accuracy, data.sweep, data.selection)
    panoramas = tables.panoramas(results, titles)
    markdown = [f"### {h}\n\n{printing.as_markdown(t)}" for h, t in panoramas.items()]
    markdown.append(significance.as_markdown(results, titles))
    markdown.append(costs.as_markdown(data.judged, results))
    latex = [f"% {h}\n{printing.as_latex(t)}" for h, t in panoramas.items()]
    latex.append(significance.as_latex(results, titles))
    return (
        as_markdown(answered, beside),
        as_latex(answered),
        "\n".join(markdown),
        "\n".join(latex),
    )


def tables_of(
    results: pandas.DataFrame, titles: tables.Titles | None = None
) -> dict[str, tuple[str, tables.Table]]:
    """Return headings and tables by the names that `report --print` knows."""
    named = {
        "detectors": ("Detectors", tables.panorama_table(results, None, titles)),
        "closed-book": (
            "Closed-book, every set",
            tables.panorama_table(results, "closed_book", titles),
        ),
        "with-context": (
            "With context, every set",
            tables.panorama_table(results, "with_context", titles),
        ),
        "ablations": ("What is taken away", tables.feature_table(results)),
        "gains": (
            "Gain of the selected encoders in AUROC",
            tables.paired_table(results),
        ),
        "controllers": ("Retrieval controllers", tables.controller_table(results)),
        "controller-gains": (
            "Gain of PGIR",
            tables.paired_table(results, "controller_paired"),
        ),
    }
    return {name: pair for name, pair in named.items() if pair[1].lines}


def run_table(run: RunDir, name: str) -> str:
    """Return a table of a run as text, with its heading; or all of them."""
    judged = read_costs(costs_file(run)) if "baselines" in published(run) else ()
    named = tables_of(results_of(read_result_rows(run)), costs.titles_of(judged))
    if name != "all" and name not in named:
        raise ValueError(
            f"this run has no table {name}; expected all, {', '.join(named)}"
        )
    shown = named.values() if name == "all" else [named[name]]
    return "\n\n".join(f"{h}\n{printing.as_text(t)}" for h, t in shown)


def rows_as_markdown(rows: Sequence[ResultRow]) -> str:
    """Return the tables of some rows that need nothing else of a run, as Markdown."""
    results = results_of(rows)
    parts = [
        f"### {heading}\n\n{printing.as_markdown(table)}"
        for heading, table in tables_of(results).values()
    ]
    return "\n".join([*parts, significance.as_markdown(results)])


def _report(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    gather(run, progress)
    data = report_data(run)
    files = [*findings_files(run), *panorama_files(run)]
    for path, text in zip(files, tables_as_text(data), strict=True):
        write_text_atomic(path, text)
    write_text_atomic(run.report, render_report(data))


def _inputs(run: RunDir) -> list[Path]:
    has_control = run.stage_record("control") is not None
    return [
        *question_files(run),
        run.sweep,
        run.labels,
        run.selection,
        run.path / "reliability.json",
        run.path / "shown.json",
        rows_file(run, "evaluate"),
        *((run.control, rows_file(run, "control")) if has_control else ()),
        *(rows_file(run, name) for name in published(run)),
        *([costs_file(run)] if "baselines" in published(run) else []),
        *([run.path / STUDIES] if "anatomy" in published(run) else []),
    ]


REPORT = Stage(
    name="report",
    inputs=_inputs,
    outputs=lambda run: [
        run.report,
        run.results,
        *findings_files(run),
        *panorama_files(run),
    ],
    work=_report,
)


def run_side(run: RunDir) -> Side:
    """Return what is compared of an evaluated run."""
    results = results_of(read_result_rows(run))
    counts = count_correct(read_examples(run), read_labels(run))
    return Side(
        name=str(run.path),
        results=results,
        answered=findings(results, counts),
        validation={setting: _ranked(run, setting) for setting in settings_of(run)},
        intervals=run_bootstrap(run),
    )


def _ranked(run: RunDir, setting: Setting) -> Ranked:
    """Return what a run's encoders say of its validation answers of a setting."""
    _, rows = open_rows(run, setting)
    logits, n_seeds = run_outputs(run, setting).logits, grid_config(run).train.n_seeds
    where = rows.where("validation")
    seeds = np.asarray(logits).reshape(n_seeds, N_SUBSETS, -1)
    return Ranked(rows.ids[where], rows.labels[where], seeds[:, :, where])


def run_experiment(run: RunDir) -> Experiment:
    """Return what the paper's numbers are laid beside, of an evaluated run."""
    data = read_manifest(run.path)["sections"].get("data", {})
    return Experiment(
        rows=read_result_rows(run),
        examples=read_examples(run),
        labels=read_labels(run),
        backbone=Path(run.section("backbone", BackboneConfig).model).name,
        label_rule=label_rule(run),
        passages=data.get("context", "of the embedded world"),
        n_seeds=grid_config(run).train.n_seeds,
        n_resamples=run_bootstrap(run).n_resamples,
    )


def summary(path: Path) -> dict[str, Any]:
    """Return the headline of a finished run: in words, and numbers as values."""
    run = RunDir(path)
    results = results_of(read_result_rows(run))
    at = {"dataset": IN_DOMAIN, "split": "test", "seed": "mean"}
    champion = where(results, experiment="detection", **of_subject(CHAMPION), **at)
    macro = where(results, experiment="controller_macro", metric="em")
    values = {f"{row.setting}/{row.metric}": row.value for row in champion["row"]}
    values |= {f"{row.detector}/em": row.value for row in macro["row"]}
    data = report_data(run)
    lines = [*headline(results, data.shown)]
    lines.append(too_few_in_words(data.accuracy))
    for label, value, detail in numbers(results, data.reliability):
        lines.append(f"{label}: {value} ({detail})")
    chosen = {x: " ".join(y["selected"]) for x, y in data.selection.items()}
    lines.append(
        f"Selected: {'; '.join(f'{x} {names}' for x, names in chosen.items())}"
    )
    lines += ["", f"The page:   {run.report}"]
    lines.append(f"Its tables: beatrice report {path} --print detectors")
    if (answer := _surest(data.shown)) is not None:
        question, text = answer["question"], answer["draft"]["answer"]
        asked = shlex.join(["--question", question, "--answer", text])
        lines += [f"Next:       beatrice score {path} \\", f"              {asked}"]
    return {"headline": values, "text": "\n".join(lines)}


def _surest(shown: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the first right and trusted answer from memory."""
    answers = (
        answer
        for place in shown
        if place["setting"] == "closed_book"
        for kind in place["kinds"]
        for answer in kind["answers"]
    )
    return next(answers, None)
