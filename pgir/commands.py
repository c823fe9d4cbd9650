"""The verbs that act on the score: `control` and `score`."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.verbs import RUN_DIR
from beatrice.pgir.retrieval.commands import (
    retrieval_options,
    settle_options,
    take_retrieval,
)

if TYPE_CHECKING:
    from beatrice.extract.run.directory import RunDir
    from beatrice.pgir.controllers.stage import ControlConfig

_ASKED = ("question", "prompt")  # shown of a row on the page: the first that is there
Results = Sequence[tuple[str | None, Mapping[str, Any]]]


def with_options(
    config: "ControlConfig", judges: tuple[str, ...] | None = None, **given: Any
) -> "ControlConfig":
    """Return how the controllers are run, as the options say; None leaves a field."""
    chosen = {name: value for name, value in given.items() if value is not None}
    rivals = (*chosen.pop("rivals", config.rivals), *(judges or ()))
    return dataclasses.replace(config, **chosen, rivals=tuple(dict.fromkeys(rivals)))


@click.command()
@RUN_DIR
@click.option(
    "--max-generations",
    type=click.FloatRange(min=1),
    help="Cap on their mean, in choosing settings on validation.  [default: 4]",
)
@click.option(
    "--cross-fit",
    is_flag=True,
    default=None,
    help="Also choose PGIR's on probabilities from maps fitted on other questions.",
)
@click.option(
    "--only",
    "rivals",
    multiple=True,
    help="A rival to run, or none or all; repeatable.",
)
@click.option(
    "--limit",
    "n_questions",
    type=click.IntRange(min=1),
    help="Most questions of each set.",
)
@click.option(
    "--training",
    "n_training",
    type=click.IntRange(min=1),
    help="Training questions that trained rivals learn from.",
)
@click.option(
    "--encoder",
    type=click.Path(exists=True, file_okay=False),
    help="A sentence encoder's folder, for rivals that read questions alone.",
)
@click.option(
    "--queries",
    type=click.Choice(["paper", "choose", "all"]),
    help="Search as the paper, also as is best on validation, or in all ways.",
)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="MODULE:NAME",
    help="A judge of drafts of one's own, to run PGIR's loop with; repeatable.",
)
@retrieval_options
def control(
    run_dir: Path, rivals: tuple[str, ...], judges: tuple[str, ...], **given: Any
) -> None:
    """Run PGIR and its rivals; choose their settings on validation.

    Without --corpus or --url the passages that came with the questions are searched.

    Example: beatrice control runs/paper --max-generations 4.63 --only all
    """
    from beatrice.extract.plugs import load_plug
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import do
    from beatrice.pgir.controllers.services import JUDGES
    from beatrice.pgir.controllers.stage import (
        CONTROL,
        EVERY_RIVAL,
        OWN_JUDGE,
        settle_search,
    )

    settle_options(run_dir, take_retrieval(given), "control")
    known = {"none": (), "all": EVERY_RIVAL} | {name: (name,) for name in EVERY_RIVAL}
    if unknown := [name for name in rivals if name not in known]:
        raise click.UsageError(
            f"--only: no rival is called {unknown[0]!r}; expected {', '.join(known)}"
        )
    named = {one for name in rivals for one in known[name]}
    for spec in judges:
        load_plug(spec, JUDGES)  # what cannot be found is not written down
    given["rivals"] = tuple(n for n in EVERY_RIVAL if n in named) if rivals else None
    given["judges"] = tuple(f"{OWN_JUDGE}{spec}" for spec in judges) or None
    if any(value is not None for value in given.values()):
        with RunDir.open(run_dir) as run:
            settle_search(run, partial(with_options, **given))
    do(run_dir, CONTROL)


@click.command()
@RUN_DIR
@click.option("--question", default=None, help="As the model was asked.")
@click.option("--answer", default=None, help="The answer to be judged.")
@click.option(
    "--context", multiple=True, help="A passage the model was shown; repeatable."
)
@click.option(
    "--file",
    "answers",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Answers, a row each: own, lm-eval's or FlashRAG's.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where a file's results go; continued if it is there.  [default: stdout]",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with the answers' tokens tinted by their probability.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=64,
    help="Most rows of a file in one forward pass.",
)
@click.option("--model", default=None, help="Where the backbone lies, if moved.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def score(
    run_dir: Path,
    question: str | None,
    answer: str | None,
    context: tuple[str, ...],
    answers: Path | None,
    out: Path | None,
    html: Path | None,
    batch_size: int,
    model: str | None,
    as_json: bool,
) -> None:
    """Score answers that exist: one, or a file of them; P(correct) back.

    A file's results are JSON lines in its order; a row that cannot be scored is named
    in its place, and the exit code is then 1.

    Example: beatrice score runs/demo --question "who wrote X?" --answer "Y"
    """
    if answers is None and (question is None or answer is None):
        raise click.UsageError("give --question and --answer, or --file")
    if answers is not None and (question, answer, context) != (None, None, ()):
        raise click.UsageError("a --file has its own questions, answers and contexts")
    if answers is None and out is not None:
        raise click.UsageError("--out is for the results of a --file")
    _refuse_same({"--file": answers, "--out": out, "--html": html})
    quiet()
    from beatrice.extract.run.directory import RunDir, read_manifest

    read_manifest(run_dir)  # what is no run, or not finished, is refused at once
    RunDir(run_dir).finished_detector()
    if answers is not None:
        _score_file(RunDir(run_dir), model, answers, out, html, batch_size)
        return
    from beatrice.pgir.scoring.scorer import Scorer

    found = Scorer.load(run_dir, model=model).score(question, answer, context or None)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(": ".join(filter(None, (found.decision, found.reason))), err=True)
    if html is not None:
        _write_page(
            html, f"{run_dir.name}: one answer", "", [(question, found.as_json())]
        )
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        p_correct = found.p_correct
        click.echo("unknown" if p_correct is None else f"{p_correct:.3f}")


def _refuse_same(files: Mapping[str, Path | None]) -> None:
    """Refuse to write a file over another that the same line names."""
    named = [(name, path) for name, path in files.items() if path is not None]
    for (one, path), (other, same) in itertools.combinations(named, 2):
        is_link = path.exists() and same.exists() and path.samefile(same)
        if is_link or path.resolve() == same.resolve():
            raise click.UsageError(
                f"{one} and {other} are the same file, {path}; give two names"
            )


def _write_page(html: Path, title: str, summary: str, results: Results) -> None:
    """Write the page of some results."""
    from beatrice.extract.run.files import write_text_atomic
    from beatrice.pgir.scoring.page import page

    write_text_atomic(html, page(title, summary, results))


def _score_file(
    run: "RunDir",
    model: str | None,
    answers: Path,
    out: Path | None,
    html: Path | None,
    batch_size: int,
) -> None:
    """Score a file's rows; raise at the end if any of them could not be scored."""
    from beatrice.extract.records import SETTINGS
    from beatrice.extract.run.files import CHECKSUMS, JsonLines, sha256_file
    from beatrice.pgir.scoring.rows import Tally, count_rows, read_rows, score_rows

    progress, tally, shown = Progress(), Tally(), []
    total = count_rows(answers)  # a file that cannot be read is refused at once
    from beatrice.pgir.scoring.scorer import Scorer

    scorer = Scorer.load(run.path, model=model)
    lines = JsonLines.open(out) if out else None
    if lines and lines.truncated:
        progress.note(lines.truncated)
    with progress.stage("score") as update:

        def each(row: Any, result: Mapping[str, Any]) -> None:
            tally.add(row, result)
            update(tally.n_done, total)
            if html is not None:
                asked = (getattr(row.given, name, None) for name in _ASKED)
                shown.append((next(filter(None, asked), None), result))

        score_rows(
            lambda rows: scorer.score_many(rows, batch_size),
            read_rows(answers),
            sha256_file(run.finished_detector() / CHECKSUMS),
            lines,
            lines.append if lines else lambda some: click.echo("\n".join(some)),
            each,
        )
    for setting in SETTINGS:
        threshold = scorer.threshold(setting)
        if threshold is not None:
            progress.note(f"{setting}: trusted is {threshold.in_words()}")
    progress.note(tally.in_words())
    if html is not None:
        _write_page(
            html, f"{answers.name}, read by {run.path.name}", tally.in_words(), shown
        )
    if tally.bad:
        raise click.ClickException(
            f"{len(tally.bad)} of {tally.n_done} rows could not be scored; the first, "
            f"{tally.bad[0]}"
        )
