"""The verbs that ask the run's backbone: `answer` and `sample`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from beatrice.extract.backbone.names import (
    BackboneConfig,
    default_dtype,
    model_path,
    own_device,
)
from beatrice.extract.generate.generator import (
    MAX_SAMPLES,
    Generator,
    SamplingConfig,
    TextStage,
)
from beatrice.extract.generate.options import (
    BackendOptions,
    RunBackendOptions,
    RunServerOptions,
    ServerOptions,
)
from beatrice.extract.generate.prompts import TokenizerOnly
from beatrice.extract.records import Answer, Split
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import JsonLines
from beatrice.extract.run.stages import do_share
from beatrice.extract.run.verbs import (
    RUN_DIR,
    WorkOptions,
    alone,
    do_or_forecast,
    option,
    options,
)

Opened = TypeVar("Opened")


def do_texts(
    run_dir: Path,
    name: str,
    work: WorkOptions,
    open_in: Callable[[RunDir], contextlib.AbstractContextManager[Opened]],
    stage_of: Callable[[RunDir, Opened, Progress], TextStage[Any]],
) -> None:
    """Do a stage of a model's texts, or a share of them, or say what it would need.

    The model is opened in a run that is held already, and stays open where a share is
    done first and all shares are joined afterwards.
    """
    progress = Progress()
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda run: stack.enter_context(open_in(run)))

        def work_in(run: RunDir) -> int | None:
            stage = stage_of(run, opened(run), progress)
            if not work.dry_run:
                return stage.do(progress)
            click.echo(stage.forecast())
            return None

        do_share(run_dir, name, work.share, work_in, progress, parts="texts")


@contextlib.contextmanager
def open_generator(
    model: str,
    options: ServerOptions,
    *,
    stop_ids: Sequence[int] = (),
    log_probs: bool = False,
    tokenizer: Any = None,
    earlier: tuple[int, int] = (0, 0),
) -> Iterator[Generator]:
    """Open the backend of a model: a directory or Hub id, or a server's name for it.

    Stop ids and tokenizer are the model's, where token ids are wanted from a server;
    log-probabilities cost nothing on this machine. Prompt and new tokens of `earlier`
    count towards the spending cap already.
    """
    if options.server is None:
        if not isinstance(options, BackendOptions):
            raise ValueError("expected --server: this verb has no other backend")
        import torch

        from beatrice.extract.backbone.loading import load_backbone
        from beatrice.extract.generate.local import TransformersGenerator

        device = own_device(options.device, torch.cuda.device_count())
        dtype = options.model_dtype or default_dtype(options.device)
        backbone = load_backbone(model_path(model), dtype=dtype, device=device)
        yield TransformersGenerator(
            backbone=backbone, tokens_per_batch=options.batch_tokens
        )
        return
    from beatrice.extract.generate.server import ServedGenerator

    with ServedGenerator(
        model,
        options,
        stop_ids=stop_ids,
        log_probs=log_probs,
        tokenizer=tokenizer,
        earlier=earlier,
    ) as generator:
        yield generator


def open_asking(
    run: RunDir, stage: str, model: str, options: ServerOptions, **known: Any
) -> contextlib.AbstractContextManager[Generator]:
    """Open a stage's backend; texts that it has count towards the spending cap.

    What is `known` of the model, and its name, are as `open_generator` takes them.
    """
    paid = _paid_tokens(run, stage)
    return open_generator(model, options, earlier=paid, **known)


class _Spent(msgspec.Struct, frozen=True):
    """What is counted of a reply; its other fields are passed over."""

    n_prompt_tokens: int | None
    n_new_tokens: int | None


def _paid_tokens(run: RunDir, stage: str) -> tuple[int, int]:
    """Return prompt and new tokens of the texts that are there of a stage.

    All of them, whichever backend wrote them: a cap errs on the side of the purse.
    What a server did not count is not known.
    """
    if stage == "answer":
        from beatrice.extract.generate import answers  # loads NumPy

        files = answers.answer_files(run.answers_file, run.parts("answer"))
        counts = (
            (len(r.prompt_ids), len(r.token_ids) + (r.stop_id is not None))
            for file in (files.path, *files.part_files())
            for r in JsonLines(file).intact_rows(Answer)
        )
    else:
        replies = JsonLines(run.replies({"label": "judge"}.get(stage, stage)))
        counts = (
            (row.n_prompt_tokens or 0, row.n_new_tokens or 0)
            for row in replies.intact_rows(_Spent)
        )
    n_prompt = n_new = 0
    for prompt, new in counts:
        n_prompt, n_new = n_prompt + prompt, n_new + new
    return n_prompt, n_new


@contextlib.contextmanager
def _open_backbone(
    run: RunDir, stage: str, backend: RunServerOptions, **known: Any
) -> Iterator[tuple[TokenizerOnly, Generator]]:
    from beatrice.extract.signals.parity import require_readable

    quiet()
    from beatrice.extract.generate import answers

    model, stop_ids = answers.load_tokenizer_only(run, require_readable)
    name = backend.served_model or run.section("backbone", BackboneConfig).path
    known |= {"stop_ids": stop_ids, "tokenizer": model.tokenizer}
    with open_asking(run, stage, name, backend, **known) as generator:
        yield model, generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Whether signals are read with the answers."""

    no_read: bool = option(
        "Write answers alone; `beatrice extract` reads them again.", False
    )


