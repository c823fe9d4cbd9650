"""The stages that need the backbone: world, answer, label, extract."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.stages.label_stages import asking_identity, question_files
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.stage import Progress, Stage, Update
from extract import pipeline
from extract.backbone.loading import Backbone, load_backbone, require_answering_model
from extract.backbone.names import own_device
from extract.generate.local import TransformersGenerator
from extract.generate.requests import GenerationConfig, Request
from extract.generate.served_answers import claim_answers
from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from extract.run.manifest import package_versions
from extract.signals.reader import SignalReader
from extract.world.facts import make_world
from extract.world.model import WorldModelConfig, save, train


def open_backbone(config: RunConfig) -> Backbone:
    """Load the run's backbone with the run's number of threads."""
    torch.set_num_threads(config.n_threads)
    device = own_device(config.device, torch.cuda.device_count())
    return load_backbone(config.model_path, dtype=config.model_dtype, device=device)


def generation_config(config: RunConfig) -> GenerationConfig:
    """Return how the run generates."""
    return GenerationConfig(
        max_new_tokens=config.max_new_tokens, tokens_per_batch=config.tokens_per_batch
    )


def _world(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    if config.world is None or config.questions is None:
        raise ValueError(f"{run.path} asks published questions, not the microworld's")
    pipeline.write_world(run, config.world, config.questions)


def ask_backbone(
    run: RunDir, config: RunConfig, progress: Progress
) -> tuple[Backbone, list[Request]]:
    """Load the run's backbone as the one that answers; return what it is asked."""
    backbone = open_backbone(config)
    claim_answers(
        run,
        TransformersGenerator(backbone=backbone).identity | asking_identity(config),
    )
    asked = pipeline.ask_run(run, backbone, config.prompt, config.max_new_tokens)
    if asked.note:
        progress.note(f"answer: {asked.note}")
    return backbone, asked.requests


def _answer(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    backbone, requests = ask_backbone(run, config, progress)
    how = generation_config(config)
    for note in pipeline.write_answers(run, backbone, requests, how, update):
        progress.note(note)


def _label(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    record = run.stage_record("label")
    if record is not None and "judge" in record.inputs:
        progress.note(
            "label: exact match replaces the judges' labels; their replies stay in "
            f"{run.replies('judge')}"
        )
    pipeline.write_labels(run)


def extract_worker(
    run: RunDir, config: RunConfig, update: Update, worker: tuple[int, int]
) -> int:
    """Do one worker's part of the extraction, both settings.

    Returns:
      How many ranges are not there yet, of any worker.

    Raises:
      ValueError: other weights gave the answers, see `require_answering_model`.
    """
    backbone = open_backbone(config)
    require_answering_model(run.answers, backbone)
    reader = SignalReader.for_config(backbone, config.extract)
    fingerprint = {"model": backbone.revision, "dtype": str(backbone.dtype)}
    reports = [
        pipeline.write_features(
            run, reader, setting, config.extract, fingerprint, update, worker
        )
        for setting in SETTINGS
    ]
    return sum(report.n_missing for report in reports)


def _extract(run: RunDir, config: RunConfig, update: Update, progress: Progress):
    extract_worker(run, config, update, (0, 1))


def train_world_model(
    run: RunDir, config: RunConfig, update: Update, progress: Progress
) -> Path:
    """Train the microworld's model from nothing, into the run directory.

    Returns:
      The directory it was saved in, for `--model`.
    """
    recipe = WorldModelConfig()
    path = run.path / "model"

    def on_step(step: int, losses: list[float], _: object) -> None:
        update(step + 1, recipe.n_steps)
        if (step + 1) % 100 == 0:
            shown = ", ".join(f"{loss:.3f}" for loss in losses)
            progress.note(f"model: step {step + 1}, losses {shown} nats")

    world = make_world(config.world)
    model, tokenizer = train(world, recipe, on_step)
    save(
        model,
        tokenizer,
        path,
        {
            "command": "beatrice world RUN_DIR --train",
            "world": dataclasses.asdict(config.world),
            "model": dataclasses.asdict(recipe),
            "versions": package_versions(),
        },
    )
    return path


def store_files(run: RunDir, setting: Setting) -> list[Path]:
    """Return what identifies a store: its index and its commit records.

    Not its arrays, which can be hundreds of gigabytes; the commit records hold their
    checksums, and `beatrice verify` reads them all.
    """
    folder = run.features(setting)
    return [folder / "index.json", folder / "commits"]


def _stores(run: RunDir) -> list[Path]:
    return [path for setting in SETTINGS for path in store_files(run, setting)]


def _files(*names: str) -> Callable[[RunDir], list[Path]]:
    return lambda run: [getattr(run, name) for name in names]


WORLD = Stage(
    name="world",
    inputs=_files(),
    outputs=_files("examples", "passages"),
    work=_world,
)
ANSWER = Stage(
    name="answer", inputs=question_files, outputs=_files("answers"), work=_answer
)
LABEL = Stage(
    name="label",
    inputs=_files("examples", "answers"),
    outputs=_files("labels"),
    work=_label,
)
EXTRACT = Stage(
    name="extract", inputs=_files("answers"), outputs=_stores, work=_extract
)
