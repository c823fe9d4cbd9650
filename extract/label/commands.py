"""The verbs by which other models judge and reword: `label` and `rewrite`."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.extract.generate.options import (
    BackendOptions,
    backend_options,
    check_model_option,
    open_asking,
    opened_once,
)
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.share import Share
from beatrice.extract.run.verbs import RUN_DIR, SHARD, alone, dry_run_option, share_of

if TYPE_CHECKING:
    from beatrice.extract.generate.generator import Generator
    from beatrice.extract.label.audit import HumanAgreement
    from beatrice.extract.run.directory import RunDir


@contextlib.contextmanager
def _asking(
    line: str,
    model: str,
    backend: BackendOptions,
    share: Share,
) -> Iterator[Callable[["RunDir"], "Generator"]]:
    """Yield what opens the model that a verb asks with an option; `line` has both."""
    verb, option = line.split()
    if backend.server is None:
        check_model_option(model, option)
    else:
        alone(f"{line} --server", share)
    quiet()

    def open_in(run: "RunDir") -> Any:
        return open_asking(run, verb, model, backend)

    with opened_once(open_in) as opened:
        yield opened


@click.command()
@RUN_DIR
@click.option(
    "--model", required=True, help="Rewriter: directory, GGUF file, Hub id, or name."
)
@click.option(
    "--max-tokens",
    default=1024,
    type=click.IntRange(min=1),
    help="Longest rewritten context; a longer one counts as failed.",
)
@click.option(
    "--overlong",
    type=click.Choice(["refuse", "skip"]),
    default="refuse",
    help="Without --server: contexts beyond the rewriter's window stop the stage, or "
    "count as failed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@SHARD
@dry_run_option
@backend_options
def rewrite(
    run_dir: Path,
    model: str,
    max_tokens: int,
    overlong: str,
    as_json: bool,
    shard: str | None,
    dry_run: bool,
    backend: BackendOptions,
) -> None:
    """Put every in-domain context into other words, with the paper's prompt.

    Before `answer`, which then also answers on the rewritten contexts. What a rewrite
    adds beyond its source is flagged and counted. On this machine under torchrun, srun
    or mpirun, or with --shard, every process does its part.

    Example: beatrice rewrite runs/mine --model Qwen/Qwen3.5-27B --server
    http://localhost:8000/v1
    """
    from beatrice.extract.generate.answers import answer_config
    from beatrice.extract.label.rewrite import RewriteConfig
    from beatrice.extract.label.stage import (
        forecast_rewrites,
        rewrite_counts,
        rewrite_run,
    )
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import do_share

    share, progress = share_of(shard, dry_run), Progress()
    with _asking("rewrite --model", model, backend, share) as opened:

        def work(run: RunDir) -> int | None:
            config = RewriteConfig(
                max_new_tokens=max_tokens,
                seed=run.seed,
                skip_overlong=overlong == "skip",
                template=answer_config(run, is_recorded=False).prompt.template,
            )
            if dry_run:
                click.echo(forecast_rewrites(run, opened(run), config))
                return None
            return rewrite_run(run, opened(run), config, progress)

        do_share(run_dir, "rewrite", share, work, progress, parts="texts")
    if dry_run or not RunDir(run_dir).stage_done("rewrite"):
        return  # of a share: others have to do theirs
    counts = rewrite_counts(RunDir(run_dir))
    lines = (f"{name:<30}{n:>8}" for name, n in counts.items())
    click.echo(json.dumps(counts) if as_json else "\n".join(lines))
    click.echo(str(run_dir / "rewrites.jsonl"), err=as_json)


@click.command()
@RUN_DIR
@click.option(
    "--match",
    type=click.Choice(["exact", "containment"]),
    help="Without --judge: the answer is a gold, or has one in it as whole words; both "
    "normalised as SQuAD's script does. Default: the run's own, at first exact.",
)
@click.option(
    "--import",
    "imported",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Take the labels of a file: lines of {"question", "answer", "label"}; a label '
    "holds for that very answer of the model, others stay without one.",
)
@click.option(
    "--judge",
    help="Judge by three rubrics: directory, GGUF file, Hub id, or a server's model "
    "name.",
)
@click.option(
    "--judge-with",
    metavar="MODULE:NAME",
    help="Judge by a function of your own, called with a question and an answer, that "
    "returns True, False or None; of a module that is installed or lies here, or an "
    "entry point of beatrice.judges.",
)
@click.option(
    "--vote",
    type=click.Choice(["unanimous", "majority"]),
    default="unanimous",
    help="unanimous drops what the rubrics disagree on; majority is for the set "
    "with real retrieval.",
)
@click.option("--audit", is_flag=True, help="Say how far the labels can be trusted.")
@click.option(
    "--sample",
    "n_sample",
    default=100,
    type=click.IntRange(min=1),
    help="With --audit: answers for a person to judge blind.",
)
@click.option(
    "--annotations",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --audit: that sample, its column 'human' filled in.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the audit as JSON.")
@SHARD
@dry_run_option
@backend_options
def label(
    run_dir: Path,
    match: str | None,
    imported: Path | None,
    judge: str | None,
    judge_with: str | None,
    vote: str,
    audit: bool,
    n_sample: int,
    annotations: Path | None,
    as_json: bool,
    shard: str | None,
    dry_run: bool,
    backend: BackendOptions,
) -> None:
    """Label the answers, by comparison with golds, by judges or by a file; audit them.

    With --audit alone the labels that are there are audited. A judge on this machine
    is shared: under torchrun, srun or mpirun, or with --shard, every process does its
    part.

    Example: beatrice label runs/demo --audit
    """
    ways = {
        "--match": match,
        "--import": imported,
        "--judge": judge,
        "--judge-with": judge_with,
    }
    chosen = [option for option, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} are ways to label; give one")
    if audit and chosen and judge is None:
        raise click.UsageError(f"label with {chosen[0]} first, then with --audit")
    source = click.get_current_context().get_parameter_source("n_sample")
    if source is not click.core.ParameterSource.DEFAULT and not audit:
        raise click.UsageError("--sample is drawn by --audit; give both")
    if annotations is not None and not audit:
        raise click.UsageError("--annotations is read by --audit; give both")
    if judge is None and (backend.server is not None or vote != "unanimous"):
        raise click.UsageError("--server and --vote are for judges; give --judge too")
    is_function = judge is not None and ":" in judge and not Path(judge).exists()
    if is_function and backend.server is None:
        raise click.UsageError(
            f"--judge names a model; a function of your own is --judge-with {judge}"
        )
    if dry_run and (judge is None or audit):
        raise click.UsageError("--dry-run counts what --judge would be asked, alone")
    from beatrice.extract.label import stage
    from beatrice.extract.label.judges import ConsensusConfig
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import do_share

    share, progress = share_of(shard, dry_run), Progress()
    if judge is None or audit:
        alone("label without --judge, or with --audit,", share)
    if judge is not None:
        # Of a directory its name alone: rows are compared between machines.
        name = Path(judge).name if Path(judge).is_dir() else judge
        line = "label --judge"
        with _asking(line, judge, backend, share) as opened:

            def work(run: RunDir) -> int | None:
                config = ConsensusConfig(vote=vote, seed=run.seed)
                judging = (run, opened(run), config)
                if dry_run:
                    click.echo(stage.forecast_judges(*judging))
                    return None
                return stage.label_run_by_judges(*judging, progress, name=name)

            do_share(run_dir, "label", share, work, progress, parts="texts")
    elif not audit:
        with RunDir.open(run_dir) as run:
            if imported is not None:
                stage.label_run_by_import(run, imported, progress)
            elif judge_with is not None:
                stage.label_run_with(run, judge_with, progress)
            else:
                stage.label_run(run, match, progress)
    if audit:
        _audit(run_dir, n_sample, annotations, as_json)


def _audit(
    run_dir: Path, n_sample: int, annotations: Path | None, as_json: bool
) -> None:
    """Audit the labels, and compare a person's with them."""
    from beatrice.extract.label.stage import audit_labels, compare_annotations
    from beatrice.extract.run.directory import RunDir

    with RunDir.open(run_dir) as run:
        human = None
        if annotations is not None:
            human = compare_annotations(run, annotations, seed=run.seed)
        report = audit_labels(run, n_sample=n_sample, seed=run.seed)
    if not as_json:
        click.echo(_audit_as_text(report, human))
        return
    extra = {} if human is None else {"human": dataclasses.asdict(human)}
    click.echo(json.dumps(report | extra))


