"""The stages that ask the run's backbone: `answer`, and `sample` for baselines.

Finished rows are never done again: a killed stage continues where it stopped. Batches
are planned over all requests, done or not, so that an answer depends neither on when
the run was killed nor on how many workers share it.
"""

import dataclasses
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extract.backbone.names import backbone_of
from extract.generate.answers import (
    AnswerRows,
    answered_keys,
    append_answers,
    open_answers,
    record_backend,
)
from extract.generate.forecast import forecast_requests, generation_bytes
from extract.generate.generator import (
    SCHEMA_VERSION,
    Generator,
    SamplingConfig,
    stop_ids_of,
)
from extract.generate.replies import open_replies, reused_in_words
from extract.generate.requests import (
    ANSWER_PRESETS,
    AnswerConfig,
    GenerationConfig,
    PromptConfig,
    PromptModel,
    Request,
    Requests,
    TokenizerOnly,
    answer_config,
    make_requests,
    plan_batches,
)
from extract.generate.sampling import DrawConfig, draw_answers, request_prompt
from extract.records import to_json, write_lines
from extract.run.console import Progress, Update
from extract.run.contents import (
    answers_file,
    left_out_file,
    question_files,
    read_examples,
)
from extract.run.directory import RunDir
from extract.run.files import (
    JsonLines,
    sha256_json,
    write_json_atomic,
    write_text_atomic,
)
from extract.run.forecast import Forecast
from extract.run.lock import InUse
from extract.run.stages import Stage, once
from extract.run.workers import Worker

_PATIENCE = 120.0  # seconds; who puts together, or looks whether to, takes less


def answer_identity(config: AnswerConfig) -> dict[str, Any]:
    """Return what changes the prompts and the length of the answers."""
    return dataclasses.asdict(config.prompt) | {
        "schema": SCHEMA_VERSION,
        "max_new_tokens": config.generation.max_new_tokens,
    }


def run_requests(
    run: RunDir, model: PromptModel, config: AnswerConfig, progress: Progress
) -> list[Request]:
    """Return what the run asks; what it does not ask is written down and counted.

    Raises:
      ValueError: a prompt does not fit, see `make_requests`.
    """
    found = _requests(run, model, config)
    if found.left_out:
        write_text_atomic(left_out_file(run), found.left_out_lines())
    else:
        left_out_file(run).unlink(missing_ok=True)
    if found.note:
        progress.note(f"answer: {found.note}")
    return found.requests


def _requests(run: RunDir, model: PromptModel, config: AnswerConfig) -> Requests:
    return make_requests(
        read_examples(run), model, config.prompt, config.generation.max_new_tokens
    )


def planned(
    requests: Sequence[Request], config: GenerationConfig
) -> list[list[Request]]:
    """Return which requests are answered together."""
    lengths = [len(request.prompt.ids) for request in requests]
    return [[requests[i] for i in batch] for batch in plan_batches(lengths, config)]


def answer_batches(
    backbone: Any,
    batches: Sequence[Sequence[Request]],
    config: GenerationConfig,
    rows: AnswerRows,
    update: Update,
) -> None:
    """Answer, batch by batch, what has no row yet.

    Args:
      backbone: answers; a loaded `Backbone`.
      batches: all of them, done or not.
      config: how.
      rows: where the answers go.
      update: told rows done and to do.
    """
    from extract.generate.local import generate

    keys = {request.key for batch in batches for request in batch}
    n_answered = len(keys & rows.done.keys())
    update(n_answered, len(keys))
    for batch in batches:
        missing = {request.key for request in batch} - rows.done.keys()
        if missing:
            answers = generate(backbone, batch, config)
            rows.append({a.key: to_json(a) for a in answers if a.key in missing})
            n_answered += len(missing)
            update(n_answered, len(keys))


