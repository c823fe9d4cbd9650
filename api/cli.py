"""The command line: its table of verbs, and those of a probe.

Everything heavy is imported inside functions, so that `--help` is instant and a user
of `jaxprobe` never loads Torch.
"""

import contextlib
import copy
import dataclasses
import difflib
import fcntl
import importlib
import io
import itertools
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.benchmarks import CHAIN, NEXT, what_to_do
from beatrice.extract.records import SETTINGS
from beatrice.extract.run.console import (
    Progress,
    in_one_sentence,
    in_words,
    is_of_machine,
    lean_imports,
    printable,
    quiet,
    shell_line,
)
from beatrice.extract.run.contents import read_answers, read_examples, settings_of
from beatrice.extract.run.directory import NotWritten, RunDir
from beatrice.extract.run.files import JsonLines, lock_file, write_text_atomic
from beatrice.extract.run.process import find_share
from beatrice.extract.run.rows import check_evaluated, read_result_rows
from beatrice.extract.run.stages import run_stage
from beatrice.extract.run.verbs import (
    AS_JSON,
    FILE,
    RUN_DIR,
    GivenPath,
    NewPath,
    RunOptions,
    Text,
    check_alone,
    given,
    option,
    options,
)
from beatrice.extras import missing_extra

if TYPE_CHECKING:
    from beatrice.jaxprobe.detector import Detector
    from beatrice.pgir.score_files import PageRows, Shown
    from beatrice.probe import Probe

# The module in which a verb lives, under the headings and in the order of the help.
HEADINGS = {
    "Begin here": {
        "demo": "beatrice.cli",
        "fit": "beatrice.cli",
        "score": "beatrice.cli",
        "probes": "beatrice.cli",
        "real": "beatrice.benchmarks.commands",
        "doctor": "beatrice.doctor",
    },
    "From questions to a detector, in this order": {
        "data": "beatrice.extract.datasets.commands",
        "rewrite": "beatrice.extract.commands",
        "answer": "beatrice.extract.commands",
        "label": "beatrice.extract.commands",
        "sample": "beatrice.extract.commands",
        "extract": "beatrice.extract.commands",
        "sweep": "beatrice.selection.commands",
        "train": "beatrice.jaxprobe.commands",
        "select": "beatrice.selection.commands",
        "calibrate": "beatrice.jaxprobe.commands",
    },
    "What it is worth": {
        "evaluate": "beatrice.benchmarks.commands",
        "baselines": "beatrice.benchmarks.commands",
        "anatomy": "beatrice.selection.commands",
        "report": "beatrice.benchmarks.commands",
        "export": "beatrice.cli",
    },
    "Retrieval": {
        "corpus": "beatrice.pgir.commands",
        "transfer": "beatrice.benchmarks.commands",
        "control": "beatrice.pgir.commands",
    },
    "Speed and exactness": {"bench": "beatrice.benchmarks.bench.commands"},
}
VERBS = {verb: path for verbs in HEADINGS.values() for verb, path in verbs.items()}
# What does the work of verbs that there were.
_FORMER = {
    "compare": "report RUN_A RUN_B",
    "fetch": "real --fetch NAME",
    "retrieve": "corpus FOLDER --search QUESTION",
    "verify": "doctor RUN_DIR --verify",
    "world": "data RUN_DIR --world",
}


def _set_quiet(context: click.Context, option: click.Parameter, is_quiet: bool) -> None:
    """Be quiet while the verb lasts, and not in whatever this process does next."""
    before = Progress.is_quiet
    context.call_on_close(lambda: setattr(Progress, "is_quiet", before))
    Progress.is_quiet = is_quiet


_QUIET = click.Option(
    ["--quiet"],
    is_flag=True,
    expose_value=False,
    callback=_set_quiet,
    help="Print results, warnings and errors alone.",
)
# What several processes may share; each other verb is the work of one.
SHARED = ("rewrite", "answer", "label", "sample", "extract", "train")
# Options with which a verb does not do its stage, or not all of it.
_NOT_THE_STAGE = ("shard", "dry_run", "list", "check")


