"""The verbs that ask a model and read it: rewrite, answer, label, sample, extract."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import msgspec

from beatrice.extract.backbone.names import BackboneConfig, default_dtype
from beatrice.extract.generate.generator import (
    MAX_SAMPLES,
    Generator,
    SamplingConfig,
    SavedReply,
    TextStage,
)
from beatrice.extract.generate.options import (
    BackendOptions,
    RunBackendOptions,
    RunServerOptions,
    check_backbone,
    check_model_option,
)
from beatrice.extract.generate.prompts import TokenizerOnly
from beatrice.extract.label.labels import ConsensusConfig, Match, Vote
from beatrice.extract.records import Answer, AnswerSpan, Split
from beatrice.extract.run.console import Progress, silence_transformers
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.files import JsonLines
from beatrice.extract.run.stages import do_share, forecast_stage, open_and_do, run_stage
from beatrice.extract.run.verbs import (
    AS_JSON,
    FILE,
    RUN_DIR,
    Parsed,
    WorkOptions,
    check_alone,
    given,
    option,
    options,
)

if TYPE_CHECKING:
    from beatrice.extract.label.stage import HumanAgreement


# Types of stored numbers, as the command line calls them.
STORED_TYPES = dict(bf16="bfloat16", fp16="float16", fp32="float32", int8="int8")


def _layers(text: str) -> tuple[int, ...] | str:
    """Parse a list of layers; `all` stays a string, since None means not given."""
    from beatrice.extract.store.spec import parse_layers

    return parse_layers(text) or "all"


class _StoredType(click.Choice):
    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        return STORED_TYPES[super().convert(value, param, ctx)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Fields of `ExtractConfig`; None leaves a field as it is."""

    hidden_layers: tuple[int, ...] | Literal["all"] | None = option(
        "Layers kept: one, some (8,16,24), or all; 0 is the embedding.",
        metavar="LAYERS",
        show_default="all",
        type=Parsed(_layers),
    )
    hidden_spans: Literal["all", "answer"] | None = option(
        "Tokens whose hidden states are kept: of all spans (the default, except with "
        "the verb `real`) or of the answer only.",
        rare=True,
    )
    dtype: str | None = option(
        "Number type of stored hidden states: bf16 (the default), fp16, fp32, or int8 "
        "with a scale per token.",
        rare=True,
        type=_StoredType(list(STORED_TYPES)),
    )
    scalars: str | None = option(
        "Number type of the other three families: bf16, or fp32 (the default).",
        rare=True,
        type=_StoredType(["bf16", "fp32"]),
    )
    answer_span: AnswerSpan | None = option(
        "Answer span: the positions that emit the answer (emitting, the default), or "
        "only the answer tokens (literal).",
        rare=True,
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields of `ExtractConfig` that were given."""
        fields = given(self)
        if fields.get("hidden_layers") == "all":
            fields["hidden_layers"] = None
        return fields


@click.command()
@RUN_DIR
@options(storage=StorageOptions, work=WorkOptions)
def extract(run_dir: Path, storage: StorageOptions, work: WorkOptions) -> None:
    """Read the four signal families of every answer into the feature store.

    What is kept can be chosen here until something is extracted; the default is the
    run's own. Under torchrun or srun, or with --shard, every process does its part.

    Example: torchrun --nproc-per-node 2 -m beatrice extract runs/demo
    """
    from beatrice.extract.signals import extract as signals

    fields = storage.fields()
    if fields.get("hidden_layers") is not None:
        config = RunDir(run_dir).section("backbone", BackboneConfig)
        check_backbone(config, fields["hidden_layers"])
    if work.dry_run:
        change = functools.partial(dataclasses.replace, **fields)
        click.echo(forecast_stage(run_dir, signals.EXTRACT, change))
        return
    # Cached: the model that did a share also joins the shares.
    stage = signals.extract_stage(functools.cache(signals.open_local_reader))
    progress = Progress()

    def work_in(run: RunDir) -> int | None:
        if fields:
            signals.record_storage(run, fields)
        return run_stage(stage, run, progress)

    do_share(run_dir, stage.name, work.share, work_in, progress, stage.parts)


Opened = TypeVar("Opened")


def do_texts(
    run_dir: Path,
    name: str,
    work: WorkOptions,
    open_in: Callable[[RunDir], contextlib.AbstractContextManager[Opened]],
    stage_of: Callable[[RunDir, Opened, Progress], TextStage[Any]],
) -> None:
    """Do a stage of a model's texts, or a share of it, or print its forecast."""
    progress = Progress()
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda run: stack.enter_context(open_in(run)))
        if work.dry_run:
            read_manifest(run_dir)  # before loading a model: fails if it is not a run
            run = RunDir(run_dir)  # not locked, since it is only read
            click.echo(stage_of(run, opened(run), progress).forecast())
            return

        def work_in(run: RunDir) -> int | None:
            return stage_of(run, opened(run), progress).do(progress)

        do_share(run_dir, name, work.share, work_in, progress, parts="texts")


