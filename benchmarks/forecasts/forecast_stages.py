"""Forecasts of the stages that are no other model's work: each from its own inputs."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.forecasts.modelmemory import generation_bytes, reading_bytes
from benchmarks.forecasts.rehearsal import Rehearsal, spread
from benchmarks.stages.forecast import N_PROBED, Forecast
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.tallies import disk_bytes
from extract.generate.answers import answered
from extract.generate.generator import Generator, SamplingConfig
from extract.generate.requests import GenerationConfig, PromptModel, ask, plan_batches
from extract.generate.sampling import request_prompt
from extract.label.verdicts import exact_match_judge, label_answer
from extract.pipeline import answers_file, read_answers, read_examples
from extract.records import SETTINGS, to_json
from extract.run.directory import RunDir
from extract.store.config import stored_bytes
from extract.store.spec import Family

_BYTES_PER_ID = 7
_BYTES_PER_ANSWER = 260  # beside the ids: names of fields, key, text


def forecast_answers(
    run: RunDir,
    config: RunConfig,
    generator: Generator,
    speaker: PromptModel,
    *,
    load_seconds: float = 0.0,
    gpu_bytes: int | None = None,
) -> Forecast:
    """Return what answering needs; ten prompts of all lengths are answered."""
    run.hash_inputs(run.examples)  # says what is missing
    asked = ask(read_examples(run), speaker, config.prompt, config.max_new_tokens)
    there = answered(answers_file(run), run.answer_parts, asked.requests)
    todo = [request for request in asked.requests if request.key not in there]
    prompts = [request_prompt(speaker.tokenizer, request) for request in todo]
    found = Rehearsal(
        generator, "answer", load_seconds=load_seconds, gpu_bytes=gpu_bytes
    ).forecast(prompts, SamplingConfig(max_new_tokens=config.max_new_tokens))
    n_ids = sum(len(r.prompt.ids) + config.max_new_tokens for r in todo)
    size = n_ids * _BYTES_PER_ID + len(todo) * _BYTES_PER_ANSWER
    basis = found.basis if asked.note is None else f"{found.basis}; {asked.note}"
    return dataclasses.replace(found, disk_bytes=size, basis=basis)


def forecast_local_answers(run: RunDir, config: RunConfig) -> Forecast:
    """Return what answering on this machine needs."""
    from benchmarks.stages.torch_stages import open_backbone
    from extract.generate.local import TransformersGenerator

    began = time.monotonic()
    backbone = open_backbone(config)
    generator = TransformersGenerator(
        backbone=backbone, tokens_per_batch=config.tokens_per_batch
    )
    return forecast_answers(
        run,
        config,
        generator,
        backbone,
        load_seconds=time.monotonic() - began,
        gpu_bytes=generation_bytes(backbone, config.tokens_per_batch),
    )


def forecast_extract(run: RunDir, config: RunConfig) -> Forecast:
    """Return what extraction needs; the store's size is exact before compression."""
    from benchmarks.stages.torch_stages import open_backbone
    from extract.signals.plan import sequence_of
    from extract.signals.reader import SignalReader

    run.hash_inputs(run.answers)
    began = time.monotonic()
    backbone = open_backbone(config)
    reader = SignalReader.for_config(backbone, config.extract)
    loaded = time.monotonic() - began
    answers = [a for setting in SETTINGS for a in read_answers(run, setting)]
    span = config.extract.answer_span
    sequences = [sequence_of(answer, answer_span=span) for answer in answers]
    lengths = [len(sequence.ids) for sequence in sequences]
    probed = [sequences[i] for i in spread(lengths, N_PROBED)]
    budget = config.extract.tokens_per_batch
    batches = plan_batches(
        [len(s.ids) for s in probed],
        GenerationConfig(max_new_tokens=0, tokens_per_batch=budget),
    )
    if probed:  # one untimed: a first call allocates what later ones use
        reader.read(probed[:1])
    began = time.monotonic()
    for batch in batches:
        reader.read([probed[i] for i in batch])
    seconds = time.monotonic() - began
    work = sum(lengths) / max(1, sum(len(s.ids) for s in probed))
    kept = sum(Family(shape=tuple(s)).row_bytes for s in reader.shapes.values())
    n_answer = int(sum(s.spans[2, 1] - s.spans[2, 0] for s in sequences))
    every_layer = (backbone.n_layers + 1, backbone.d_model)
    stored = stored_bytes(
        {**reader.shapes, "hidden": every_layer},
        config.extract,
        n_tokens=sum(lengths),
        n_answer=n_answer,
    )
    return Forecast(
        stage="extract",
        n_rows=sum(lengths),
        n_prompt_tokens=sum(lengths),
        gpu_bytes=reading_bytes(backbone, budget, kept),
        disk_bytes=sum(stored.values()),
        seconds=loaded + seconds * work,
        basis=(
            f"rows are tokens of {len(answers)} answers; time from {len(probed)} "
            f"answers in {seconds:.2f} s, scaled by their tokens, and {loaded:.1f} s "
            "of loading"
        ),
    )