def _open_answering(
    run: RunDir, config: AnswerConfig, progress: Progress
) -> tuple[Any, list[Request]]:
    """Load the run's backbone as the one that answers; return what it is asked."""
    from extract.backbone.loading import open_backbone
    from extract.generate.local import TransformersGenerator

    backbone = open_backbone(backbone_of(run))
    identity = TransformersGenerator(backbone=backbone).identity
    record_backend(run, identity | answer_identity(config))
    return backbone, run_requests(run, backbone, config, progress)


def _arranged(
    run: RunDir, requests: Sequence[Request], batches: list[list[Request]]
) -> AnswerRows:
    """Open the answers, of all workers, in the order of the plan."""
    rows = open_answers(answers_file(run), requests, run.answer_parts)
    rows.arrange([request.key for batch in batches for request in batch])
    return rows


def _answer(
    run: RunDir, config: AnswerConfig, update: Update, progress: Progress
) -> None:
    backbone, requests = _open_answering(run, config, progress)
    batches = planned(requests, config.generation)
    rows = open_answers(answers_file(run), requests, run.answer_parts)
    answer_batches(backbone, batches, config.generation, rows, update)
    rows.arrange([request.key for batch in batches for request in batch])
    for note in rows.notes:
        progress.note(note)


def answer_part(run_dir: Path, worker: Worker, progress: Progress) -> None:
    """Do one worker's share of the answers; put all together if none is missing.

    Each worker writes a file of its own. A worker that finds answers missing leaves:
    the one that writes the last of them finds none missing, and so does a later
    process, alone or with others.

    Args:
      run_dir: of all workers.
      worker: does the batches `rank::world_size`.
      progress: shows it.

    Raises:
      InUse: a process that works alone holds the run.
      ValueError: an input is missing, or has changed meanwhile.
    """
    name = f"answer {worker.rank}/{worker.world_size}"
    began = time.monotonic()
    with _open_patiently(run_dir, exclusive=False) as run:
        inputs = run.hash_inputs(*question_files(run))
        if run.stage_done("answer", inputs):
            progress.note(f"{name}: already done")
            return
        config = answer_config(run)
        backbone, requests = _open_answering(run, config, progress)
        batches = planned(requests, config.generation)
        keys = {request.key for request in requests}
        done = answered_keys(answers_file(run), run.answer_parts, requests)
        file = f"{worker.rank}-of-{worker.world_size}@{socket.gethostname()}"
        lines = JsonLines.open(run.answer_parts / f"{file}.{os.getpid()}.jsonl")
        rows = AnswerRows(lines, dict.fromkeys(done), ())
        mine = batches[worker.rank :: worker.world_size]
        with progress.stage(name) as update:
            answer_batches(backbone, mine, config.generation, rows, update)
        done = answered_keys(answers_file(run), run.answer_parts, requests)
    if keys - done:
        progress.note(
            f"{name}: {len(keys - done)} answers of other workers are missing; "
            "whoever writes the last puts all together, and so does `beatrice answer "
            f"{run_dir}`"
        )
        return
    try:
        held = _open_patiently(run_dir, exclusive=True)
    except InUse:
        progress.note(f"{name}: another process puts the answers together")
        return
    with held as run:
        if run.hash_inputs(*question_files(run)) != inputs:
            raise ValueError(
                f"the questions in {run_dir} have changed while they were answered; "
                "run the same line again"
            )

        def gather(update: Update) -> None:
            for note in _arranged(run, requests, batches).notes:
                progress.note(note)

        once(run, "answer", inputs, [run.answers], progress, gather, began=began)