def _agreement(row: dict[str, Any]) -> str:
    """Return the agreement in a row as one line."""
    from beatrice.extract.label.audit import Agreement

    names = [field.name for field in dataclasses.fields(Agreement)]
    return Agreement(**{name: row[name] for name in names}).in_words()


def _audit_as_text(report: dict[str, Any], human: "HumanAgreement | None") -> str:
    """Return the report of `audit_labels`, line by line."""
    from beatrice.extract.label.audit import noise_in_words

    lines = [f"labels by {report['label_rule']}", "", "against exact match"]
    for row in report["exact_match"]:
        where = f"{row['setting']}, {row['variant']}"
        lines.append(f"  {where:<26}{_agreement(row)}")
        if row["n_dropped"]:
            lines.append(
                f"  {'':<26}{row['n_dropped']} of {row['n_answers']} answers without "
                f"a label, {row['n_unparsable_verdicts']} unparsable verdicts"
            )
    if report["judges"]:
        lines += ["", "between rubrics"]
    for row in report["judges"]:
        lines.append(f"  {row['first']} and {row['second']}: {_agreement(row)}")
    if human is not None:
        lines += ["", f"a person, {human.n_empty} items left empty"]
        lines.append(f"  {'against the labels':<26}{human.judge.in_words()}")
        lines.append(f"  {'against exact match':<26}{human.exact.in_words()}")
        lines += [f"  {line}" for line in noise_in_words(human.noise)]
    lines += ["", f"{report['n_disagreements']} disagreements in"]
    lines += [f"  {report['disagreements']}", "to be judged blind"]
    return "\n".join([*lines, f"  {report['sample']}"])
