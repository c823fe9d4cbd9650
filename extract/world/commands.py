"""The verb `world`, its stage, and the options that every new run has."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from beatrice.extract.records import write_lines
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.directory import NewRun, Preset, RunDir, package_versions
from beatrice.extract.run.files import write_new_text
from beatrice.extract.run.stages import Stage, do
from beatrice.extract.run.verbs import (
    MODEL,
    RUN_DIR,
    SEED,
    SETTINGS_OPTION,
    preset_option,
)
from beatrice.extract.signals.commands import kept_options, take_kept
from beatrice.extract.world.facts import WorldConfig, make_world
from beatrice.extract.world.questions import QuestionConfig, make_examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldSection:
    """The run's section `world`.

    The world's own seed is fixed, since the embedded model knows one world.
    """

    world: WorldConfig = WorldConfig()
    questions: QuestionConfig = QuestionConfig()


WORLD_PRESETS: dict[Preset, WorldSection] = {
    "demo": WorldSection(),
    "few": WorldSection(),
    "smoke": WorldSection(
        questions=QuestionConfig(n_train=128, n_evaluation=32, n_ood=16)
    ),
    "paper": WorldSection(),
}


def _world(
    run: RunDir, config: WorldSection, update: Update, progress: Progress
) -> None:
    facts = make_world(config.world)
    write_new_text(run.examples, write_lines(make_examples(facts, config.questions)))
    write_new_text(run.passages, write_lines(facts.passages))


def train_world_model(run: RunDir, update: Update, progress: Progress) -> Path:
    """Train the microworld's model from nothing, into the run directory.

    Returns:
      The directory it was saved in, for `--model`.
    """
    from beatrice.extract.world.model import WorldModelConfig, save, train

    recipe, config = WorldModelConfig(), run.section("world", WorldSection)
    path = run.path / "model"

    def on_step(step: int, losses: list[float], _: object) -> None:
        update(step + 1, recipe.n_steps)
        if (step + 1) % 100 == 0:
            shown = ", ".join(f"{loss:.3f}" for loss in losses)
            progress.note(f"model: step {step + 1}, losses {shown} nats")

    model, tokenizer = train(make_world(config.world), recipe, on_step)
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


WORLD = Stage(
    name="world",
    inputs=lambda run: [],
    outputs=lambda run: [run.examples, run.passages],
    work=_world,
    presets=WORLD_PRESETS,
)


def new_world_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that make a run on the microworld what it is."""
    for option in (
        click.option(
            "--seed",
            default=0,
            type=SEED,
            help="Of training and bootstrap.",
        ),
        SETTINGS_OPTION,
        MODEL,
        preset_option("demo", "Sizes; demo takes minutes on two cores, smoke one."),
    ):
        command = option(command)
    return kept_options(command)


def new_world(options: dict[str, Any]) -> NewRun:
    """Take the options of a new run; a wrong model is found before it is made."""
    from beatrice.extract.backbone.names import EMBEDDED, BackboneConfig
    from beatrice.extract.generate.options import check_backbone
    from beatrice.extract.generate.requests import ANSWER_PRESETS
    from beatrice.extract.signals.extract import EXTRACT_PRESETS

    preset, kept = options.pop("preset"), take_kept(options)
    backbone = BackboneConfig(model=options.pop("model"))
    check_backbone(backbone, kept.get("hidden_layers"))
    answer = ANSWER_PRESETS[preset]
    # The embedded model answers with a name; a preset says nothing of other models.
    longest = preset if backbone.model == EMBEDDED else "paper"
    generation = dataclasses.replace(
        answer.generation,
        max_new_tokens=ANSWER_PRESETS[longest].generation.max_new_tokens,
    )
    return NewRun(
        preset=preset,
        seed=options.pop("seed"),
        sections={
            "backbone": backbone,
            "world": WORLD_PRESETS[preset],
            "answer": dataclasses.replace(
                answer,
                settings=options.pop("settings"),
                generation=generation,
            ),
            "extract": dataclasses.replace(EXTRACT_PRESETS[preset], **kept),
        },
    )


@click.command()
@RUN_DIR
@new_world_options
@click.option("--train", is_flag=True, help="Also train the model, into RUN_DIR/model.")
def world(run_dir: Path, train: bool, **options: Any) -> None:
    """Make the microworld: questions and passages (and its model, from nothing).

    Example: beatrice world runs/mine --train
    """
    do(run_dir, WORLD, asked=new_world(options))
    if train:
        progress = Progress()
        with RunDir.open(run_dir) as run, progress.stage("model") as update:
            click.echo(str(train_world_model(run, update, progress)))
