"""The command line: the table of all verbs, and the verbs for probes.

Heavy packages are imported inside functions, so that `--help` is instant and users of
`jaxprobe` never load Torch.
"""

import contextlib
import copy
import dataclasses
import difflib
import fcntl
import gc
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
from collections.abc import Iterator, Mapping
from functools import partial
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
    shell_line,
    silence_transformers,
)
from beatrice.extract.run.contents import read_answers, read_examples, settings_of
from beatrice.extract.run.directory import NotWritten, RunDir
from beatrice.extract.run.files import JsonLines, lock_file, write_text_atomic
from beatrice.extract.run.process import end_with_parent, find_share
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
    from beatrice.probe import Probe

# Each verb's module, under the headings and in the order of `beatrice --help`.
HEADINGS = {
    "Start here": {
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
    "Evaluation": {
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
# Replacements for the verbs of earlier versions.
_FORMER = {
    "compare": "report RUN_A RUN_B",
    "fetch": "real --fetch NAME",
    "retrieve": "corpus FOLDER --search QUESTION",
    "verify": "doctor RUN_DIR --verify",
    "world": "data RUN_DIR --world",
}


def _set_quiet(context: click.Context, option: click.Parameter, is_quiet: bool) -> None:
    """Suppress progress until the verb ends, not for the rest of the process."""
    before = Progress.is_quiet
    context.call_on_close(lambda: setattr(Progress, "is_quiet", before))
    Progress.is_quiet = is_quiet


_QUIET = click.Option(
    ["--quiet"],
    is_flag=True,
    expose_value=False,
    callback=_set_quiet,
    help="Print only results, warnings and errors.",
)
# Verbs that several processes may share; the others run in one process.
SHARED = ("rewrite", "answer", "label", "sample", "extract", "train")
# Options with which a verb does not complete its stage.
_NOT_THE_STAGE = ("shard", "dry_run", "list", "check")


class _Verbs(click.Group):
    """A group that lists verbs in data-flow order and reports errors in a sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb from its module, which imports no heavy packages."""
        if cmd_name not in VERBS:
            return None
        if cmd_name == "demo":
            return _for_people("demo", make_demo())
        module = importlib.import_module(VERBS[cmd_name])
        return _for_people(cmd_name, getattr(module, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb; if it does not exist, suggest a similar one."""
        name = args[0]
        close = difflib.get_close_matches(name, VERBS, 1)
        meant = _FORMER.get(name, close[0] if close else None)
        is_completing = ctx.resilient_parsing  # then an error would fill the shell
        if name not in VERBS and meant is not None and not is_completing:
            ctx.fail(f"no verb is called {name!r}; did you mean `beatrice {meant}`?")
        return super().resolve_command(ctx, args)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """List the verbs under their headings, each with its full first sentence."""
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

        After Ctrl-C the exit code is the shell's code for an interrupted command.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # e.g. `| head` has finished; click then ends silently
        # Any other error is a bug, and keeps its traceback.
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
            click.echo("Stopped; repeat the same command to continue.", err=True)
            raise click.exceptions.Exit(130) from None


def _for_people(verb: str, command: click.Command) -> click.Command:
    """Return a verb with --quiet that names the next verb when it ends."""
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


_AFTER_ANSWERS = 6.5  # times the demo's time for answers (42 of 318 seconds)


def make_demo() -> click.Command:
    """Return the verb `demo`, which runs all stages."""
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
        """Run everything on an invented world, from questions to the report.

        Example: beatrice demo runs/demo
        """
        from beatrice.extract.world.stage import new_world

        settings = new_world(**given(run), storage=storage.fields())
        progress, began = Progress(), time.monotonic()
        with RunDir.open(run_dir, settings) as opened:
            has_answers = opened.answers.exists()  # then timing covers only a part
            for stage_path in CHAIN:
                stage = pkgutil.resolve_name(stage_path)
                if stage.name == "control" and settings_of(opened) != SETTINGS:
                    continue  # `control` needs both settings, as the report says
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


_STREAM = Path("-")  # standard input or output


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What to score (one answer, or a file of them) and where the results go."""

    probe: str | None = option(
        "A packaged probe (see `beatrice probes`), a folder, or hf://owner/name.",
        metavar="NAME",
    )
    question: str | None = option("The question, as the model was asked.")
    answer: str | None = option("The answer to score; without it, the model answers.")
    context: tuple[str, ...] = option("A passage the model was shown; repeatable.", ())
    file: Path | None = option(
        "Answers, one per row: your own, lm-eval's or FlashRAG's; - reads stdin.",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    )
    out: Path | None = option(
        "Write a file's results here; resumed if it exists.  [default: stdout]",
        type=NewPath(dir_okay=False),
    )
    html: Path | None = option(
        "Write an HTML page with the answers' tokens tinted by their probability.",
        type=NewPath(dir_okay=False),
    )
    batch_size: int = option(
        "Most rows of a file per forward pass; above 64, a kill may lose as many.",
        64,
        min=1,
    )
    model: str | None = option("Path of the language model, if it has moved.")
    precision: float | None = option(
        "Wanted share of right decisions.  [default: the probe's, 0.9]",
        min=0,
        max=1,
        is_above=True,
    )

    def __post_init__(self) -> None:
        """Check that the options fit together."""
        answer = (self.question, self.answer, self.context)
        if self.file is None and self.question is None:
            raise click.UsageError("give --file, or --question and optionally --answer")
        if self.file is not None and answer != (None, None, ()):
            raise click.UsageError(
                "--file replaces --question, --answer and --context; leave these out"
            )
        if self.file is None and self.out is not None:
            raise click.UsageError("--out only applies to the results of a --file")
        if self.out == _STREAM:  # the same as no --out
            object.__setattr__(self, "out", None)
        file = None if self.file == _STREAM else self.file
        _check_different({"--file": file, "--out": self.out, "--html": self.html})


@click.command()
@click.argument("source", required=False, metavar="[RUN_DIR]", type=Text())
@AS_JSON
@options(how=ScoreOptions)
def score(source: str | None, as_json: bool, how: ScoreOptions) -> None:
    """Score answers: the model's own, an existing one, or a file of them.

    RUN_DIR is a finished run, or a probe as for --probe. With a --question but no
    --answer, the model answers, and its answer is scored in the passes that write it.
    The rows of a --file contain their answers. Results are JSON lines in the file's
    order; with --out, --json prints their counts. If a row cannot be scored, its result
    has an error, and the exit code is 1.

    Example: beatrice score --probe smollm2 --question "who wrote Dracula?"

    Example: beatrice score runs/demo --question "who wrote X?" --answer "Y"
    """
    if (source is None) == (how.probe is None):
        raise click.UsageError("give either RUN_DIR or --probe")
    name = source or how.probe or ""
    if "://" in name and not name.startswith("hf://"):
        raise click.UsageError(
            f"{name}: expected a folder on this machine, a probe's name, or "
            "hf://owner/name"
        )
    with contextlib.ExitStack() as stack:
        file = how.file and stack.enter_context(_readable_again(how.file))
        with lean_imports():
            silence_transformers()
            from beatrice.pgir.score_files import count_rows, page
            from beatrice.probe import load

            probe = load(name, model=how.model, precision=how.precision)
            # Refuse an unreadable file before loading the model.
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
        shown = [(question, how.context, result.as_json())]
        title = f"{Path(name).name}: one answer"
        html = page(title, "", shown, _thresholds_in_words(probe))
        write_text_atomic(how.html, html)
    if as_json:
        click.echo(json.dumps(result.as_json()))
        return
    if result.text is not None:
        click.echo(printable(result.text))
    p_correct = result.p_correct
    click.echo("unknown" if p_correct is None else f"{p_correct:.3f}")


@contextlib.contextmanager
def _readable_again(file: Path) -> Iterator[Path]:
    """Yield a file that can be read twice: the data of a pipe are copied."""
    is_stdin = file == _STREAM
    if not is_stdin and file.is_file():
        yield file
        return
    if is_stdin and sys.stdin is None:
        raise click.UsageError("--file -: standard input is closed; give a file")
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / ("stdin" if is_stdin else file.name)
        with click.open_file(str(file), "rb") as source, copied.open("wb") as target:
            shutil.copyfileobj(source, target)
        try:
            yield copied
        except ValueError as error:
            typed = "standard input" if is_stdin else str(file)
            raise ValueError(str(error).replace(str(copied), typed)) from error


def _check_different(files: Mapping[str, Path | None]) -> None:
    """Check that no two options of the command name the same file."""
    named = [(name, path) for name, path in files.items() if path is not None]
    for (first, path), (other, same) in itertools.combinations(named, 2):
        is_link = path.exists() and same.exists() and path.samefile(same)
        if is_link or path.resolve() == same.resolve():
            raise click.UsageError(
                f"{first} and {other} are the same file, {path}; give two names"
            )


@contextlib.contextmanager
def _locked_results(out: Path | None) -> Iterator[None]:
    """Create a results file, and lock it against other processes."""
    if out is None:
        yield
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as stream:
        try:
            lock_file(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{out} is being written by another process; wait for it, stop it, or "
                "give another --out"
            ) from None
        yield


def _thresholds_in_words(probe: "Probe") -> list[str]:
    return [
        f"{setting}: {threshold.in_words()}"
        for setting in SETTINGS
        for threshold in probe.thresholds(setting) or ()
    ]


def _score_file(
    probe: "Probe",
    name: str,
    answers: Path,
    n_rows: int,
    how: ScoreOptions,
    as_json: bool,
) -> None:
    """Score a file's rows; raise at the end if any row could not be scored."""
    from beatrice.pgir.score_files import PageRows, Tally, page, read_rows, score_rows

    progress, tally, shown = Progress(), Tally(), PageRows()
    with _locked_results(how.out), progress.stage("score") as update:
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
                given = row.given  # an `AnswerToScore`, unless the row is not one
                prompt = getattr(given, "prompt", None)
                text = getattr(given, "question", None) or prompt
                texts = [passage.text for passage in getattr(given, "context", ())]
                shown.add((text, texts, result))

        score_rows(
            lambda rows: probe.score_many(rows, how.batch_size),
            read_rows(answers),
            probe.identity + (f" {how.precision}" if how.precision else ""),
            lines,
            write,
            each,
            how.batch_size,
        )
    thresholds = _thresholds_in_words(probe)
    for note in (*thresholds, tally.in_words()):
        progress.note(note)
    if as_json and how.out is not None:  # else results went to stdout
        click.echo(json.dumps({"out": str(how.out), **tally.as_json()}))
    if how.html is not None:
        title = f"{answers.name}, scored by {name}"
        html = page(title, tally.in_words(), shown, thresholds)
        write_text_atomic(how.html, html)
    if tally.n_bad:
        raise click.ClickException(
            f"{tally.n_bad} of {tally.n_done} rows could not be scored; the first, "
            f"{tally.first_bad}"
        )


@click.command()
@click.argument("model", type=Text())
@click.argument("places", nargs=-1, metavar="QUESTIONS PROBE_FOLDER", type=GivenPath())
@click.option(
    "--labelled",
    type=FILE,
    help="Lines with question, answer, label and maybe context, replacing QUESTIONS.",
)
@click.option(
    "--template",
    type=FILE,
    help="Your own prompts: a JSON object with closed_book or with_context, or both, "
    "the text around question and context.",
)
@click.option(
    "--untrustworthy", is_flag=True, help="Save the probe even with too few answers."
)
def fit(
    model: str,
    places: tuple[Path, ...],
    labelled: Path | None,
    template: Path | None,
    untrustworthy: bool,
) -> None:
    """Fit a probe for your own model, from questions or labelled answers.

    MODEL answers QUESTIONS (any file that `beatrice data` reads) from memory, and again
    with a question's passages if it has any. Its signals are read in the same passes,
    and answers are labelled by exact match with the golds. Half of the questions is for
    training, a quarter for calibration, and a quarter is held out to measure the probe.
    MODEL is a Hub id, a path, gemma, smollm2 or embedded.

    Example: beatrice fit smollm2 questions.csv probe

    Example: beatrice fit smollm2 --labelled answers.jsonl probe
    """
    import warnings

    from beatrice.extract.datasets.loading import read_questions
    from beatrice.extract.generate.templates import read_words
    from beatrice.own_model import check_folder, fit_own, read_labelled

    n_places = 1 if labelled else 2
    if len(places) != n_places:
        wanted = "PROBE_FOLDER" if labelled else "QUESTIONS and PROBE_FOLDER"
        raise click.UsageError(f"give {wanted} after MODEL")
    NewPath().convert(places[-1], None, None)
    check_folder(places[-1])
    words = read_words(template) if template else None
    if template and words is None:
        raise click.BadParameter(
            f'{template}: expected a JSON object with "closed_book", a text with '
            '{question}, or "with_context", a text with {context} before {question}, '
            "or both",
            param_hint="--template",
        )
    note = Progress().note
    silence_transformers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_labelled(labelled, note) if labelled else read_questions(places[0])
    for warning in caught:
        note(str(warning.message))
    fit_own(
        model,
        rows,
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
}  # experiment, metric and kind of the run's rows in a report


def _report_of(
    run: RunDir, detector: "Detector"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a finished run's rows for `Probe.report`, and five test answers."""
    from beatrice.probe import MOST_EXAMPLES

    reads = {name: head.reads for name, head in detector.heads.items()}
    # Heads that read the same encoders are equal, as in a run with contexts only.
    is_same = reads.get("single_pass") == reads.get("with_context")
    own_pass = "champion" if is_same else "without_closed_book"
    rows_of = {
        "closed_book": ("champion", "closed_book"),
        "with_context": ("champion", "with_context"),
        "single_pass": (own_pass, "with_context"),
    }
    columns = ("dataset", "split", "metric", "value", "ci_low", "ci_high", "n")
    rows = read_result_rows(run)
    # The AUPRC of a constant score is the share of wrong answers.
    n_right = {
        (row.setting, row.dataset, row.split, row.n): round(row.n * (1 - row.value))
        for row in rows
        if (row.experiment, row.metric) == ("detection", "auprc")
        and (row.detector, row.seed) == ("majority", "mean")
        and row.value is not None
    }
    report = [
        {
            "head": head,
            **{name: getattr(row, name) for name in columns},
            "n_right": n_right.get((row.setting, row.dataset, row.split, row.n)),
        }
        for row in rows
        for head, subject in rows_of.items()
        if (row.detector, row.setting) == subject
        and row.seed == "mean"
        and (row.experiment, row.metric, row.kind) in _IN_REPORT
    ]
    held_back = {e.id: e for e in read_examples(run) if e.split == "test"}
    setting, examples = settings_of(run)[0], []
    for answer in read_answers(run, setting):
        example = held_back.get(answer.example_id)
        if example and answer.text.strip() and answer.variant == "original":
            row = {"question": example.question, "answer": answer.text}
            shown = example.passages if setting == "with_context" else None
            examples.append({**row, "context": shown})
    return report, examples[:MOST_EXAMPLES]


@click.command()
@RUN_DIR
@click.argument("folder", type=NewPath(file_okay=False))
@click.option("--untrustworthy", is_flag=True, help="Even with too few answers.")
def export(run_dir: Path, folder: Path, untrustworthy: bool) -> None:
    """Write a finished run's probe into a folder that works without the run.

    The folder has a few MB: weights, maps, metrics, five examples, and a card.
    `beatrice score FOLDER` and `beatrice.load` read it on any machine.

    Example: beatrice export runs/demo probe
    """
    silence_transformers()
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
    """List the packaged probes, and those in the Hub's local cache.

    Example: beatrice probes
    """
    from beatrice.card import answers_of, cell_of
    from beatrice.probe import load, local_probes

    rows, shown = [], []
    for name, folder in local_probes().items():
        try:
            probe = load(folder)
        except ValueError as error:  # still list the others
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
            + ("" if line.get("n_right") is None else f", {line['n_right']} right")
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
        click.echo("no probes; `beatrice export RUN FOLDER` writes one")


def _exit_when_asked(context: click.Context) -> None:
    """Make SIGTERM, which schedulers send, end a verb as an error would.

    A process that was killed by the signal would leave its name in the run's lock, and
    so keep out another machine that is to continue.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # let threads end, then unlock
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

    Every verb reads its inputs from RUN_DIR and writes its outputs there; repeat the
    same command to continue where it stopped. `demo` runs them all.
    """
    _exit_when_asked(context)
    end_with_parent()
    # Imports make hundreds of thousands of objects that last: scanning them after every
    # 700 new ones, as Python does, takes a tenth of a short verb's time.
    context.call_on_close(partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(20_000)
    verb = context.invoked_subcommand
    if verb is not None and verb not in SHARED:
        check_alone(verb, find_share())
    # Escape characters that an old locale cannot write, as on stderr.
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.encoding.lower() != "utf-8":
        stdout.reconfigure(errors="backslashreplace")
    # Hide Transformers' own progress bars; ours is shown instead.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Busy-waiting threads of one library starve the other library's on a small machine,
    # and those of other programs (docs/measurements.md, "Threads that wait").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