class _Verbs(click.Group):
    """Lists verbs in data-flow order; a user's mistake is one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb from its module, which imports nothing heavy."""
        if cmd_name not in VERBS:
            return None
        if cmd_name == "demo":
            return _for_people("demo", make_demo())
        module = importlib.import_module(VERBS[cmd_name])
        return _for_people(cmd_name, getattr(module, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb; of one that does not exist, name what may be meant."""
        name = args[0]
        close = difflib.get_close_matches(name, VERBS, 1)
        meant = _FORMER.get(name, close[0] if close else None)
        if name not in VERBS and meant is not None:
            ctx.fail(f"no verb is called {name!r}; did you mean `beatrice {meant}`?")
        return super().resolve_command(ctx, args)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """List the verbs under their headings, each with its whole first sentence."""
        for heading, verbs in HEADINGS.items():
            rows = []
            for verb in verbs:
                command = self.get_command(ctx, verb)
                text = (command.help or "") if command else ""
                rows.append((verb, text.partition("\n\n")[0]))
            with formatter.section(heading):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an expected failure becomes one sentence and exit code 1.

        Ctrl-C ends it with the code that a shell gives to what was interrupted.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `| head` has enough: click ends without a word
        # Any other error is the program's own mistake, and shows where it was made.
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_of_machine(error):
                raise
            do = f"; {what_to_do(error)}" if isinstance(error, NotWritten) else ""
            raise click.ClickException(in_one_sentence(error) + do) from error
        except ImportError as error:
            if (text := missing_extra(error)) is None:
                raise
            raise click.ClickException(text) from error
        except KeyboardInterrupt:
            click.echo("Stopped; the same line again continues.", err=True)
            raise click.exceptions.Exit(130) from None


def _for_people(verb: str, command: click.Command) -> click.Command:
    """Return a verb that has --quiet, and says at its end which verb comes next."""
    verb_command = copy.copy(command)
    verb_command.params = [*command.params, _QUIET]
    work, after = command.callback, NEXT.get(verb)

    def callback(**values: Any) -> Any:
        assert work is not None
        result = work(**values)
        run_dir, is_share = values.get("run_dir"), find_share().world_size > 1
        is_left = is_share or any(map(values.get, _NOT_THE_STAGE))
        if after and run_dir and not is_left:
            Progress().note(f"next: {shell_line(after, run_dir)}")
        return result

    verb_command.callback = callback
    return verb_command


_AFTER_ANSWERS = 6.5  # times what the answers of the demo took (42 of 318 seconds)


def make_demo() -> click.Command:
    """Return the verb that does everything."""
    from beatrice.extract.commands import StorageOptions
    from beatrice.jaxprobe.commands import TrainingOptions

    @click.command()
    @RUN_DIR
    @AS_JSON
    @options(run=RunOptions, storage=StorageOptions, training=TrainingOptions)
    def demo(
        run_dir: Path,
        as_json: bool,
        run: RunOptions,
        storage: StorageOptions,
        training: TrainingOptions,
    ) -> None:
        """Do everything, from questions to the report.

        Example: beatrice demo runs/demo
        """
        from beatrice.extract.world.stage import new_world

        settings = new_world(**given(run), storage=storage.fields())
        progress, began = Progress(), time.monotonic()
        with RunDir.open(run_dir, settings) as opened:
            has_answers = opened.answers.exists()  # and times a part of them
            for stage_path in CHAIN:
                stage = pkgutil.resolve_name(stage_path)
                if stage.name == "control" and settings_of(opened) != SETTINGS:
                    continue  # it needs both, and the report says so
                change = training.change if stage.name == "train" else None
                done = run_stage(stage, opened, progress, change)
                if stage.name == "answer" and done is not None and not has_answers:
                    left = _AFTER_ANSWERS * (time.monotonic() - began)
                    progress.note(f"demo: about {in_words(left)} left for all stages")
        progress.note(f"demo: done in {in_words(time.monotonic() - began)}")
        from beatrice.benchmarks.results.report import summary

        page = summary(run_dir)
        click.echo(json.dumps(page["headline"]) if as_json else page["text"])

    return demo


_STREAM = Path("-")  # standard input or output, as shells write it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """One answer, or a file of them, and where the results go."""

    probe: str | None = option(
        "A probe that comes along (see `beatrice probes`), a folder, or hf://owner/name.",
        metavar="NAME",
    )
    question: str | None = option("As the model was asked.")
    answer: str | None = option("The answer to be judged; without it, the model's.")
    context: tuple[str, ...] = option("A passage the model was shown; repeatable.", ())
    file: Path | None = option(
        "Answers, a row each: own, lm-eval's or FlashRAG's; - is standard input.",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    )
    out: Path | None = option(
        "Where a file's results go; continued if it is there.  [default: stdout]",
        type=NewPath(dir_okay=False),
    )
    html: Path | None = option(
        "Write a page with the answers' tokens tinted by their probability.",
        type=NewPath(dir_okay=False),
    )
    batch_size: int = option(
        "Most rows of a file in one forward pass; above 64 also what a kill can lose.",
        64,
        min=1,
    )
    model: str | None = option("Where the backbone lies, if moved.")
    precision: float | None = option(
        "Share of decisions to be right.  [default: the probe's, 0.9]",
        min=0,
        max=1,
        is_above=True,
    )

    def __post_init__(self) -> None:
        """Check what goes together."""
        answer = (self.question, self.answer, self.context)
        if self.file is None and self.question is None:
            raise click.UsageError("give --question, and perhaps --answer, or --file")
        if self.file is not None and answer != (None, None, ()):
            raise click.UsageError(
                "a --file has its own questions, answers and contexts"
            )
        if self.file is None and self.out is not None:
            raise click.UsageError("--out is for the results of a --file")
        if self.out == _STREAM:  # as without it
            object.__setattr__(self, "out", None)
        file = None if self.file == _STREAM else self.file
        _check_different({"--file": file, "--out": self.out, "--html": self.html})


@click.command()
@click.argument("source", required=False, metavar="[RUN_DIR]", type=Text())
@AS_JSON
@options(how=ScoreOptions)
def score(source: str | None, as_json: bool, how: ScoreOptions) -> None:
    """Score answers: the model's own, one that exists, or a file of them.

    RUN_DIR is a finished run, or a probe as --probe names it. A --question without
    --answer is answered by the model, and scored in the passes that write. The rows of
    a --file have their answers. Its results are JSON lines in its order, where they go
    to --out, --json prints their counts; a row that cannot be scored is named in its
    place, and the exit code is then 1.

    Example: beatrice score --probe smollm2 --question "who wrote Dracula?"

    Example: beatrice score runs/demo --question "who wrote X?" --answer "Y"
    """
    if (source is None) == (how.probe is None):
        raise click.UsageError("give RUN_DIR or --probe, one of the two")
    name = source or how.probe or ""
    if "://" in name and not name.startswith("hf://"):
        raise click.UsageError(
            f"{name}: expected a folder on this machine, a probe's name, or "
            "hf://owner/name"
        )
    with contextlib.ExitStack() as stack:
        file = how.file and stack.enter_context(_readable_again(how.file))
        with lean_imports():
            quiet()
            from beatrice.pgir.score_files import count_rows
            from beatrice.probe import load

            probe = load(name, model=how.model, precision=how.precision)
            # A file that cannot be read is refused before the model is loaded.
            n_rows = count_rows(file) if file is not None else 0
            _ = probe.scorer
        if file is not None:
            _score_file(probe, Path(name).name, file, n_rows, how, as_json)
            return
    context, question = how.context or None, how.question or ""
    if how.answer is None:
        result = probe.answer(question, context)
    else:
        result = probe.score(question, how.answer, context)
    for warning in result.warnings:
        click.echo(printable(f"warning: {warning}"), err=True)
    click.echo(": ".join(filter(None, (result.decision, result.reason))), err=True)
    if how.html is not None:
        results = [(question, how.context, result.as_json())]
        _write_page(how.html, f"{Path(name).name}: one answer", "", results)
    if as_json:
        click.echo(json.dumps(result.as_json()))
        return
    if result.text is not None:
        click.echo(printable(result.text))
    p_correct = result.p_correct
    click.echo("unknown" if p_correct is None else f"{p_correct:.3f}")


@contextlib.contextmanager
def _readable_again(file: Path) -> Iterator[Path]:
    """Give a file that can be read twice: what comes through a pipe is copied."""
    is_stdin = file == _STREAM
    if not is_stdin and file.is_file():
        yield file
        return
    if is_stdin and sys.stdin is None:
        raise click.UsageError("--file -: standard input is closed; give a file")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / ("stdin" if is_stdin else file.name)
        with click.open_file(str(file), "rb") as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target)
        try:
            yield copy
        except ValueError as error:
            typed = "standard input" if is_stdin else str(file)
            raise ValueError(str(error).replace(str(copy), typed)) from error


def _check_different(files: Mapping[str, Path | None]) -> None:
    """Check that no file would be written over another that the line names."""
    named = [(name, path) for name, path in files.items() if path is not None]
    for (first, path), (other, same) in itertools.combinations(named, 2):
        is_link = path.exists() and same.exists() and path.samefile(same)
        if is_link or path.resolve() == same.resolve():
            raise click.UsageError(
                f"{first} and {other} are the same file, {path}; give two names"
            )


def _write_page(
    html: Path, title: str, summary: str, results: "Iterable[Shown] | PageRows"
) -> None:
    """Write the page of some results."""
    from beatrice.pgir.score_files import page

    write_text_atomic(html, page(title, summary, results))


@contextlib.contextmanager
def _held(out: Path | None) -> Iterator[None]:
    """Keep other processes from writing results into a file, which is made now."""
    if out is None:
        yield
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as stream:
        try:
            lock_file(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{out} is written by another process; wait or end it, or give another "
                "--out"
            ) from None
        yield


def _score_file(
    probe: "Probe",
    name: str,
    answers: Path,
    n_rows: int,
    how: ScoreOptions,
    as_json: bool,
) -> None:
    """Score a file's rows; raise at the end if any of them could not be scored."""
    from beatrice.pgir.score_files import PageRows, Tally, read_rows, score_rows

    progress, tally, shown = Progress(), Tally(), PageRows()
    with _held(how.out), progress.stage("score") as update:
        lines = JsonLines.open(how.out) if how.out else None
        if lines and lines.truncated:
            progress.note(lines.truncated)

        def write(results: list[str]) -> None:
            if lines:
                lines.append(results)
            else:
                click.echo("\n".join(results))
            update(tally.n_done + len(results), n_rows)

        def each(row: Any, result: Mapping[str, Any]) -> None:
            tally.add(row, result)
            if how.html is not None:
                names = ("question", "prompt")  # the first that is there is shown
                arguments = (getattr(row.given, name, None) for name in names)
                passages = getattr(row.given, "context", None) or ()
                texts = [getattr(passage, "text", passage) for passage in passages]
                shown.add((next(filter(None, arguments), None), texts, result))

        score_rows(
            lambda rows: probe.score_many(rows, how.batch_size),
            read_rows(answers),
            probe.identity + (f" {how.precision}" if how.precision else ""),
            lines,
            write,
            each,
            how.batch_size,
        )
    for setting in SETTINGS:
        for threshold in probe.thresholds(setting) or ():
            progress.note(f"{setting}: {threshold.in_words()}")
    progress.note(tally.in_words())
    if as_json and how.out is not None:  # else the results are on stdout
        click.echo(json.dumps({"out": str(how.out), **tally.as_json()}))
    if how.html is not None:
        title = f"{answers.name}, read by {name}"
        _write_page(how.html, title, tally.in_words(), shown)
    if tally.bad:
        raise click.ClickException(
            f"{len(tally.bad)} of {tally.n_done} rows could not be scored; the first, "
            f"{tally.bad[0]}"
        )


@click.command()
@click.argument("model", type=Text())
@click.argument("places", nargs=-1, metavar="QUESTIONS PROBE_FOLDER", type=GivenPath())
@click.option(
    "--labelled",
    type=FILE,
    help="Lines with question, answer, label, perhaps context, instead of QUESTIONS.",
)
@click.option(
    "--template",
    type=FILE,
    help="Your words around question and context, a JSON object of closed_book and "
    "with_context.",
)
@click.option(
    "--untrustworthy", is_flag=True, help="Save a probe that rests on too few answers."
)
def fit(
    model: str,
    places: tuple[Path, ...],
    labelled: Path | None,
    template: Path | None,
    untrustworthy: bool,
) -> None:
    """Fit a probe for a model of your own, from questions or labelled answers.

    MODEL answers QUESTIONS (any file that `beatrice data` reads) from memory, and again
    with a question's passages where it has some; its signals are read in the same pass,
    labels are by exact match with the golds. Half of the questions is trained on, a
    quarter calibrates, a quarter is held back and says what the probe is worth. MODEL
    is a Hub id, a path, gemma, smollm2 or embedded.

    Example: beatrice fit smollm2 questions.csv probe

    Example: beatrice fit smollm2 --labelled answers.jsonl probe
    """
    from beatrice.extract.datasets.loading import read_questions
    from beatrice.extract.generate.templates import read_words
    from beatrice.own_model import check_folder, fit_own, read_labelled

    n_places = 1 if labelled else 2
    if len(places) != n_places:
        wanted = "PROBE_FOLDER" if labelled else "QUESTIONS and PROBE_FOLDER"
        raise click.UsageError(f"after the model give {wanted}")
    NewPath().convert(places[-1], None, None)
    check_folder(places[-1])
    words = read_words(template) if template else None
    if template and words is None:
        raise click.BadParameter(
            f'{template}: expected a JSON object of "closed_book", a text with '
            '{question}, "with_context", one with {context} and behind it {question}, '
            "or both",
            param_hint="--template",
        )
    note = Progress().note
    quiet()
    fit_own(
        model,
        read_labelled(labelled, note) if labelled else read_questions(places[0]),
        places[-1],
        is_labelled=labelled is not None,
        words=words and vars(words),
        untrustworthy=untrustworthy,
        say=click.echo,
    )


_IN_REPORT = {
    ("detection", "auroc", None),
    ("detection", "auprc", None),
    ("calibration", "ece", "calibrated"),
    ("calibration", "brier", "calibrated"),
}  # experiment, metric and kind of a run's rows


def _report_of(
    run: RunDir, detector: "Detector"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of `Probe.report` of a finished run, and of five test answers."""
    from beatrice.probe import MOST_EXAMPLES

    reads = {name: head.reads for name, head in detector.heads.items()}
    # Heads that read the same encoders are the same, as in a run with contexts alone.
    is_same = reads.get("single_pass") == reads.get("with_context")
    own_pass = "champion" if is_same else "without_closed_book"
    rows_of = {
        "closed_book": ("champion", "closed_book"),
        "with_context": ("champion", "with_context"),
        "single_pass": (own_pass, "with_context"),
    }
    columns = ("dataset", "split", "metric", "value", "ci_low", "ci_high", "n")
    report = [
        {"head": head, **{name: getattr(row, name) for name in columns}}
        for row in read_result_rows(run)
        for head, subject in rows_of.items()
        if (row.detector, row.setting) == subject
        and row.seed == "mean"
        and (row.experiment, row.metric, row.kind) in _IN_REPORT
    ]
    held_back = {e.id: e for e in read_examples(run) if e.split == "test"}
    examples: list[dict[str, Any]] = []
    setting = settings_of(run)[0]
    for answer in read_answers(run, setting):
        example = held_back.get(answer.example_id)
        if example is None or not answer.text.strip() or answer.variant != "original":
            continue
        row: dict[str, Any] = {"question": example.question, "answer": answer.text}
        if setting == "with_context":
            shown = [{"title": p.title, "text": p.text} for p in example.passages]
            row["context"] = shown
        examples.append(row)
        if len(examples) == MOST_EXAMPLES:
            break
    return report, examples


@click.command()
@RUN_DIR
@click.argument("folder", type=NewPath(file_okay=False))
@click.option("--untrustworthy", is_flag=True, help="Even if it saw too few answers.")
def export(run_dir: Path, folder: Path, untrustworthy: bool) -> None:
    """Write a finished run's probe into a folder that can be carried away.

    A few MB: weights, maps, what it is worth, five examples, and a card. `beatrice
    score FOLDER` and `beatrice.load` read it on any machine, without the run.

    Example: beatrice export runs/demo probe
    """
    quiet()
    from beatrice.probe import load

    probe = load(run_dir)
    check_evaluated(RunDir(run_dir))
    report, examples = _report_of(RunDir(run_dir), probe.detector)
    probe = probe.with_report(report)
    probe.save(folder, examples=examples, untrustworthy=untrustworthy)
    size = sum(path.stat().st_size for path in folder.iterdir())
    line = shell_line("score", folder)
    click.echo(f"{folder}: {size / 1e6:.1f} MB; {line} --question …")


@click.command()
@AS_JSON
def probes(as_json: bool) -> None:
    """List the probes that come along, and those of the Hub's local cache.

    Example: beatrice probes
    """
    from beatrice.card import answers_of, cell_of
    from beatrice.probe import load, local_probes

    rows, shown = [], []
    for name, folder in local_probes().items():
        try:
            probe = load(folder)
        except ValueError as error:  # the others are there all the same
            warning = f"warning: {name} cannot be read: {error}"
            click.echo(printable(warning), err=True)
            continue
        trained = probe.detector.provenance
        size = sum(path.stat().st_size for path in folder.iterdir())
        row = {
            "name": name,
            "model": trained.model if trained else None,
            "revision": trained.revision if trained else None,
            "megabytes": round(size / 1e6, 2),
            "report": probe.rows,
        }
        rows.append(row)
        shown.append(f"{name}: for {row['model']}, {row['megabytes']} MB")
        lines = (
            f"  {answers_of(probe.detector, line['head'])}, "
            f"{line.get('dataset') or 'own'} ({line['split']}): "
            f"AUROC {cell_of(line)} of {line['n']} answers"
            for line in probe.rows
            if line["metric"] == "auroc" and line["split"] != "validation"
        )
        shown += dict.fromkeys(lines)
    if as_json:
        click.echo(json.dumps(rows))
        return
    for line in shown:
        click.echo(printable(line))
    if not rows:
        click.echo("none: `beatrice export RUN FOLDER` writes one")


def _exit_when_asked(context: click.Context) -> None:
    """End a verb as after an error on SIGTERM, which schedulers send to what they stop.

    A process that the signal kills leaves its name in the run's lock, which keeps out
    another machine that is to go on.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # threads end before the lock
        raise SystemExit(128 + signal.SIGTERM)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)
        context.call_on_close(lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


@click.group(
    cls=_Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 88,
        "show_default": True,
    },
)
@click.version_option(package_name="beatrice-probe")
@click.pass_context
def main(context: click.Context) -> None:
    """Is a frozen language model's answer right? Ask its own internal signals.

    Every verb reads its inputs from RUN_DIR and writes its outputs there; the same
    line again continues where it stopped. `demo` runs them all.
    """
    _exit_when_asked(context)
    verb = context.invoked_subcommand
    if verb is not None and verb not in SHARED:
        check_alone(verb, find_share())
    # What an old locale cannot write is escaped, as it is on stderr.
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.encoding.lower() != "utf-8":
        stdout.reconfigure(errors="backslashreplace")
    # Progress of weight loading and the like is Transformers' own; ours is above.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Spinning workers of one library starve the other's on a small machine, and those
    # of another program (docs/measurements.md, "Threads that wait").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
