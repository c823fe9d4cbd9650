"""The verbs that let a model write: answers, rewrites, and verdicts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.verbs.backends import (
    backend_options,
    open_generator,
    server_options,
    take_options,
)
from benchmarks.verbs.dryrun import (
    dry_run_option,
    dry_run_stage,
    rehearsing,
    show_forecast,
)
from benchmarks.verbs.modelchoice import check_local_model
from benchmarks.verbs.opening import RUN_DIR, alone, config_of, do, opened
from extract.run.console import Progress, quiet

if TYPE_CHECKING:
    from benchmarks.verbs.backends import BackendOptions


@click.command()
@RUN_DIR
@click.option("--model", required=True, help="Rewriter: directory, Hub id, or name.")
@click.option(
    "--max-tokens",
    default=1024,
    show_default=True,
    type=click.IntRange(min=1),
    help="Longest rewritten context; a longer one counts as failed.",
)
@click.option(
    "--overlong",
    type=click.Choice(["refuse", "skip"]),
    default="refuse",
    show_default=True,
    help="Without --server: contexts beyond the rewriter's window stop the stage, or "
    "count as failed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@dry_run_option
@backend_options
def rewrite(
    run_dir: Path,
    model: str,
    max_tokens: int,
    overlong: str,
    as_json: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Put every in-domain context into other words, with the paper's prompt.

    Before `answer`, which then also answers on the rewritten contexts. What a rewrite
    adds beyond its source is flagged and counted.

    Example: beatrice rewrite runs/mine --model Qwen/Qwen3.5-27B --server
    http://localhost:8000/v1
    """
    backend = take_options(options)
    check_local_model(model, backend, "--model")
    from benchmarks.stages.label_stages import rewrite_run
    from extract.label.rewrite import RewriteConfig

    alone("rewrite")
    config = config_of(run_dir)
    rewriting = RewriteConfig(
        max_new_tokens=max_tokens, seed=config.seed, skip_overlong=overlong == "skip"
    )
    quiet()
    with (
        opened(run_dir, config) as run,
        rehearsing(run, "rewrite", model, backend, dry_run=dry_run) as generator,
    ):
        counts = rewrite_run(run, generator, rewriting, Progress())
        click.echo(json.dumps(counts) if as_json else _in_lines(counts))
        click.echo(str(run_dir / "rewrites.jsonl"), err=as_json)


def _in_lines(counts: dict[str, int]) -> str:
    return "\n".join(f"{name:<30}{n:>8}" for name, n in counts.items())


@click.command()
@RUN_DIR
@click.option("--served-model", help="What the server calls the run's backbone.")
@dry_run_option
@server_options
def answer(
    run_dir: Path, served_model: str | None, dry_run: bool, **options: Any
) -> None:
    """Answer every question, closed-book and with context.

    On this machine, or by a vLLM server that holds the run's backbone. On this
    machine under torchrun, SLURM or a Kubernetes indexed job every process does its
    part, and the answers are those of one process.

    Example: beatrice answer runs/demo

    Example: torchrun --nproc-per-node 8 -m beatrice answer runs/paper
    """
    backend = take_options(options, served_model)
    if backend.server is None:
        if dry_run:
            dry_run_stage(run_dir, "answer")
        else:
            _answer_here(run_dir)
        return
    alone("answer --server")
    from benchmarks.stages.label_stages import answer_by_server, load_tokenizer_only
    from benchmarks.stages.tallies import paid_tokens

    config = config_of(run_dir)
    quiet()
    words, stop_ids = load_tokenizer_only(config)
    with (
        opened(run_dir, config) as run,
        open_generator(
            served_model or config.model_path,
            backend,
            stop_ids=stop_ids,
            tokenizer=words.tokenizer,
            earlier=paid_tokens(run, "answer"),
        ) as generator,
    ):
        if dry_run:
            from benchmarks.forecasts.forecast_stages import forecast_answers

            show_forecast(run, forecast_answers(run, config, generator, words))
            return
        answer_by_server(run, config, generator, words, Progress())


