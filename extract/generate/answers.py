"""The stages that ask the run's backbone: `answer`, and `sample` for baselines.

Rows that exist are never generated again: a killed stage continues where it stopped.
Batches are planned over all requests, done or not, so that an answer depends neither on
when the run was killed nor on how many workers share it. An answer is valid if its
prompt is exactly the request's; others (to contexts rewritten since) go to `*.stale`.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.generator import (
    SCHEMA_VERSION,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
    Texts,
    TextStage,
    count_requests,
    plan_of,
)
from beatrice.extract.generate.prompts import (
    ANSWER_PRESETS,
    AnswerConfig,
    PromptModel,
    Request,
    Requests,
    TokenizerOnly,
    make_requests,
    stop_ids_of,
)
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Answer, Key, Sample, Setting, to_json, write_lines
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    question_files,
    read_answers,
    read_examples,
    settings_in_words,
    settings_of,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import (
    Journal,
    JournalFiles,
    read_json,
    sha256_json,
    write_json_atomic,
    write_text_atomic,
)
from beatrice.extract.run.process import Share
from beatrice.extract.run.stages import Forecast, Stage, run_stage
from beatrice.extract.signals.sequence import first_read_token

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Outline


def answer_files(
    run: RunDir, requests: Sequence[Request] | None = None
) -> JournalFiles[Key, Answer]:
    """Return where answers are stored: a file, and a folder of workers' files.

    With requests, only answers to exactly their prompts count; with None, all do.
    """
    prompts = {request.key: request.prompt.ids for request in requests or ()}
    return JournalFiles(
        run.answers_file,
        Answer,
        lambda answer: answer.key,
        run.parts("answer"),
        lambda answer: requests is None or prompts.get(answer.key) == answer.prompt_ids,
    )


# How a refusal begins. The list is short on purpose: it should match only what is
# plainly no answer. Matches are only counted; no answer is dropped.
_HEDGE = re.compile(
    r"\W*((i|we) (do not|don't|don’t|cannot|can't|can’t|am not|am unable|have no)\b"
    r"|i'm (not sure|unable|sorry)|i’m (not sure|unable|sorry)|sorry\b"
    r"|as an? (ai|language model|large language model)\b|it depends\b"
    r"|(it is |this is |the answer is )?"
    r"(not known|unknown|unclear|uncertain|not (mentioned|stated|given|specified)"
    r"|impossible to (say|tell|know))\b"
    r"|there is (no|not enough) (information|answer|context)\b"
    r"|(no|not enough) (information|answer|context)\b|(none|n/a)\W*$)",
    re.IGNORECASE,
)


def is_hedge(text: str) -> bool:
    """Return whether an answer begins with a refusal or "unknown", in English."""
    return _HEDGE.match(text) is not None


def _counts_of(answers: Sequence[Answer]) -> dict[str, int]:
    return {
        "cut_off": sum(answer.stop_id is None for answer in answers),
        "empty": sum(not answer.text.strip() for answer in answers),
        "hedged": sum(is_hedge(answer.text) for answer in answers),
    }


def answer_shares(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the shares of cut answers, of empty ones, and of hedges or refusals."""
    return {name: n / len(answers) for name, n in _counts_of(answers).items()}


def _options_against_cuts(prompt: PromptConfig, limit: int) -> str:
    """Return the options that avoid cut answers in the next run."""
    options = [f"--max-new-tokens above {limit}"]
    if prompt.template != "few-shot":
        options.append("--template few-shot, whose examples have short answers")
    if not prompt.chat:
        options.append("--chat, if the model is instruction-tuned")
    return "; or ".join(options)


