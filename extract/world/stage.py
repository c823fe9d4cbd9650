"""The stage `world`: make a run of the microworld's questions."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.options import answer_preset, new_run
from beatrice.extract.records import Setting, write_lines
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.directory import NewRun, Preset, RunDir, package_versions
from beatrice.extract.run.files import write_text_atomic
from beatrice.extract.run.stages import Stage
from beatrice.extract.world.facts import (
    QuestionConfig,
    WorldConfig,
    make_examples,
    make_world,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldSection:
    """The run's section `world`; its seed is fixed: the embedded model knows one."""

    world: WorldConfig = WorldConfig()
    questions: QuestionConfig = QuestionConfig()


_SMOKE = QuestionConfig(n_train=128, n_evaluation=32, n_ood=16)
WORLD_PRESETS: dict[Preset, WorldSection] = dict.fromkeys(
    get_args(Preset), WorldSection()
)
WORLD_PRESETS["smoke"] = WorldSection(questions=_SMOKE)


def _world(
    run: RunDir, config: WorldSection, update: Update, progress: Progress
) -> None:
    facts = make_world(config.world)
    examples = write_lines(make_examples(facts, config.questions))
    write_text_atomic(run.examples, examples, is_new=True)
    write_text_atomic(run.passages, write_lines(facts.passages), is_new=True)


WORLD = Stage(
    name="world",
    verb="data --world",
    inputs=lambda run: [],
    outputs=lambda run: [run.examples, run.passages],
    work=_world,
    presets=WORLD_PRESETS,
)


def train_world_model(run: RunDir, update: Update, progress: Progress) -> Path:
    """Train the microworld's model from scratch; return its folder, for `--model`."""
    from beatrice.extract.world.model import WorldModelConfig, save, train

    recipe, config = WorldModelConfig(), run.section("world", WorldSection)
    path = run.path / "model"

    def on_step(step: int, losses: list[float]) -> None:
        update(step + 1, recipe.n_steps)
        if (step + 1) % 100 == 0:
            shown = ", ".join(f"{loss:.3f}" for loss in losses)
            progress.note(f"model: step {step + 1}, losses {shown} nats")

    model, tokenizer = train(make_world(config.world), recipe, on_step)
    origin = {
        "command": "beatrice data RUN_DIR --world --set train_model=true",
        "world": dataclasses.asdict(config.world),
        "model": dataclasses.asdict(recipe),
        "versions": package_versions(),
    }
    save(model, tokenizer, path, origin)
    return path


def new_world(
    *,
    model: str = "embedded",
    preset: Preset = "demo",
    settings: tuple[Setting, ...],
    seed: int = 0,
    storage: dict[str, Any],
) -> NewRun:
    """Return a run of the microworld; `storage` has fields of its `ExtractConfig`."""
    backbone, world = BackboneConfig(model=model), WORLD_PRESETS[preset]
    answer = dataclasses.replace(answer_preset(preset, model), settings=settings)
    return new_run(preset, seed, backbone, answer, storage, world=world)
