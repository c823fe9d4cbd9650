"""The stages that ask the run's backbone: `answer`, and `sample` for baselines.

Finished rows are never done again: a killed stage continues where it stopped. Batches
are planned over all requests, done or not, so that an answer depends neither on when
the run was killed nor on how many workers share it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.answers import (
    Key,
    answer_files,
    answers_in_words,
    append_answers,
    prompts_of,
    record_backend,
)
from beatrice.extract.generate.forecast import count_requests, forecast_texts
from beatrice.extract.generate.generator import (
    SCHEMA_VERSION,
    Generator,
    SamplingConfig,
    stop_ids_of,
)
from beatrice.extract.generate.replies import open_replies, reply_files, reused_in_words
from beatrice.extract.generate.requests import (
    ANSWER_PRESETS,
    AnswerConfig,
    PromptModel,
    Request,
    Requests,
    TokenizerOnly,
    make_requests,
)
from beatrice.extract.generate.sampling import DrawConfig, draw_answers
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Answer, write_lines
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    answers_file,
    draw_seconds_file,
    left_out_file,
    question_files,
    read_answers,
    read_examples,
    samples_file,
    settings_in_words,
    settings_of,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import (
    Journal,
    JournalFiles,
    sha256_json,
    write_json_atomic,
    write_text_atomic,
)
from beatrice.extract.run.stages import Forecast, Stage, once

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Backbone


def answer_config(run: RunDir, *, is_recorded: bool = True) -> AnswerConfig:
    """Return how a run's questions are put; a dry run settles nothing."""
    return run.settle("answer", ANSWER_PRESETS, is_recorded=is_recorded)


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


def _files(run: RunDir, requests: Sequence[Request]) -> JournalFiles[Key, Answer]:
    return answer_files(answers_file(run), run.parts("answer"), requests)


def _note_shares(run: RunDir, config: AnswerConfig, progress: Progress) -> None:
    limit = config.generation.max_new_tokens
    for line in answers_in_words(read_answers(run), limit, config.prompt):
        progress.note(f"answer: {line}")


def _greedy(config: AnswerConfig) -> SamplingConfig:
    return SamplingConfig(
        max_new_tokens=config.generation.max_new_tokens, stop=config.generation.stop
    )


class Engine(NamedTuple):
    """What answers a run's questions, and what their prompts are made with."""

    generator: Generator
    model: PromptModel


def open_local(
    run: RunDir, config: AnswerConfig, check: Callable[["Backbone"], object]
) -> Engine:
    """Load a run's backbone, to answer on this machine.

    Args:
      run: of the backbone.
      config: how it answers.
      check: raises a ValueError where it is of no use to answer by this backbone.
    """
    from beatrice.extract.backbone.loading import open_backbone
    from beatrice.extract.generate.backends.local import TransformersGenerator

    backbone = open_backbone(run.section("backbone", BackboneConfig))
    check(backbone)
    size = config.generation.tokens_per_batch
    return Engine(
        TransformersGenerator(backbone=backbone, tokens_per_batch=size), backbone
    )


def _answer(
    engine: Engine,
    run: RunDir,
    config: AnswerConfig,
    update: Update,
    progress: Progress,
) -> int:
    """Answer a share of the run's batches; of the whole, put all into their order."""
    record_backend(
        run.answers, dict(engine.generator.identity) | answer_identity(config)
    )
    requests = _asked(run, engine.model, config, progress)
    journal = Journal.open(_files(run, requests), run.share)
    for note in journal.notes:
        progress.note(f"answer: {note}")
    how = (engine.generator, requests, _greedy(config))
    append_answers(journal, *how, update, run.share)
    if not run.share.is_whole:
        return len(requests) - len(journal.files.keys())
    _note_shares(run, config, progress)
    return 0