@contextlib.contextmanager
def open_generator(
    model: str, options: BackendOptions, earlier: tuple[int, int] = (0, 0)
) -> Iterator[Generator]:
    """Open a model here or on a server; `earlier` tokens count towards its cap."""
    if options.server is not None:
        from beatrice.extract.generate.server import ServedGenerator

        with ServedGenerator(model, options, earlier=earlier) as generator:
            yield generator
        return
    import torch

    config = BackboneConfig(
        model=model,
        dtype=default_dtype(options.device or "cpu"),
        n_threads=torch.get_num_threads(),
    )
    yield _load_generator(config, options)


def _load_generator(
    config: BackboneConfig, options: BackendOptions, answers: Path | None = None
) -> Generator:
    """Load a model; a device or dtype among the options overrides its config."""
    from beatrice.extract.backbone.loading import open_backbone
    from beatrice.extract.generate.local import TransformersGenerator

    chosen = {"device": options.device, "dtype": options.model_dtype}
    fields: dict[str, Any] = {n: v for n, v in chosen.items() if v is not None}
    return TransformersGenerator(
        backbone=open_backbone(dataclasses.replace(config, **fields), answers),
        tokens_per_batch=options.batch_tokens,
    )


def _paid_tokens(run: RunDir, stage: str) -> tuple[int, int]:
    """Return how many prompt and new tokens a stage has used, over all backends."""
    if stage == "answer":
        from beatrice.extract.generate import answers  # loads NumPy

        files = answers.answer_files(run)
        counts = (
            (len(r.prompt_ids), len(r.token_ids) + (r.stop_id is not None))
            for file in (files.path, *files.part_files())
            for r in JsonLines(file).intact_rows(Answer)
        )
    else:
        replies = JsonLines(run.replies({"label": "judge"}.get(stage, stage)))
        counts = (
            row.booked or (row.n_prompt_tokens or 0, row.n_new_tokens or 0)
            for row in replies.intact_rows(SavedReply)
        )
    n_prompt = n_new = 0
    for prompt, new in counts:
        n_prompt, n_new = n_prompt + prompt, n_new + new
    return n_prompt, n_new


@contextlib.contextmanager
def _open_backbone(
    run: RunDir, stage: str, backend: RunServerOptions, *, log_probs: bool = False
) -> Iterator[tuple[TokenizerOnly, Generator]]:
    """Open the run's backbone, here or on a server, and its tokenizer."""
    from beatrice.extract.signals.parity import require_readable

    silence_transformers()
    from beatrice.extract.generate import answers

    model, stop_ids = answers.load_tokenizer_only(run, require_readable)
    config = run.section("backbone", BackboneConfig)
    if backend.server is None and isinstance(backend, BackendOptions):
        yield model, _load_generator(config, backend, run.answers)
        return
    from beatrice.extract.generate.server import ServedGenerator

    with ServedGenerator(
        backend.served_model or config.path,
        backend,
        stop_ids=stop_ids,
        log_probs=log_probs,
        tokenizer=model.tokenizer,
        earlier=_paid_tokens(run, stage),
    ) as generator:
        yield model, generator


