"""The verbs by which other models judge and reword: `label` and `rewrite`."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from beatrice.extract.generate.commands import do_texts, open_asking
from beatrice.extract.generate.generator import Generator, TextStage
from beatrice.extract.generate.options import BackendOptions, check_model_option
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.verbs import (
    AS_JSON,
    FILE,
    RUN_DIR,
    WorkOptions,
    alone,
    option,
    options,
)

if TYPE_CHECKING:
    from beatrice.extract.label.audit import HumanAgreement


def _do_asking(
    run_dir: Path,
    line: str,
    model: str,
    backend: BackendOptions,
    work: WorkOptions,
    stage_of: Callable[[RunDir, Generator, Progress], TextStage[Any]],
) -> None:
    """Do a verb that asks the model of an option; `line` has both."""
    verb, option = line.split()
    if backend.server is None:
        check_model_option(model, option)
    else:
        alone(f"{line} --server", work.share)
    quiet()

    def open_in(run: RunDir) -> Any:
        return open_asking(run, verb, model, backend)

    do_texts(run_dir, verb, work, open_in, stage_of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """Which model rewrites contexts, and how long they may be."""

    model: str = option(
        "Rewriter: directory, GGUF file, Hub id, or a server's name.", required=True
    )
    max_new_tokens: int = option(
        "Longest rewritten context; a longer one counts as failed.", 1024, min=1
    )
    overlong: Literal["refuse", "skip"] = option(
        "Without --server: contexts beyond the rewriter's window stop the stage, or "
        "count as failed.",
        "refuse",
    )


@click.command()
@RUN_DIR
@AS_JSON
@options(how=RewriteOptions, work=WorkOptions, backend=BackendOptions)
def rewrite(
    run_dir: Path,
    as_json: bool,
    how: RewriteOptions,
    work: WorkOptions,
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
    from beatrice.extract.label.stage import rewrite_counts, rewrite_stage

    def stage_of(run: RunDir, generator: Generator, _: Progress) -> Any:
        config = RewriteConfig(
            max_new_tokens=how.max_new_tokens,
            seed=run.seed,
            skip_overlong=how.overlong == "skip",
            template=answer_config(run, is_recorded=False).prompt.template,
        )
        return rewrite_stage(run, generator, config)

    _do_asking(run_dir, "rewrite --model", how.model, backend, work, stage_of)
    if work.dry_run or not RunDir(run_dir).stage_done("rewrite"):
        return  # of a share: others have to do theirs
    counts = rewrite_counts(RunDir(run_dir))
    lines = (f"{name:<30}{n:>8}" for name, n in counts.items())
    click.echo(json.dumps(counts) if as_json else "\n".join(lines))
    click.echo(str(run_dir / "rewrites.jsonl"), err=as_json)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """Who says whether an answer is right; at most one of the first three."""

    match: Literal["exact", "containment"] | None = option(
        "Without --judge: the answer is a gold, or has one in it as whole words; both "
        "normalised as SQuAD's script does. Default: the run's own, at first exact."
    )
    imported: Path | None = option(
        'Take the labels of a file: lines of {"question", "answer", "label"}; a label '
        "holds for that very answer of the model, others stay without one.",
        flag="--import",
        metavar="FILE",
        type=FILE,
    )
    judge: str | None = option(
        "Judge by a model and three rubrics: directory, GGUF file, Hub id, or a "
        "server's model name. Or by a function of your own, called with a question and "
        "an answer, that returns True, False or None: MODULE:NAME of a module that is "
        "installed or lies here, or an entry point of beatrice.judges."
    )
    vote: Literal["unanimous", "majority"] = option(
        "unanimous drops what the rubrics disagree on; majority is for the set with "
        "real retrieval.",
        "unanimous",
    )
    audit: bool = option("Say how far the labels can be trusted.", False)
    n_samples: int | None = option(
        "With --audit: answers for a person to judge blind.  [default: 100]", min=1
    )
    annotations: Path | None = option(
        "With --audit: that sample, its column 'human' filled in.", type=FILE
    )

    def __post_init__(self) -> None:
        """Check what goes together."""
        ways = {
            "--match": self.match,
            "--import": self.imported,
            "--judge": self.judge,
        }
        chosen = [name for name, value in ways.items() if value is not None]
        if len(chosen) > 1:
            raise click.UsageError(
                f"{' and '.join(chosen)} are ways to label; give one"
            )
        if self.audit and chosen and self.judge is None:
            raise click.UsageError(f"label with {chosen[0]} first, then with --audit")
        for name in ("n_samples", "annotations"):
            if getattr(self, name) is not None and not self.audit:
                flag = "--" + name.replace("_", "-")
                raise click.UsageError(f"{flag} is for --audit; give both")

    def is_function(self, backend: BackendOptions) -> bool:
        """Return whether the judge is a person's function, and no model."""
        if self.judge is None or backend.server is not None:
            return False
        if Path(self.judge).exists():
            return False
        points = importlib.metadata.entry_points(group="beatrice.judges")
        return ":" in self.judge or self.judge in points.names


@click.command()
@RUN_DIR
@AS_JSON
@options(how=LabelOptions, work=WorkOptions, backend=BackendOptions)
def label(
    run_dir: Path,
    as_json: bool,
    how: LabelOptions,
    work: WorkOptions,
    backend: BackendOptions,
) -> None:
    """Label the answers, by comparison with golds, by judges or by a file; audit them.

    With --audit alone the labels that are there are audited. A judge on this machine
    is shared: under torchrun, srun or mpirun, or with --shard, every process does its
    part.

    Example: beatrice label runs/demo --audit
    """
    is_function = how.is_function(backend)
    model = None if is_function else how.judge
    if model is None and (backend.server is not None or how.vote != "unanimous"):
        raise click.UsageError("--server and --vote are for a model as --judge")
    if work.dry_run and (model is None or how.audit):
        raise click.UsageError("--dry-run counts what --judge would be asked, alone")
    from beatrice.extract.label import stage
    from beatrice.extract.label.judges import ConsensusConfig

    progress = Progress()
    if model is None or how.audit:
        alone("label without --judge, or with --audit,", work.share)
    if model is not None:
        # Of a directory its name alone: rows are compared between machines.
        name = Path(model).name if Path(model).is_dir() else model

        def stage_of(run: RunDir, generator: Generator, shown: Progress) -> Any:
            config = ConsensusConfig(vote=how.vote, seed=run.seed)
            return stage.judge_stage(run, generator, config, shown, name=name)

        _do_asking(run_dir, "label --judge", model, backend, work, stage_of)
    elif not how.audit or how.judge is not None:
        with RunDir.open(run_dir) as run:
            if how.imported is not None:
                stage.label_run_by_import(run, how.imported, progress)
            elif how.judge is not None:
                stage.label_run_with(run, how.judge, progress)
            else:
                stage.label_run(run, how.match, progress)
    if how.audit:
        _audit(run_dir, how.n_samples or 100, how.annotations, as_json)


def _audit(
    run_dir: Path, n_sample: int, annotations: Path | None, as_json: bool
) -> None:
    """Audit the labels, and compare a person's with them."""
    from beatrice.extract.label.stage import audit_labels, compare_annotations

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
    from beatrice.extract.label.audit import Agreement

    names = [field.name for field in dataclasses.fields(Agreement)]
    return Agreement(**{name: row[name] for name in names}).in_words()


def _audit_as_text(report: dict[str, Any], human: "HumanAgreement | None") -> str:
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