@click.command()
@RUN_DIR
@options(reading=ReadingOptions, work=WorkOptions, backend=RunServerOptions)
def answer(
    run_dir: Path,
    reading: ReadingOptions,
    work: WorkOptions,
    backend: RunServerOptions,
) -> None:
    """Answer every question, closed-book and with context.

    The answers' signals are read in the passes that write them, where the model allows
    it, and wait in RUN_DIR/written until `beatrice extract` stores them. On this
    machine, or by a vLLM server that holds the run's backbone. On this
    machine under torchrun or srun, or with --shard, every process does its part, and
    the answers are those of one process.

    Example: beatrice answer runs/demo

    Example: torchrun --nproc-per-node 8 -m beatrice answer runs/paper
    """
    from beatrice.extract import engines
    from beatrice.extract.generate import answers

    if backend.server is None:
        opener = engines.open_readable if reading.no_read else engines.open_reading
        # A share's model is the one that joins all of them.
        stage = answers.answer_stage(functools.cache(opener))
        do_or_forecast(run_dir, stage, work.dry_run, share=work.share)
        return
    alone("answer --server", work.share)
    with (
        RunDir.open(run_dir) as run,
        _open_backbone(run, "answer", backend) as (model, generator),
    ):
        if work.dry_run:
            config = answers.answer_config(run, is_recorded=False)
            click.echo(answers.forecast_answers(run, config, model).as_text())
        else:
            answers.answer_with(run, answers.Engine(generator, model), Progress())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """How answers are drawn, and of which questions."""

    n_samples: int = option(
        "Drawn answers per question, setting and variant.", 10, min=1, max=MAX_SAMPLES
    )
    split: tuple[Split, ...] = option(
        "May be given several times.", ("validation", "test", "ood")
    )
    temperature: float = option(
        "Of the distribution drawn from.", 1.0, rare=True, min=0, is_above=True
    )
    top_p: float = option(
        "Share of the probability drawn from.",
        0.9,
        rare=True,
        min=0,
        max=1,
        is_above=True,
    )
    top_k: int = option(
        "Tokens drawn from; 0 keeps all; a server needs vllm.", 50, rare=True, min=0
    )


@click.command()
@RUN_DIR
@options(draw=DrawOptions, work=WorkOptions, backend=RunBackendOptions)
def sample(
    run_dir: Path, draw: DrawOptions, work: WorkOptions, backend: RunBackendOptions
) -> None:
    """Draw several answers per question, for the sampling baselines.

    On this machine under torchrun, srun or mpirun, or with --shard, every process does
    its part.

    Example: beatrice sample runs/demo --n-samples 10 --split test
    """
    from beatrice.extract.generate import answers

    if backend.server is not None:
        alone("sample --server", work.share)

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
        as_text = backend.server is not None and backend.dialect == "openai"
        return answers.draw_stage(*drawing, as_text=as_text)

    do_texts(run_dir, "sample", work, open_in, stage_of)
    if not work.dry_run and work.share.is_whole:
        click.echo(str(RunDir(run_dir).samples_file))