@click.command()
@RUN_DIR
@click.option(
    "--no-read",
    is_flag=True,
    help="Only write answers; `beatrice extract` then needs a second pass over them.",
)
@options(work=WorkOptions, backend=RunServerOptions)
def answer(
    run_dir: Path, no_read: bool, work: WorkOptions, backend: RunServerOptions
) -> None:
    """Answer every question, closed-book and with context.

    Answers are written on this machine, or by a vLLM server that holds the run's
    backbone. On this machine their signals are read in the same passes, if the model
    allows it, and wait in RUN_DIR/written until `beatrice extract` stores them; under
    torchrun or srun, or with --shard, every process does its part, and the answers are
    the same as from one process.

    Example: beatrice answer runs/demo

    Example: torchrun --nproc-per-node 8 -m beatrice answer runs/paper
    """
    from beatrice.extract import engines
    from beatrice.extract.generate import answers

    if backend.server is None:
        opener = engines.open_readable if no_read else engines.open_reading
        # Cached: the model that did a share also joins the shares.
        stage = answers.answer_stage(functools.cache(opener))
        if work.dry_run:
            click.echo(forecast_stage(run_dir, stage))
        else:
            open_and_do(run_dir, stage, share=work.share)
        return
    check_alone("answer --server", work.share)
    with (
        RunDir(run_dir) if work.dry_run else RunDir.open(run_dir) as run,
        _open_backbone(run, "answer", backend) as (model, generator),
    ):
        if work.dry_run:
            config = answers.answer_config(run, is_recorded=False)
            click.echo(answers.forecast_answers(run, config, model).as_text())
        else:
            answers.answer_with(run, answers.Engine(generator, model), Progress())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """How answers are drawn, by default as in Farquhar et al. (Nature, 2024)."""

    n_samples: int = option(
        "Answers drawn per question, setting and variant.", 10, min=1, max=MAX_SAMPLES
    )
    split: tuple[Split, ...] = option(
        "Splits of the questions; repeatable. Answers already drawn this way are kept.",
        ("validation", "test", "ood"),
    )
    temperature: float = option(
        "Sampling temperature.", 1.0, rare=True, min=0, is_above=True
    )
    top_p: float = option(
        "Share of the probability to draw from.",
        0.9,
        rare=True,
        min=0,
        max=1,
        is_above=True,
    )
    top_k: int = option(
        "Top tokens to draw from, 0 for all; servers: vLLM only.", 50, rare=True, min=0
    )


@click.command()
@RUN_DIR
@options(draw=DrawOptions, work=WorkOptions, backend=RunBackendOptions)
def sample(
    run_dir: Path, draw: DrawOptions, work: WorkOptions, backend: RunBackendOptions
) -> None:
    """Draw several answers per question, for the sampling baselines.

    On this machine every process does its part under torchrun, srun or mpirun, or with
    --shard.

    Example: beatrice sample runs/demo --n-samples 10 --split test
    """
    from beatrice.extract.generate import answers

    if backend.server is not None:
        check_alone("sample --server", work.share)

    def open_in(run: RunDir) -> Any:
        return _open_backbone(run, "sample", backend, log_probs=True)

    def stage_of(run: RunDir, opened: Any, progress: Progress) -> Any:
        config = answers.answer_config(run, is_recorded=not work.dry_run)
        sampling = SamplingConfig(
            max_new_tokens=config.generation.max_new_tokens,
            stop=config.generation.stop,
            temperature=draw.temperature,
            top_p=draw.top_p,
            top_k=draw.top_k or None,
            seed=run.seed,
        )
        model, generator = opened
        draws = answers.DrawConfig(n_samples=draw.n_samples, sampling=sampling)
        drawing = (run, generator, model, config.prompt, draws, draw.split, progress)
        as_text = backend.server is not None and backend.dialect != "vllm"
        return answers.draw_stage(*drawing, as_text=as_text)

    do_texts(run_dir, "sample", work, open_in, stage_of)
    if not work.dry_run and work.share.is_whole:
        click.echo(str(RunDir(run_dir).samples_file))


