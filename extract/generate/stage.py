"""The stages that ask the run's backbone: `answer`, and `sample` for baselines.

Finished rows are never done again: a killed stage continues where it stopped. Batches
are planned over all requests, done or not, so that an answer depends neither on when
the run was killed nor on how many workers share it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from extract.backbone.names import BackboneConfig, backbone_of
from extract.generate.answers import (
    Key,
    answer_files,
    answers_in_words,
    append_answers,
    record_backend,
)
from extract.generate.forecast import forecast_requests, generation_bytes
from extract.generate.generator import (
    SCHEMA_VERSION,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
    stop_ids_of,
)
from extract.generate.replies import open_replies, reused_in_words
from extract.generate.requests import (
    ANSWER_PRESETS,
    AnswerConfig,
    GenerationConfig,
    PromptModel,
    Request,
    Requests,
    TokenizerOnly,
    answer_config,
    make_requests,
)
from extract.generate.sampling import DrawConfig, draw_answers, request_prompt
from extract.generate.templates import PromptConfig
from extract.records import Answer, write_lines
from extract.run.console import Progress, Update
from extract.run.contents import (
    draw_seconds_file,
    left_out_file,
    question_files,
    read_answers,
    read_examples,
    samples_file,
    settings_in_words,
    settings_of,
)
from extract.run.directory import RunDir
from extract.run.files import (
    Journal,
    sha256_json,
    write_json_atomic,
    write_text_atomic,
)
from extract.run.stages import Forecast, Stage, once

if TYPE_CHECKING:
    from extract.generate.backends.local import TransformersGenerator


def answer_identity(config: AnswerConfig) -> dict[str, Any]:
    """Return what changes the prompts and the length of the answers."""
    return dataclasses.asdict(config.prompt) | {
        "schema": SCHEMA_VERSION,
        "max_new_tokens": config.generation.max_new_tokens,
        "stop": list(config.generation.stop),
    }


def _make_requests(run: RunDir, model: PromptModel, config: AnswerConfig) -> Requests:
    limit = config.generation.max_new_tokens
    examples, settings = read_examples(run), settings_of(run)
    return make_requests(examples, model, config.prompt, limit, settings)


def _asked(
    run: RunDir, model: PromptModel, config: AnswerConfig, progress: Progress
) -> list[Request]:
    """Return what the run asks; what it does not ask is written down and counted."""
    progress.note(f"answer: {settings_in_words(run)}")
    made = _make_requests(run, model, config)
    if made.left_out:
        write_text_atomic(left_out_file(run), write_lines(made.left_out))
    else:
        left_out_file(run).unlink(missing_ok=True)
    if made.note:
        progress.note(f"answer: {made.note}")
    return made.requests


def _open_answers(
    run: RunDir, requests: Sequence[Request], progress: Progress
) -> Journal[Key, Answer]:
    journal = Journal.open(answer_files(run, requests), run.share)
    for note in journal.notes:
        progress.note(f"answer: {note}")
    return journal


def _note_shares(run: RunDir, config: AnswerConfig, progress: Progress) -> None:
    limit = config.generation.max_new_tokens
    for line in answers_in_words(read_answers(run), limit):
        progress.note(f"answer: {line}")


def _greedy(config: AnswerConfig) -> SamplingConfig:
    return SamplingConfig(
        max_new_tokens=config.generation.max_new_tokens, stop=config.generation.stop
    )


def _open_local(
    config: BackboneConfig, generation: GenerationConfig
) -> "TransformersGenerator":
    """Load a run's backbone, whose signals can be read, to answer on this machine."""
    from extract.backbone.loading import open_backbone
    from extract.generate.backends.local import TransformersGenerator
    from extract.signals.reader import SignalReader

    # Read on a few tokens first: hours of answers whose signals cannot be read
    # would be in vain.
    reader = SignalReader(open_backbone(config), (0,))
    return TransformersGenerator(
        backbone=reader.backbone, tokens_per_batch=generation.tokens_per_batch
    )


def _answer(
    load: Callable[[BackboneConfig, GenerationConfig], "TransformersGenerator"],
    run: RunDir,
    config: AnswerConfig,
    update: Update,
    progress: Progress,
) -> int:
    """Answer a share of the run's batches; of the whole, put all into their order."""
    generator = load(backbone_of(run), config.generation)
    record_backend(run, generator.identity | answer_identity(config))
    requests = _asked(run, generator.backbone, config, progress)
    prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r in requests]
    batches = generator.plan(prompts, _greedy(config))
    rows = _open_answers(run, requests, progress)
    append_answers(
        rows,
        requests,
        lambda done: generator.batches(prompts, _greedy(config), done),
        update,
        frozenset(i for batch in run.share.mine(batches) for i in batch),
    )
    if not run.share.is_whole:
        return len(requests) - len(rows.files.keys())
    rows.arrange([requests[i].key for batch in batches for i in batch])
    _note_shares(run, config, progress)
    return 0


