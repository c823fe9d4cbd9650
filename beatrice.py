"""The command line, and the public Python names.

Everything heavy is imported inside functions, so that `--help` is instant and a user
of `jaxprobe` never loads Torch.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from benchmarks.presets import RunConfig
    from extract.rundir import RunDir
    from pgir.scoring import Scorer

__all__ = ["load", "main"]

# In the order of the data, which is the order of the help.
VERBS = (
    "demo world answer label extract verify sweep train select calibrate evaluate "
    "control report score"
).split()


def load(path: str | Path, *, model: str | None = None) -> "Scorer":
    """Return the scorer of a finished run.

    Args:
      path: a run directory whose detector is calibrated.
      model: where the run's backbone lies, if it has moved.

    Returns:
      An object whose `score(question, answer, context=None)` gives the calibrated
      probability that the answer is right.

    Raises:
      ValueError: the run has no detector yet, or the backbone is another one.
    """
    from pgir.scoring import Scorer

    return Scorer.load(Path(path), model=model)


class _Verbs(click.Group):
    """Lists verbs in data-flow order; a user's mistake is one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the data."""
        return [verb for verb in VERBS if verb in self.commands]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an expected failure becomes one sentence and exit code 1."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            message = " ".join(str(error).split())
            # A path or a text given by a user may hold what no terminal can show.
            safe = message.encode("utf-8", "backslashreplace").decode()
            raise click.ClickException(safe) from error


class _Progress:
    """Bars with rates on a terminal, plain lines otherwise, all on stderr."""

    def note(self, text: str) -> None:
        """Print one line for the person who waits."""
        click.echo(text, err=True)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Show one stage; yields what is told (done, total)."""
        began = time.monotonic()
        if sys.stderr.isatty():
            with _bar(name) as update:
                yield update
        else:
            yield _plain_lines(name, began)
        self.note(f"{name}: done in {time.monotonic() - began:.1f} s")


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with done, total, rate and time left."""
    from rich import console, progress

    with progress.Progress(
        progress.TextColumn("{task.description:<10}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
        transient=True,
    ) as bars:
        task = bars.add_task(name, total=None, rate="")
        began = time.monotonic()

        def update(done: int, total: int) -> None:
            rate = f"{done / max(time.monotonic() - began, 1e-9):.3g}/s"
            bars.update(task, completed=done, total=total, rate=rate)

        yield update


def _plain_lines(name: str, began: float) -> Callable[[int, int], None]:
    """Return an update that prints a line with the rate every ten seconds."""
    last = began

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 10:
            last = now
            rate = done / max(now - began, 1e-9)
            click.echo(f"{name}: {done} of {total}, {rate:.3g}/s", err=True)

    return update


@click.group(
    cls=_Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 88,
    },
)
@click.version_option(package_name="beatrice-probe")
def main() -> None:
    """Is a frozen language model's answer right? Ask its own internal signals.

    Every verb reads its inputs from RUN_DIR and writes its outputs there; the same
    line again continues where it stopped. `demo` runs them all.
    """
    # Progress of weight loading and the like is Transformers' own; ours is above.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Spinning workers of one library starve the other's on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path))


def _new_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that make a run what it is."""
    for option in (
        click.option(
            "--seed", default=0, show_default=True, help="Of training and bootstrap."
        ),
        click.option(
            "--answer-span",
            type=click.Choice(["emitting", "literal"]),
            default="emitting",
            show_default=True,
            help="Positions that emit the answer, or the answer tokens alone.",
        ),
        click.option(
            "--model",
            default="embedded",
            show_default=True,
            help="Backbone: a directory, a Hub id, or the embedded one.",
        ),
        click.option(
            "--preset",
            type=click.Choice(["demo", "smoke"]),
            default="demo",
            show_default=True,
            help="Sizes: demo takes about 14 minutes on two cores, smoke 2.",
        ),
    ):
        command = option(command)
    return command


def _quiet() -> None:
    """Silence what other libraries print while they load."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _config_of(run_dir: Path) -> "RunConfig":
    """Return the configuration a run directory was made with."""
    from benchmarks.presets import config_from_manifest
    from extract.manifest import read_manifest

    return config_from_manifest(read_manifest(run_dir)["config"])


@contextlib.contextmanager
def _opened(run_dir: Path, config: "RunConfig") -> Iterator["RunDir"]:
    """Hold a run directory while stages work in it."""
    from extract.rundir import RunDir

    with RunDir.open(run_dir, config.as_json()) as run:
        yield run


def _do(run_dir: Path, *names: str, config: "RunConfig | None" = None) -> None:
    """Do stages of a run, in order."""
    from benchmarks.stage import run_stage
    from benchmarks.stages import STAGES

    _quiet()
    config = _config_of(run_dir) if config is None else config
    if config.xla_flags:
        os.environ.setdefault("XLA_FLAGS", config.xla_flags)
    progress = _Progress()
    with _opened(run_dir, config) as run:
        for name in names:
            run_stage(STAGES[name], run, config, progress)


