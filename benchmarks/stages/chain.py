"""All stages of a run by name, and what is shown at the end."""

from pathlib import Path
from typing import Any

from benchmarks.results.report import ReportData, write_report
from benchmarks.results.tables import as_text, controller_table, detection_table
from benchmarks.stages.ablate_stage import ABLATE, ablation_story
from benchmarks.stages.exhaustive_stage import EXHAUSTIVE, ranking_story
from benchmarks.stages.label_stages import labelled_by
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.publishing import asked_for, read_result_rows, rows_file
from benchmarks.stages.result_stages import (
    CALIBRATE,
    CONTROL,
    EVALUATE,
    read_json,
)
from benchmarks.stages.select_stage import SELECT, selection_story
from benchmarks.stages.stage import Progress, Stage, Update
from benchmarks.stages.sweep_stage import SWEEP
from benchmarks.stages.torch_stages import ANSWER, EXTRACT, LABEL, WORLD
from benchmarks.stages.train_stage import TRAIN
from extract.pipeline import count_correct, read_examples, read_labels
from extract.records import SETTINGS
from extract.run.directory import RunDir
from extract.run.results import CONTROLLERS, ResultTable, read_rows

IN_ORDER = (
    "world answer label extract sweep train select calibrate evaluate control report"
).split()


def _facts(run: RunDir, config: RunConfig) -> dict[str, str]:
    examples = read_examples(run)
    counts = {
        split: sum(e.split == split for e in examples)
        for split in ("train", "validation", "test", "ood")
    }
    return {
        "Backbone": config.model,
        "Preset": config.preset,
        "Seed": str(config.seed),
        "Questions": ", ".join(f"{n} {split}" for split, n in counts.items()),
        "Labels by": labelled_by(run),
        "Layer of the hidden states": str(read_json(run.sweep)["layer"]),
        "Training seeds": str(config.train.n_seeds),
        "Answer span": config.extract.answer_span,
        "Kept": config.extract.in_words(),
    }


def _seconds(run: RunDir) -> dict[str, float]:
    names = ("data", *IN_ORDER, *asked_for(run))
    records = {name: run.stage_record(name) for name in names}
    return {name: r.seconds for name, r in records.items() if r is not None}


def report_data(run: RunDir, config: RunConfig) -> ReportData:
    """Collect what the report shows from the run's files."""
    control = read_json(run.control / "control.json")
    asked = asked_for(run)
    ranked = SETTINGS if "exhaustive" in asked else ()
    ranking = {setting: ranking_story(run, setting) for setting in ranked}
    return ReportData(
        facts=_facts(run, config),
        stage_seconds=_seconds(run),
        rows=read_result_rows(run),
        accuracy=count_correct(read_examples(run), read_labels(run)),
        sweep=read_json(run.sweep)["settings"],
        selection={setting: selection_story(run, setting) for setting in SETTINGS},
        reliability=read_json(run.path / "reliability.json"),
        control={k: control[k] for k in ("tau", "budget", "cap", "frontier")},
        cases=control["cases"],
        ranking=ranking,
        ablations=ablation_story(run) if "ablate" in asked else {},
    )


def _report(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    write_report(report_data(run, config), run.report)


REPORT = Stage(
    name="report",
    inputs=lambda run: [
        run.sweep,
        run.labels,
        run.path / "selection",
        run.path / "reliability.json",
        run.control,
        rows_file(run, "evaluate"),
        rows_file(run, "control"),
        *(rows_file(run, name) for name in asked_for(run)),
    ],
    outputs=lambda run: [run.report, run.results],
    work=_report,
)

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        WORLD,
        ANSWER,
        LABEL,
        EXTRACT,
        SWEEP,
        TRAIN,
        SELECT,
        CALIBRATE,
        EVALUATE,
        CONTROL,
        REPORT,
    )
}

ON_REQUEST: dict[str, Stage] = {stage.name: stage for stage in (EXHAUSTIVE, ABLATE)}
"""What a run does only where it is asked for."""


def summary(path: Path) -> dict[str, Any]:
    """Return the headline of a finished run: tables as text, numbers as values."""
    run = RunDir(path)
    rows = list(read_rows(run.results))
    table = ResultTable(rows)
    headline = {
        f"{setting}/{metric}": table.value(
            experiment="detection",
            detector="champion",
            setting=setting,
            split="test",
            metric=metric,
            seed="mean",
        )
        for setting in SETTINGS
        for metric in ("auroc", "auprc")
    }
    for name in CONTROLLERS:
        headline[f"{name}/em"] = table.value(
            experiment="controller", detector=name, split="test", metric="em"
        )
    selected = [
        f"{setting}: {' '.join(selection_story(run, setting)['selected'])}"
        for setting in SETTINGS
    ]
    text = "\n\n".join(
        (
            as_text(detection_table(rows)),
            "Selected encoders\n" + "\n".join(selected),
            as_text(controller_table(rows)),
        )
    )
    return {"headline": headline, "text": text}