def _do_asking(
    run_dir: Path,
    line: str,
    model: str,
    backend: BackendOptions,
    work: WorkOptions,
    stage_of: Callable[[RunDir, Generator, Progress], TextStage[Any]],
) -> None:
    """Do a verb that asks a model named by an option; `line` is "VERB OPTION"."""
    verb, option = line.split()
    if backend.server is None:
        check_model_option(model, option)
    else:
        check_alone(f"{line} --server", work.share)
    silence_transformers()

    def open_in(run: RunDir) -> Any:
        return open_generator(model, backend, _paid_tokens(run, verb))

    do_texts(run_dir, verb, work, open_in, stage_of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """Which model rewrites contexts, and how long they may be."""

    model: str = option(
        "Rewriter: directory, GGUF file, Hub id, or name on a server.", required=True
    )
    max_new_tokens: int = option(
        "Longest rewritten context; a longer one counts as failed.", 1024, min=1
    )
    overlong: Literal["refuse", "skip"] = option(
        "Without --server: whether contexts beyond the rewriter's window stop the "
        "stage, or count as failed.",
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

    Run it before `answer`, which then also answers on the rewritten contexts. What a
    rewrite adds to its source is flagged and counted. On this machine every process
    does its part under torchrun, srun or mpirun, or with --shard.

    Example: beatrice rewrite runs/mine --model Qwen/Qwen3.5-27B --server
    http://localhost:8000/v1
    """
    from beatrice.extract.generate.answers import answer_config
    from beatrice.extract.label import rewrite as rewriting

    def stage_of(run: RunDir, generator: Generator, _: Progress) -> Any:
        config = rewriting.RewriteConfig(
            max_new_tokens=how.max_new_tokens,
            seed=run.seed,
            skip_overlong=how.overlong == "skip",
            template=answer_config(run, is_recorded=False).prompt.template,
        )
        return rewriting.rewrite_stage(run, generator, config)

    _do_asking(run_dir, "rewrite --model", how.model, backend, work, stage_of)
    if work.dry_run or not RunDir(run_dir).stage_done("rewrite"):
        return  # other shares are still to be done
    counts = rewriting.rewrite_counts(RunDir(run_dir))
    lines = (f"{name:<30}{n:>8}" for name, n in counts.items())
    click.echo(json.dumps(counts) if as_json else "\n".join(lines))
    click.echo(str(run_dir / "rewrites.jsonl"), err=as_json)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """How answers are labelled; at most one of the first three."""

    match: Match | None = option(
        "Without --judge: whether an answer must equal a gold one or contain one as "
        "whole words, both normalised as in SQuAD's script. Default: the run's rule, "
        "at first exact."
    )
    imported: Path | None = option(
        'Take labels from a file of lines {"question", "answer", "label"}. A label '
        "holds for exactly that answer of the model; answers that the file lacks or "
        "labels null get none.",
        flag="--import",
        metavar="FILE",
        type=FILE,
    )
    judge: str | None = option(
        "Judge with a model and three rubrics: directory, GGUF file, Hub id, or a "
        "server's model name. Or with your own function, which takes a question and an "
        "answer and returns True, False or None: MODULE:NAME of a module installed or "
        "in this folder, or an entry point of beatrice.judges."
    )
    vote: Vote = option(
        "unanimous drops answers that the rubrics disagree on; majority is for the set "
        "with real retrieval",
        "unanimous",
        rare=True,
    )
    max_new_tokens: int = option(
        "Longest verdict; raise it for a judge that thinks, if its server removes the "
        "thoughts.",
        8,
        rare=True,
        min=1,
    )
    audit: bool = option("Report how far the labels can be trusted.", False)
    n_samples: int | None = option(
        "With --audit: how many answers a person judges blind.  [default: as drawn "
        "before, else 100]",
        min=1,
    )
    annotations: Path | None = option(
        "With --audit: that sample with its column 'human' filled in.", type=FILE
    )

    def __post_init__(self) -> None:
        """Check that the options go together."""
        ways = {"--match": self.match, "--import": self.imported, "--judge": self.judge}
        chosen = [name for name, value in ways.items() if value is not None]
        if len(chosen) > 1:
            raise click.UsageError(f"{' and '.join(chosen)} are alternatives; give one")
        if self.audit and chosen and self.judge is None:
            raise click.UsageError(f"label with {chosen[0]} first, then with --audit")
        for name in ("n_samples", "annotations"):
            if getattr(self, name) is not None and not self.audit:
                flag = "--" + name.replace("_", "-")
                raise click.UsageError(f"{flag} is for --audit; give both")

    def is_function(self, backend: BackendOptions) -> bool:
        """Return whether the judge is a user's function, not a model."""
        if self.judge is None or backend.server or Path(self.judge).exists():
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
    """Label the answers by comparison with golds, by judges or from a file; audit them.

    With --audit only, audit the existing labels. A judge on this machine can be shared:
    under torchrun, srun or mpirun, or with --shard, every process does its part.

    Example: beatrice label runs/demo --audit
    """
    is_function = how.is_function(backend)
    model = None if is_function else how.judge
    how_judged = backend.server, how.vote, how.max_new_tokens
    if model is None and how_judged != (None, "unanimous", 8):
        raise click.UsageError(
            "--server, --set vote and --set max_new_tokens need a model as --judge"
        )
    if work.dry_run and (model is None or how.audit):
        raise click.UsageError("--dry-run needs a model as --judge, and no --audit")
    from beatrice.extract.label import stage

    progress = Progress()
    if model is None or how.audit:
        check_alone("label without --judge, or with --audit,", work.share)
    if model is not None:
        # Only a directory's name, so that machines write comparable rows.
        name = Path(model).name if Path(model).is_dir() else model

        def stage_of(run: RunDir, generator: Generator, shown: Progress) -> Any:
            config = ConsensusConfig(
                vote=how.vote, max_new_tokens=how.max_new_tokens, seed=run.seed
            )
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
        with RunDir.open(run_dir) as run:
            rows = how.annotations
            human = None if rows is None else stage.compare_annotations(run, rows)
            report = stage.audit_labels(run, how.n_samples)
        extra = {} if human is None else {"human": dataclasses.asdict(human)}
        text = json.dumps(report | extra) if as_json else _audit_as_text(report, human)
        click.echo(text)


def _audit_as_text(report: dict[str, Any], human: "HumanAgreement | None") -> str:
    from beatrice.extract.label.stage import Agreement, noise_in_words

    def agreement(row: dict[str, Any]) -> str:
        return msgspec.convert(row, Agreement).in_words()

    lines = [f"labels by {report['label_rule']}", "", "against exact match"]
    for row in report["exact_match"]:
        where = f"{row['setting']}, {row['variant']}"
        lines.append(f"  {where:<26}{agreement(row)}")
        if row["n_dropped"]:
            lines.append(
                f"  {'':<26}{row['n_dropped']} of {row['n_answers']} answers without "
                f"a label, {row['n_unparsable_verdicts']} unparsable verdicts"
            )
    if report["judges"]:
        lines += ["", "between rubrics"]
    for row in report["judges"]:
        lines.append(f"  {row['first']} and {row['second']}: {agreement(row)}")
    if human is not None:
        lines += ["", f"a person; items left empty: {human.n_empty}"]
        lines.append(f"  {'against the labels':<26}{human.judge.in_words()}")
        lines.append(f"  {'against exact match':<26}{human.exact.in_words()}")
        if human.n_dropped:
            lines.append(f"  items without a label by now: {human.n_dropped}")
        noise = noise_in_words(human.noise) or [
            "the sample was drawn under other labels, so shares of all are unknown"
        ]
        lines += [f"  {line}" for line in noise]
    lines += ["", f"{report['n_disagreements']} disagreements in"]
    lines += [f"  {report['disagreements']}", "to be judged blind"]
    lines.append(f"  {report['sample']}")
    if not report["sample_is_current"]:
        lines.append(
            "  (drawn earlier, perhaps under other labels; move it away to draw again)"
        )
    return "\n".join(lines)