def _make_config(preset: str, model: str, answer_span: str, seed: int) -> "RunConfig":
    """Return a new run's configuration; a wrong model is found before it is made."""
    from benchmarks.presets import make_config
    from extract.backbone import check_name

    config = make_config(preset, model=model, seed=seed, answer_span=answer_span)
    check_name(config.model_path)
    return config


@main.command()
@_RUN_DIR
@_new_run_options
@click.option("--json", "as_json", is_flag=True, help="Print the headline as JSON.")
def demo(run_dir: Path, as_json: bool, **options: Any) -> None:
    """Do everything, from questions to the report.

    Example: beatrice demo runs/demo
    """
    from benchmarks.stages import IN_ORDER, summary

    config = _make_config(**options)
    _do(run_dir, *IN_ORDER, config=config)
    _show_summary(summary(run_dir), as_json)
    click.echo(str(run_dir / "report.html"), err=as_json)


def _show_summary(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found["headline"]))
    else:
        click.echo(found["text"])


@main.command()
@_RUN_DIR
@_new_run_options
@click.option("--train", is_flag=True, help="Also train the model, into RUN_DIR/model.")
def world(run_dir: Path, train: bool, **options: Any) -> None:
    """Make the microworld: questions and passages (and its model, from nothing).

    Example: beatrice world runs/mine --train
    """
    config = _make_config(**options)
    _do(run_dir, "world", config=config)
    if train:
        from benchmarks.torch_stages import train_world_model

        progress = _Progress()
        with _opened(run_dir, config) as run, progress.stage("model") as update:
            click.echo(str(train_world_model(run, config, update, progress)))


def _stage_verb(name: str, text: str) -> None:
    """Add the verb of a stage that takes a run directory and nothing else."""

    @main.command(name=name, help=f"{text}\n\nExample: beatrice {name} runs/demo")
    @_RUN_DIR
    def verb(run_dir: Path) -> None:
        _do(run_dir, name)


for _name, _text in {
    "answer": "Answer every question, closed-book and with context.",
    "label": "Label the answers by normalised exact match.",
    "sweep": "Choose the layer of the hidden states on validation.",
    "train": "Train all fifteen encoders, every seed, in both settings.",
    "select": "Select encoders greedily and train the fusion heads.",
    "calibrate": "Fit the isotonic maps on validation and save the detector.",
    "evaluate": "Measure every detector on every set, with intervals.",
    "control": "Run PGIR and its plain rivals; choose threshold and budget.",
    "report": "Write report.html from the rows.",
}.items():
    _stage_verb(_name, _text)


@main.command()
@_RUN_DIR
def extract(run_dir: Path) -> None:
    """Read the four signal families of every answer into the feature store.

    Under torchrun, SLURM or a Kubernetes indexed job every process does its part.

    Example: torchrun --nproc-per-node 2 -m beatrice extract runs/demo
    """
    from extract.extraction import rank_and_world_size

    rank, world_size = rank_and_world_size()
    if world_size == 1:
        _do(run_dir, "extract")
        return
    from benchmarks.torch_stages import extract_worker
    from extract.rundir import RunDir

    _quiet()
    config, progress = _config_of(run_dir), _Progress()
    with RunDir.open(run_dir, config.as_json(), exclusive=False) as run:
        with progress.stage(f"extract {rank}/{world_size}") as update:
            extract_worker(run, config, update, (rank, world_size))


@main.command()
@_RUN_DIR
def verify(run_dir: Path) -> None:
    """Read every checksum of a run again: stages, stores, weights.

    Example: beatrice verify runs/demo
    """
    from benchmarks.verification import verify_run

    problems = verify_run(run_dir)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.ClickException(f"{len(problems)} problems found in {run_dir}")
    click.echo(f"{run_dir}: every checksum holds")


@main.command()
@_RUN_DIR
@click.option("--question", required=True, help="As the model was asked.")
@click.option("--answer", required=True, help="The answer to be judged.")
@click.option(
    "--context", multiple=True, help="A passage the model was shown; repeatable."
)
@click.option("--model", default=None, help="Where the backbone lies, if moved.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def score(
    run_dir: Path,
    question: str,
    answer: str,
    context: tuple[str, ...],
    model: str | None,
    as_json: bool,
) -> None:
    """Score an answer that exists: one forward pass, P(correct) back.

    Example: beatrice score runs/demo --question "who wrote X?" --answer "Y"
    """
    _quiet()
    found = load(run_dir, model=model).score(question, answer, context or None)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        click.echo(f"{found.p_correct:.3f}")


if __name__ == "__main__":
    main()