def summarize_answers(
    answers: Sequence[Answer], limit: int, prompt: PromptConfig
) -> list[str]:
    """Return a line per setting on cut and empty answers; raises if all are empty."""
    if answers and not any(answer.text.strip() for answer in answers):
        raise ValueError(
            f"all {len(answers)} answers are empty: the model ends or cannot continue "
            "where its answer should begin; use another template (--template, --chat), "
            "check the model's weights, and start another run directory"
        )
    lines = []
    for setting in dict.fromkeys(answer.setting for answer in answers):
        rows = [answer for answer in answers if answer.setting == setting]
        n_cut, n_empty, n_hedged = _counts_of(rows).values()
        lines.append(
            f"{setting}: {len(rows)} answers, {n_cut} cut at {limit} tokens, "
            f"{n_empty} empty, {n_hedged} hedges or refusals"
        )
        if n_cut > 0.1 * len(rows):
            lines[-1] += (
                ". Cut answers are incomplete, and mostly labelled wrong: the model "
                "explains, or never stops. Make another run with "
                f"{_options_against_cuts(prompt, limit)}"
            )
    return lines


_BACKEND = "backend.json"  # next to the answers


def record_backend(run: RunDir, identity: Mapping[str, Any]) -> None:
    """Record what answers a run, or check that it is what gave the answers so far."""
    path = run.answers / _BACKEND
    # Through JSON, so that tuples compare equal to lists.
    wanted = json.loads(json.dumps(dict(identity)))
    files = answer_files(run)
    is_answered = files.path.exists() or bool(files.part_files())
    # Other workers of a share may be about to write their first answers.
    if not path.exists() or (run.share.is_whole and not is_answered):
        write_json_atomic(path, wanted)
        return
    again = "restore it, or delete the folder to answer again"
    recorded = read_json(path, dict[str, Any], again)
    for name in sorted(recorded.keys() | wanted.keys()):
        if recorded.get(name) != wanted.get(name):
            raise ValueError(
                f"{run.answers} holds answers with {name}={recorded.get(name)!r}, "
                f"expected {wanted.get(name)!r}; start another run directory, or "
                "delete this folder to answer again"
            )


def generate(
    generator: Generator, requests: Sequence[Request], sampling: SamplingConfig
) -> Iterator[Answer]:
    """Answer requests, yielding each answer as soon as it exists.

    In a run, `sampling` is greedy. The generator must return its texts' token ids.
    """
    for i, reply in generator.stream(prompts_of(requests), sampling):
        yield requests[i].answer(reply)


def prompts_of(requests: Sequence[Request]) -> list[GeneratorPrompt]:
    """Return requests as prompts with their exact ids.

    Their common beginning is computed once, up to where signals are read, even if none
    are read while answering: with another length, sums would be rounded differently,
    which in bfloat16 changes answers in which two tokens are nearly equally likely.
    """
    return [
        GeneratorPrompt(
            text=request.prompt.text,
            ids=request.prompt.ids,
            n_common=first_read_token(request.prompt.context_span[0]),
            name=request.example_id,
        )
        for request in requests
    ]