def _answer_here(run_dir: Path) -> None:
    """Answer on this machine: all of it, or a worker's part."""
    from extract.run.workers import rank_and_world_size

    worker = rank_and_world_size()
    if worker[1] == 1:
        do(run_dir, "answer")
        return
    from benchmarks.stages.answer_workers import answer_part

    quiet()
    answer_part(run_dir, config_of(run_dir), worker, Progress())


@click.command()
@RUN_DIR
@click.option(
    "--judge",
    help="Judge by three rubrics: directory, Hub id, or a server's model name. "
    "Without it, labels are normalised exact match.",
)
@click.option(
    "--vote",
    type=click.Choice(["unanimous", "majority"]),
    default="unanimous",
    show_default=True,
    help="unanimous drops what the rubrics disagree on; majority is for the set "
    "with real retrieval.",
)
@click.option("--audit", is_flag=True, help="Say how far the labels can be trusted.")
@click.option(
    "--sample",
    "n_sample",
    default=100,
    show_default=True,
    type=click.IntRange(min=1),
    help="With --audit: answers for a person to judge blind.",
)
@click.option(
    "--annotations",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --audit: that sample, its column 'human' filled in.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the audit as JSON.")
@dry_run_option
@backend_options
def label(
    run_dir: Path,
    judge: str | None,
    vote: str,
    audit: bool,
    n_sample: int,
    annotations: Path | None,
    as_json: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Label the answers, by exact match or by judges; audit the labels.

    With --audit and no --judge the labels that are there are audited.

    Example: beatrice label runs/demo --audit
    """
    backend = take_options(options)
    _refuse_ignored(judge, backend, audit)
    if annotations is not None and not audit:
        raise click.UsageError("--annotations is read by --audit; give both")
    if dry_run and audit:
        raise click.UsageError("--audit asks no model; leave --dry-run out")
    if judge is not None:
        _judge(run_dir, judge, vote, backend, dry_run)
    elif vote != "unanimous":
        raise click.UsageError("--vote is among judges; give --judge too")
    elif dry_run:
        dry_run_stage(run_dir, "label")
    elif not audit:
        Progress().note(
            "label: by normalised exact match, without a judge: a right answer in "
            "words that no gold lists counts as wrong"
        )
        do(run_dir, "label")
    if audit:
        _audit(run_dir, n_sample, annotations, as_json)


def _refuse_ignored(judge: str | None, backend: "BackendOptions", audit: bool) -> None:
    """Refuse options that would change nothing."""
    source = click.get_current_context().get_parameter_source("n_sample")
    if source is not click.core.ParameterSource.DEFAULT and not audit:
        raise click.UsageError("--sample is drawn by --audit; give both")
    if backend.server is not None and judge is None:
        raise click.UsageError("--server is for a judge; give --judge too")


def _judge(
    run_dir: Path, judge: str, vote: str, backend: "BackendOptions", dry_run: bool
) -> None:
    """Label by the consensus of the rubrics."""
    check_local_model(judge, backend, "--judge")
    from benchmarks.stages.label_stages import label_by_judges
    from extract.label.judges import ConsensusConfig

    alone("label --judge")
    config = config_of(run_dir)
    quiet()
    with (
        opened(run_dir, config) as run,
        rehearsing(run, "label", judge, backend, dry_run=dry_run) as generator,
    ):
        judging = ConsensusConfig(vote=vote, seed=config.seed)
        label_by_judges(run, generator, judging, Progress())


def _audit(
    run_dir: Path, n_sample: int, annotations: Path | None, as_json: bool
) -> None:
    """Audit the labels, and compare a person's with them."""
    from benchmarks.stages.label_stages import audit_labels, compare_annotations
    from benchmarks.verbs.audit_text import audit_as_json, audit_as_text

    config = config_of(run_dir)
    with opened(run_dir, config) as run:
        human = (
            None
            if annotations is None
            else compare_annotations(run, annotations, seed=config.seed)
        )
        found = audit_labels(run, n_sample=n_sample, seed=config.seed)
    show = audit_as_json if as_json else audit_as_text
    click.echo(show(found, human))
