"""The stage that writes the report, and the headline of a finished run."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.baselines.judge import costs_file, read_costs
from beatrice.benchmarks.panorama import costs, layout, significance
from beatrice.benchmarks.paper.ledger import Experiment
from beatrice.benchmarks.results.compare import Side
from beatrice.benchmarks.results.findings import (
    as_latex,
    as_markdown,
    findings,
    remarks,
)
from beatrice.benchmarks.results.paired import paired_table
from beatrice.benchmarks.results.report import ReportData, write_report
from beatrice.benchmarks.results.saved import (
    STUDIES,
    read_control,
    read_reliability,
    read_seconds,
    read_shown,
    read_studies,
)
from beatrice.benchmarks.results.tables import controller_table, detection_table
from beatrice.benchmarks.results.terminal import as_text
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import IN_DOMAIN, SETTINGS, Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    question_files,
    read_examples,
    read_labels,
    settings_in_words,
    settings_of,
)
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.files import write_text_atomic
from beatrice.extract.run.rows import (
    ResultRow,
    ResultTable,
    gather,
    label_rule,
    published,
    read_result_rows,
    rows_file,
)
from beatrice.extract.run.stages import Stage
from beatrice.extract.signals.extract import extract_config
from beatrice.jaxprobe.calibrate import (
    chosen_layer,
    grid_config,
    open_rows,
    run_bootstrap,
    run_outputs,
)
from beatrice.jaxprobe.families import N_SUBSETS
from beatrice.jaxprobe.rows import read_sweep
from beatrice.selection.ablation import ablation_summary
from beatrice.selection.anatomy.reach import Ranked
from beatrice.selection.exhaustive import ranking_summary
from beatrice.selection.stage import selection_summary

IN_ORDER = (
    "data world answer label extract sweep train select calibrate evaluate control"
).split()


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
    """Say why a run has no controllers."""
    if len(settings) < len(SETTINGS):
        return f"needs both settings, and this run has {settings[0]} alone"
    return "was not run: `beatrice control RUN_DIR` does it"


def report_data(run: RunDir) -> ReportData:
    """Collect what the report shows from the run's files."""
    settings, has_control = settings_of(run), run.stage_record("control") is not None
    control = read_control(run.control / "control.json") if has_control else {}
    on_request = published(run)
    ranked = settings if "exhaustive" in on_request else ()
    records = {n: run.stage_record(n) for n in (*IN_ORDER, "report", *on_request)}
    return ReportData(
        facts=_facts(run),
        stage_seconds={name: r.seconds for name, r in records.items() if r is not None},
        rows=[*read_result_rows(run), *read_seconds(run.control / "seconds.jsonl")],
        accuracy=count_correct(read_examples(run), read_labels(run)),
        sweep=msgspec.to_builtins(read_sweep(run.sweep).settings),
        selection={setting: selection_summary(run, setting) for setting in settings},
        reliability=read_reliability(run.path / "reliability.json"),
        shown=read_shown(run.path / "shown.json"),
        control={k: v for k, v in control.items() if k != "cases"},
        cases=control.get("cases", ()),
        why_no_control="" if has_control else _why_no_control(settings),
        ranking={setting: ranking_summary(run, setting) for setting in ranked},
        ablations=ablation_summary(run) if "ablate" in on_request else {},
        studies=read_studies(run.path / STUDIES) if "anatomy" in on_request else (),
        judged=read_costs(costs_file(run)) if "baselines" in on_request else (),
    )


def findings_files(run: RunDir) -> list[Path]:
    """Return where the answers to the paper's questions lie: Markdown and LaTeX."""
    return [run.path / f"findings.{kind}" for kind in ("md", "tex")]


def panorama_files(run: RunDir) -> list[Path]:
    """Return where the tables of all detectors lie: Markdown and LaTeX."""
    return [run.path / f"panorama.{kind}" for kind in ("md", "tex")]


def _write_panorama(
    run: RunDir, rows: Sequence[ResultRow], judged: Sequence[DetectorCost]
) -> None:
    """Write the paper's tables of detectors, and which leads are sure."""
    titles = costs.titles_of(judged)
    tables = layout.panoramas(rows, titles)
    of_leads = [
        spell(rows, titles)
        for spell in (significance.as_markdown, significance.as_latex)
    ]
    spelled = {h: layout.as_markdown(table) for h, table in tables.items()}
    markdown = [f"### {h}\n\n{text}" for h, text in spelled.items()]
    latex = [f"% {h}\n{layout.as_latex(table)}" for h, table in tables.items()]
    of_costs = costs.as_markdown(judged, rows)
    texts = ([*markdown, of_leads[0], of_costs], [*latex, of_leads[1]])
    for path, parts in zip(panorama_files(run), texts, strict=True):
        write_text_atomic(path, "\n".join(parts))


def _report(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    gather(run, progress)
    data = report_data(run)
    answered = findings(data.rows, data.accuracy)
    told = remarks(data.rows, data.accuracy, data.sweep, data.selection)
    markdown, latex = findings_files(run)
    write_text_atomic(markdown, as_markdown(answered, told))
    write_text_atomic(latex, as_latex(answered))
    _write_panorama(run, data.rows, data.judged)
    write_report(data, run.report)


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
    """Return what is compared of an evaluated run.

    Raises:
      ValueError: it has not been evaluated.
    """
    rows = read_result_rows(run)
    counts = count_correct(read_examples(run), read_labels(run))
    return Side(
        name=str(run.path),
        rows=rows,
        answered=findings(rows, counts),
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
    """Return what the paper's numbers are laid beside, of an evaluated run.

    Raises:
      ValueError: it has not been evaluated.
    """
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
    """Return the headline of a finished run: tables as text, numbers as values."""
    run = RunDir(path)
    rows = read_result_rows(run)
    table = ResultTable(rows)
    pooled = {"dataset": IN_DOMAIN, "split": "test", "seed": "mean"}
    champion = {"experiment": "detection", "detector": "champion", **pooled}
    headline = {
        f"{setting}/{metric}": table.value(**champion, setting=setting, metric=metric)
        for setting in settings_of(run)
        for metric in ("auroc", "auprc")
    }
    for row in table.select(experiment="controller_macro", metric="em"):
        headline[f"{row.detector}/em"] = row.value
    selected = [
        f"{setting}: {' '.join(selection_summary(run, setting)['selected'])}"
        for setting in settings_of(run)
    ]
    judged = read_costs(costs_file(run)) if "baselines" in published(run) else ()
    parts = [
        as_text(detection_table(rows, titles=costs.titles_of(judged))),
        "Gain of the selected encoders in AUROC\n" + as_text(paired_table(rows)),
        "\n".join(("Selected encoders", *selected)),
    ]
    if run.stage_record("control") is not None:
        gains = as_text(paired_table(rows, "controller_paired"))
        parts.append(as_text(controller_table(rows)))
        parts.append(f"Gain of PGIR in exact match / F1\n{gains}")
    return {"headline": headline, "text": "\n\n".join(parts)}