def _open_patiently(run_dir: Path, *, exclusive: bool) -> RunDir:
    """Hold a run, after others that hold it for a moment."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return RunDir.open(run_dir, exclusive=exclusive)
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def load_tokenizer_only(run: RunDir) -> tuple[TokenizerOnly, tuple[int, ...]]:
    """Load a run's tokenizer and stop tokens, without the backbone's weights."""
    from transformers import GenerationConfig as Defaults

    from extract.backbone.checkpoint import load_outline, window_of

    config = backbone_of(run)
    found = load_outline(config.path)
    defaults = Defaults.from_pretrained(config.path)
    model = TokenizerOnly(
        found.tokenizer, max_length=window_of(found.config), name=config.model
    )
    return model, stop_ids_of(defaults.eos_token_id, config.model)


def answer_by_server(
    run: RunDir, generator: Generator, model: TokenizerOnly, progress: Progress
) -> None:
    """Answer every question by asking a server, with the exact token ids."""
    config = answer_config(run)
    identity = dict(generator.identity) | answer_identity(config)

    def work(update: Update) -> None:
        record_backend(run, identity)
        requests = run_requests(run, model, config, progress)
        rows = open_answers(answers_file(run), requests, run.answer_parts)
        for note in rows.notes:
            progress.note(note)
        greedy = SamplingConfig(max_new_tokens=config.generation.max_new_tokens)
        append_answers(rows, requests, generator, model.tokenizer, greedy, update)

    inputs = run.hash_inputs(*question_files(run)) | {"server": sha256_json(identity)}
    once(run, "answer", inputs, [run.answers], progress, work)


def forecast_answers(
    run: RunDir, config: AnswerConfig, model: PromptModel, **sizes: int
) -> Forecast:
    """Return what answering needs: the prompts that have no answer yet."""
    run.hash_inputs(run.examples)  # says what is missing
    found = _requests(run, model, config)
    there = answered_keys(answers_file(run), run.answer_parts, found.requests)
    todo = [request for request in found.requests if request.key not in there]
    prompts = [request_prompt(model.tokenizer, request) for request in todo]
    greedy = SamplingConfig(max_new_tokens=config.generation.max_new_tokens)
    forecast = forecast_requests("answer", prompts, greedy, **sizes)
    basis = ". ".join(filter(None, (forecast.basis, found.note)))
    return dataclasses.replace(forecast, basis=basis)


def _forecast_here(run: RunDir, config: AnswerConfig) -> Forecast:
    from extract.backbone.loading import open_backbone

    backbone = open_backbone(backbone_of(run))
    tokens = config.generation.tokens_per_batch
    size = generation_bytes(backbone, tokens)
    return forecast_answers(run, config, backbone, model_bytes=size)


def draw_run(
    run: RunDir,
    generator: Generator,
    model: TokenizerOnly,
    prompt: PromptConfig,
    draws: DrawConfig,
    splits: tuple[str, ...],
    progress: Progress,
    *,
    as_text: bool = False,
) -> Path:
    """Draw answers to the questions of some splits; returns the file of samples."""
    identity = {
        "schema": SCHEMA_VERSION,
        "backend": dict(generator.identity),
        "prompt": dataclasses.asdict(prompt),
        "splits": list(splits),
        "draws": dataclasses.asdict(draws),
    }
    path, limit = run.samples / "samples.jsonl", draws.sampling.max_new_tokens

    def work(update: Update) -> None:
        replies = open_replies(run, "sample", progress)
        examples = [e for e in read_examples(run) if e.split in splits]
        found = make_requests(examples, model, prompt, limit)
        if found.note:
            progress.note(f"sample: {found.note}")
        samples = draw_answers(
            found.requests,
            generator,
            model.tokenizer,
            replies,
            draws,
            update,
            as_text=as_text,
        )
        n_bare = sum(sample.log_probs is None for sample in samples)
        n_cut = sum(sample.finish == "length" for sample in samples)
        progress.note(f"sample: {reused_in_words(replies)}")
        progress.note(
            f"sample: {len(samples)} drawn, {n_bare} without log-probabilities, "
            f"{n_cut} cut at {limit} tokens"
        )
        write_text_atomic(path, write_lines(samples))
        write_json_atomic(run.samples / "config.json", identity)

    inputs = run.hash_inputs(*question_files(run)) | {"sampler": sha256_json(identity)}
    once(run, "sample", inputs, [run.samples], progress, work)
    return path


ANSWER = Stage(
    name="answer",
    inputs=question_files,
    outputs=lambda run: [run.answers],
    work=_answer,
    presets=ANSWER_PRESETS,
    forecast=_forecast_here,
)