def load_tokenizer_only(run: RunDir) -> tuple[TokenizerOnly, tuple[int, ...]]:
    """Load a run's tokenizer and stop tokens, without the backbone's weights."""
    from transformers import GenerationConfig as Defaults

    from extract.backbone.checkpoint import load_outline, window_of
    from extract.backbone.twin import require_readable
    from extract.backbone.unpacking import unpacked

    config = backbone_of(run)
    found = load_outline(config.path)
    require_readable(config.model, found)
    defaults = Defaults.from_pretrained(unpacked(config.path))
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
        requests = _asked(run, model, config, progress)
        rows = _open_answers(run, requests, progress)
        prompts = [request_prompt(model.tokenizer, request) for request in requests]
        append_answers(
            rows,
            requests,
            lambda done: (
                [reply] for reply in generator.stream(prompts, _greedy(config), done)
            ),
            update,
        )
        _note_shares(run, config, progress)

    inputs = run.hash_inputs(*question_files(run)) | {"server": sha256_json(identity)}
    once(run, "answer", inputs, [run.answers], progress, work)


def forecast_answers(
    run: RunDir, config: AnswerConfig, model: PromptModel, **sizes: int
) -> Forecast:
    """Return what answering needs: the prompts that have no answer yet."""
    run.hash_inputs(run.examples)  # says what is missing
    made = _make_requests(run, model, config)
    there = answer_files(run, made.requests).keys()
    prompts = [
        GeneratorPrompt(text="", ids=request.prompt.ids)
        for request in made.requests
        if request.key not in there
    ]
    forecast = forecast_requests("answer", prompts, _greedy(config), **sizes)
    basis = ". ".join(filter(None, (forecast.basis, made.note)))
    return dataclasses.replace(forecast, basis=basis)


def _forecast_here(run: RunDir, config: AnswerConfig) -> Forecast:
    from extract.backbone.loading import open_backbone

    backbone = open_backbone(backbone_of(run))
    size = generation_bytes(backbone, config.generation.tokens_per_batch)
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
) -> int | None:
    """Draw answers to the questions of some splits.

    Returns:
      As `once`.
    """
    identity = {
        "schema": SCHEMA_VERSION,
        "backend": dict(generator.identity),
        "prompt": dataclasses.asdict(prompt),
        "splits": list(splits),
        "draws": dataclasses.asdict(draws),
    }
    path, limit = samples_file(run), draws.sampling.max_new_tokens

    def work(update: Update) -> int | None:
        replies = open_replies(run, "sample", progress, is_timed=True)
        examples = [e for e in read_examples(run) if e.split in splits]
        made = make_requests(examples, model, prompt, limit, settings_of(run))
        if made.note:
            progress.note(f"sample: {made.note}")
        drawn = draw_answers(
            made.requests,
            generator,
            model.tokenizer,
            replies,
            draws,
            update,
            as_text=as_text,
        )
        if drawn is None:
            return replies.n_missing
        samples, seconds = drawn
        n_bare = sum(sample.log_probs is None for sample in samples)
        n_cut = sum(sample.finish == "length" for sample in samples)
        progress.note(f"sample: {reused_in_words(replies)}")
        progress.note(
            f"sample: {len(samples)} drawn, {n_bare} without log-probabilities, "
            f"{n_cut} cut at {limit} tokens"
        )
        write_text_atomic(path, write_lines(samples))
        write_json_atomic(run.samples / "config.json", identity)
        write_json_atomic(draw_seconds_file(run), seconds)
        return None

    inputs = run.hash_inputs(*question_files(run)) | {"sampler": sha256_json(identity)}
    return once(run, "sample", inputs, [run.samples], progress, work)


def _answer_stage(
    load: Callable[[BackboneConfig, GenerationConfig], "TransformersGenerator"],
) -> Stage:
    return Stage(
        name="answer",
        inputs=question_files,
        outputs=lambda run: [run.answers],
        work=partial(_answer, load),
        parts="answers",
        presets=ANSWER_PRESETS,
        forecast=_forecast_here,
    )


def answer_stage_kept() -> Stage:
    """Return the stage for a share: the model that did it joins all shares."""
    return _answer_stage(functools.cache(_open_local))


ANSWER = _answer_stage(_open_local)