def load_tokenizer_only(run: RunDir) -> tuple[TokenizerOnly, tuple[int, ...]]:
    """Load a run's tokenizer and stop tokens, without the backbone's weights."""
    from transformers import GenerationConfig as Defaults

    from beatrice.extract.backbone.checkpoint import load_outline, window_of
    from beatrice.extract.backbone.twin import require_readable
    from beatrice.extract.backbone.unpacking import unpacked

    config = run.section("backbone", BackboneConfig)
    found = load_outline(config.path)
    require_readable(config.model, found)
    defaults = Defaults.from_pretrained(unpacked(config.path))
    model = TokenizerOnly(
        found.tokenizer, max_length=window_of(found.config), name=config.model
    )
    return model, stop_ids_of(defaults.eos_token_id, config.model)


def answer_with(run: RunDir, engine: Engine, progress: Progress) -> None:
    """Answer every question of a run by an engine that is open, such as a server.

    The stage is done again if the engine's identity is another one than before.
    """
    config = answer_config(run)
    identity = dict(engine.generator.identity) | answer_identity(config)

    def work(update: Update) -> None:
        _answer(engine, run, config, update, progress)

    inputs = run.hash_inputs(*question_files(run)) | {"server": sha256_json(identity)}
    once(run, "answer", inputs, [run.answers], progress, work)


def forecast_answers(run: RunDir, config: AnswerConfig, model: PromptModel) -> Forecast:
    """Return what answering needs: the prompts that have no answer yet."""
    run.hash_inputs(run.examples)  # says what is missing
    made = _make_requests(run, model, config)
    there = _files(run, made.requests).keys()
    prompts = prompts_of([r for r in made.requests if r.key not in there])
    forecast = count_requests("answer", prompts, _greedy(config))
    basis = ". ".join(filter(None, (forecast.basis, made.note)))
    return dataclasses.replace(forecast, basis=basis)


def _forecast_here(run: RunDir, config: AnswerConfig) -> Forecast:
    return forecast_answers(run, config, load_tokenizer_only(run)[0])


def _draw_requests(
    run: RunDir,
    model: TokenizerOnly,
    prompt: PromptConfig,
    draws: DrawConfig,
    splits: Sequence[str],
) -> Requests:
    examples = [example for example in read_examples(run) if example.split in splits]
    limit = draws.sampling.max_new_tokens
    return make_requests(examples, model, prompt, limit, settings_of(run))


def forecast_draws(
    run: RunDir,
    generator: Generator,
    model: TokenizerOnly,
    prompt: PromptConfig,
    draws: DrawConfig,
    splits: Sequence[str],
    *,
    as_text: bool = False,
) -> str:
    """Return in words what `draw_run` would ask."""
    requests = _draw_requests(run, model, prompt, draws, splits).requests
    drawing = (requests, generator, model.tokenizer)
    return forecast_texts(
        reply_files(run.replies("sample"), run.parts("sample")),
        "sample",
        lambda replies: draw_answers(*drawing, replies, draws, as_text=as_text),
    )


def draw_run(
    run: RunDir,
    generator: Generator,
    model: TokenizerOnly,
    prompt: PromptConfig,
    draws: DrawConfig,
    splits: Sequence[str],
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
        files = reply_files(run.replies("sample"), run.parts("sample"))
        replies = open_replies(files, run.share, progress.note, is_timed=True)
        made = _draw_requests(run, model, prompt, draws, splits)
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


def answer_stage(open_engine: Callable[[RunDir, AnswerConfig], Engine]) -> Stage:
    """Return the stage that answers by what `open_engine` opens when it is needed."""

    def work(
        run: RunDir, config: AnswerConfig, update: Update, progress: Progress
    ) -> int:
        return _answer(open_engine(run, config), run, config, update, progress)

    return Stage(
        name="answer",
        inputs=question_files,
        outputs=lambda run: [run.answers],
        work=work,
        parts="answers",
        presets=ANSWER_PRESETS,
        forecast=_forecast_here,
    )


def _open_readable(run: RunDir, config: AnswerConfig) -> Engine:
    from beatrice.extract.signals.reader import SignalReader

    # Read on a few tokens first: hours of answers whose signals cannot be read
    # would be in vain.
    return open_local(run, config, lambda backbone: SignalReader(backbone, (0,)))


def answer_stage_kept() -> Stage:
    """Return the stage for a share: the model that did it joins all shares."""
    return answer_stage(functools.cache(_open_readable))


ANSWER = answer_stage(_open_readable)