def append_answers(
    journal: Journal[Key, Answer],
    generator: Generator,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    update: Update,
    share: Share,
) -> None:
    """Answer the requests of a share that have no row yet, batch by batch.

    If the share is the whole work, all answers are then put in the generator's order.
    """
    prompts = prompts_of(requests)
    batches = plan_of(generator, prompts, sampling)
    batch_of = {i: batch for batch in share.mine(batches) for i in batch}
    todo = {i for i in batch_of if requests[i].key not in journal}
    # Progress counts tokens, since the longest prompts come first.
    costs = [
        len(request.prompt.ids) - (prompt.n_common or 0) + sampling.max_new_tokens
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    total = sum(costs[i] for i in batch_of)
    done = total - sum(costs[i] for i in todo)
    update(done, total)
    unwritten: dict[int, Answer] = {}
    for i, reply in generator.stream(prompts, sampling, {*range(len(prompts))} - todo):
        if i in todo:
            unwritten[i] = requests[i].answer(reply)
            todo.discard(i)
            done += costs[i]
        batch = batch_of.get(i, ())
        if todo.isdisjoint(batch):
            answers = [unwritten.pop(k) for k in batch if k in unwritten]
            journal.append({answer.key: to_json(answer) for answer in answers})
            update(done, total)
    if share.is_whole:
        journal.arrange([requests[i].key for batch in batches for i in batch])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """How answers are sampled; the verb has the defaults."""

    n_samples: int  # per question, setting and variant
    sampling: SamplingConfig


class Drawn(NamedTuple):
    """Sampled answers, and the time they took."""

    samples: list[Sample]  # in the order of the requests, those of one together
    # Mean per sample, on one worker and over all starts; None if some were not timed.
    seconds: dict[Setting, float | None]


def _check_read_alike(tokenizer: Any, requests: Sequence[Request]) -> None:
    """Check that a server that gets texts will read exactly the ids of the prompts."""
    for request in requests:
        if tuple(tokenizer(request.prompt.text)["input_ids"]) != request.prompt.ids:
            raise ValueError(
                f"question {request.example_id!r}: its text would be read as tokens "
                "other than its prompt's; use a server that takes token ids (vLLM)"
            )


def draw_answers(
    requests: Sequence[Request],
    generator: Generator,
    replies: Texts,
    config: DrawConfig,
    progress: Update,
) -> Drawn | None:
    """Sample `n_samples` answers to every request, those of one request together.

    Returns None if this process does only a share of the texts, and in a dry run.
    """
    draws = [
        # No signals are read from samples, so equal prompts are computed once in full.
        (request, dataclasses.replace(prompt, sample=k, n_common=None))
        for request, prompt in zip(requests, prompts_of(requests), strict=True)
        for k in range(config.n_samples)
    ]
    prompts = [prompt for _, prompt in draws]
    texts = replies.generate(generator, prompts, config.sampling, progress)
    if texts is None:
        return None
    fields = ("text", "token_ids", "stop_id", "log_probs", "finish")
    samples: list[Sample] = []
    seconds: dict[Setting, list[float | None]] = {}
    for (request, prompt), reply in zip(draws, texts, strict=True):
        sample = Sample(
            example_id=request.example_id,
            setting=request.setting,
            variant=request.variant,
            sample=prompt.sample,
            **{name: getattr(reply, name) for name in fields},
        )
        samples.append(sample)
        seconds.setdefault(request.setting, []).append(reply.seconds)
    return Drawn(samples, {name: _mean(values) for name, values in seconds.items()})


def _mean(seconds: Sequence[float | None]) -> float | None:
    timed = [value for value in seconds if value is not None]
    return sum(timed) / len(timed) if len(timed) == len(seconds) else None


def answer_config(run: RunDir, *, is_recorded: bool = True) -> AnswerConfig:
    """Return how a run's questions are put, recording it unless this is a dry run."""
    return run.resolve_section("answer", ANSWER_PRESETS, is_recorded=is_recorded)


def answer_identity(config: AnswerConfig) -> dict[str, Any]:
    """Return what affects the prompts and the length of the answers."""
    return dataclasses.asdict(config.prompt) | {
        "schema": SCHEMA_VERSION,
        "max_new_tokens": config.generation.max_new_tokens,
        "stop": list(config.generation.stop),
    }


def _requests_of(run: RunDir, model: PromptModel, config: AnswerConfig) -> Requests:
    limit = config.generation.max_new_tokens
    examples, settings = read_examples(run), settings_of(run)
    return make_requests(examples, model, config.prompt, limit, settings)


class Engine(NamedTuple):
    """What answers a run's questions, and what their prompts are made with."""

    generator: Generator  # answers the questions
    model: PromptModel  # makes the prompts
    # Makes a generator of the same texts that also reads signals; None: it only writes.
    reading: Callable[[Sequence[Request]], Generator] | None = None
    # Why signals are not read, in a sentence; empty if that was asked for.
    why_alone: str = "this engine only writes texts"


def open_local(run: RunDir, config: AnswerConfig) -> Engine:
    """Load a run's backbone, to answer on this machine."""
    from beatrice.extract.backbone.loading import open_backbone
    from beatrice.extract.generate.local import TransformersGenerator

    backbone = open_backbone(run.section("backbone", BackboneConfig), run.answers)
    size = config.generation.tokens_per_batch
    writer = TransformersGenerator(backbone=backbone, tokens_per_batch=size)
    return Engine(writer, backbone)


def _answer(
    open_engine: Callable[[RunDir, AnswerConfig], Engine],
    run: RunDir,
    config: AnswerConfig,
    update: Update,
    progress: Progress,
) -> int:
    """Answer a share of the run's batches, and return how many answers are missing."""
    engine = open_engine(run, config)
    identity = dict(engine.generator.identity) | answer_identity(config)
    record_backend(run, identity)
    progress.note(f"answer: {settings_in_words(run)}")
    listed = _requests_of(run, engine.model, config)
    if listed.left_out:
        write_text_atomic(run.left_out_file, write_lines(listed.left_out))
    else:
        run.left_out_file.unlink(missing_ok=True)
    if listed.note:
        progress.note(f"answer: {listed.note}")
    requests = listed.requests
    journal = Journal.open(answer_files(run, requests), run.share)
    for note in journal.notes:
        progress.note(f"answer: {note}")
    generator = engine.generator
    if engine.reading is not None:
        generator = engine.reading(requests)
    elif engine.why_alone:
        progress.note(
            f"answer: {engine.why_alone}; `beatrice extract` reads the answers later"
        )
    sampling = config.generation.greedy
    append_answers(journal, generator, requests, sampling, update, run.share)
    if not run.share.is_whole:
        return len(requests) - len(journal.files.places())
    limit = config.generation.max_new_tokens
    for line in summarize_answers(read_answers(run), limit, config.prompt):
        progress.note(f"answer: {line}")
    return 0


def load_tokenizer_only(
    run: RunDir, check: Callable[[str, "Outline"], object] = lambda name, outline: None
) -> tuple[TokenizerOnly, tuple[int, ...]]:
    """Load a run's tokenizer and stop tokens, without the backbone's weights.

    They are those of the commit that wrote the run's answers, if there are any.
    """
    from transformers import GenerationConfig as Defaults

    from beatrice.extract.backbone.gguf import loadable_path
    from beatrice.extract.backbone.layout import window_of
    from beatrice.extract.backbone.loading import commit_of, load_outline

    config = run.section("backbone", BackboneConfig)
    commit = commit_of(config, run.answers)
    outline = load_outline(config.path, commit)
    check(config.model, outline)
    try:
        path = loadable_path(config.path)
        defaults = Defaults.from_pretrained(path, revision=commit or "main")
    except OSError:  # there is no such file, so the config has the defaults
        defaults = outline.model.generation_config
    model = TokenizerOnly(
        outline.tokenizer, max_length=window_of(outline.config), name=config.model
    )
    stops = stop_ids_of(defaults, outline.config, outline.tokenizer, config.model)
    return model, stops


def answer_with(run: RunDir, engine: Engine, progress: Progress) -> None:
    """Answer a run's questions with an open engine, such as a server.

    Raises ValueError if an engine with another identity has answered the run before.
    """

    def identity(config: AnswerConfig) -> dict[str, str]:
        backend = dict(engine.generator.identity) | answer_identity(config)
        record_backend(run, backend)  # fails before the stage starts over
        return {"server": sha256_json(backend)}

    stage = dataclasses.replace(
        answer_stage(lambda run, config: engine),
        identity=identity,
        outside=lambda run: {},
    )
    run_stage(stage, run, progress)


def _check_no_server(run: RunDir) -> dict[str, str]:
    """Check that no server answered the run, before the stage starts over."""
    record = run.stage_record("answer")
    if record and "server" in record.inputs and (run.answers / _BACKEND).exists():
        raise ValueError(
            f"{run.answers} holds answers of a server or another engine; answer with "
            "it again (such as with --server), start another run directory, or delete "
            "this folder to answer again"
        )
    return {}


def forecast_answers(run: RunDir, config: AnswerConfig, model: PromptModel) -> Forecast:
    """Return what the prompts that have no answer yet will need."""
    run.hash_inputs(run.examples)  # raises if they are missing
    listed = _requests_of(run, model, config)
    answered = answer_files(run, listed.requests).places()
    prompts = prompts_of([r for r in listed.requests if r.key not in answered])
    forecast = count_requests("answer", prompts, config.generation.greedy)
    basis = ". ".join(filter(None, (forecast.basis, listed.note)))
    return dataclasses.replace(forecast, basis=basis)


_DRAWING = "config.json"  # next to the samples


def read_drawing(run: RunDir) -> dict[str, Any]:
    """Return how a run's answers were sampled, with `splits`; empty if none were."""
    path = run.samples / _DRAWING
    what_to_do = f"delete {run.samples} and draw again"
    return read_json(path, dict[str, Any], what_to_do) if path.exists() else {}


def draw_stage(
    run: RunDir,
    generator: Generator,
    model: TokenizerOnly,
    prompt: PromptConfig,
    draws: DrawConfig,
    splits: Sequence[str],
    progress: Progress,
    *,
    as_text: bool = False,
) -> TextStage[Drawn]:
    """Return the stage that samples answers to the questions of some splits.

    Splits that were already sampled with the same options are kept. Other options are
    a ValueError if a split would be lost.
    """
    identity = {
        "schema": SCHEMA_VERSION,
        "backend": dict(generator.identity),
        "prompt": dataclasses.asdict(prompt),
        "draws": dataclasses.asdict(draws),
    }
    before = read_drawing(run)
    drawn_splits = before.pop("splits", [])
    if sha256_json(before) == sha256_json(identity):
        splits = [*drawn_splits, *splits]
    elif lost := [split for split in drawn_splits if split not in splits]:
        raise ValueError(
            f"{run.samples} holds {before['draws']['n_samples']} draws per question of "
            f"{' and '.join(lost)}, drawn with other options, and would lose them: "
            "repeat the options in its config.json to add to them, or draw again with "
            f"{' '.join(f'--split {x}' for x in (*lost, *splits))}"
        )
    identity["splits"] = [*dict.fromkeys(splits)]
    limit = draws.sampling.max_new_tokens

    def make(replies: Texts, update: Update) -> Drawn | None:
        examples = [e for e in read_examples(run) if e.split in splits]
        listed = make_requests(examples, model, prompt, limit, settings_of(run))
        if listed.note:
            progress.note(f"sample: {listed.note}")
        if as_text:
            _check_read_alike(model.tokenizer, listed.requests)
        return draw_answers(listed.requests, generator, replies, draws, update)

    def write(drawn: Drawn) -> None:
        samples, seconds = drawn
        n_without = sum(sample.log_probs is None for sample in samples)
        n_cut = sum(sample.finish == "length" for sample in samples)
        progress.note(
            f"sample: {len(samples)} drawn, {n_without} without log-probabilities, "
            f"{n_cut} cut at {limit} tokens"
        )
        write_text_atomic(run.samples_file, write_lines(samples))
        write_json_atomic(run.samples / _DRAWING, identity)
        write_json_atomic(run.draw_seconds_file, seconds)

    return TextStage(
        run=run,
        name="sample",
        role="sample",
        reads=question_files(run),
        settings={"sampler": sha256_json(identity)},
        outputs=[run.samples],
        make=make,
        write=write,
        is_timed=True,
    )


def answer_stage(open_engine: Callable[[RunDir, AnswerConfig], Engine]) -> Stage:
    """Return the stage that answers with what `open_engine` opens when it is needed."""
    return Stage(
        name="answer",
        inputs=question_files,
        outputs=lambda run: [run.answers],
        work=functools.partial(_answer, open_engine),
        outside=_check_no_server,
        parts="answers",
        presets=ANSWER_PRESETS,
        forecast=lambda run, config: forecast_answers(
            run, config, load_tokenizer_only(run)[0]
        ),
    )