def forecast_exact_labels(run: RunDir, config: RunConfig) -> Forecast:
    """Return what labelling by exact match needs."""
    run.hash_inputs(run.examples, run.answers)
    examples = {example.id: example for example in read_examples(run)}
    answers = [a for setting in SETTINGS for a in read_answers(run, setting)]
    probed = answers[:N_PROBED]
    began = time.monotonic()
    labels = [label_answer(examples[a.example_id], a, exact_match_judge)
              for a in probed]  # fmt: skip
    seconds = time.monotonic() - began
    share = len(answers) / max(1, len(probed))
    return Forecast(
        stage="label",
        n_rows=len(answers),
        disk_bytes=round(sum(len(to_json(label)) + 1 for label in labels) * share),
        seconds=seconds * share,
        basis=f"by exact match, no requests; time from {len(probed)} answers",
    )


def forecast_world(config: RunConfig) -> Forecast:
    """Return what the microworld's questions need: they are made, and not written."""
    from extract.world.facts import make_world
    from extract.world.questions import make_examples

    if config.world is None or config.questions is None:
        raise ValueError("this run asks published questions, not the microworld's")
    began = time.monotonic()
    made = make_world(config.world)
    lines = [to_json(e) for e in make_examples(made, config.questions)]
    lines += [to_json(passage) for passage in made.passages]
    return Forecast(
        stage="world",
        n_rows=len(lines),
        disk_bytes=sum(len(line) + 1 for line in lines),
        seconds=time.monotonic() - began,
        basis="questions and passages were all made, which takes as long",
    )


def forecast_arrays(run: RunDir, name: str, inputs: list[Path]) -> Forecast:
    """Return what is known of a stage that trains on or measures stored signals."""
    run.hash_inputs(*inputs)
    n_rows = n_bytes = 0
    for setting in SETTINGS:
        folder = run.features(setting)
        n_bytes += disk_bytes([folder])
        if (folder / "index.json").exists():
            from extract.store.read import open_store

            n_rows += len(open_store(folder).spec.keys)
    return Forecast(
        stage=name,
        basis=(
            f"reads {n_rows} answers' signals ({n_bytes:,} bytes on disk) or what was "
            "made of them; no model is asked, and no time is given: beside training "
            "it is short"
        ),
    )


def _train(run: RunDir, config: RunConfig) -> Forecast:
    from benchmarks.forecasts.forecast_training import forecast_train

    return forecast_train(run, config)


def _select(run: RunDir, config: RunConfig) -> Forecast:
    from benchmarks.forecasts.forecast_training import forecast_select

    return forecast_select(run, config)


def _evaluate(run: RunDir, config: RunConfig) -> Forecast:
    from benchmarks.forecasts.forecast_results import forecast_evaluate

    return forecast_evaluate(run, config)


def _control(run: RunDir, config: RunConfig) -> Forecast:
    from benchmarks.forecasts.forecast_results import forecast_control

    return forecast_control(run, config)


FORECASTS: dict[str, Callable[[RunDir, RunConfig], Forecast]] = {
    "answer": forecast_local_answers,
    "label": forecast_exact_labels,
    "extract": forecast_extract,
    "train": _train,
    "select": _select,
    "evaluate": _evaluate,
    "control": _control,
}
