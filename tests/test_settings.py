"""The settings of every room, which a manifest gives back as they were stored."""

import re
from dataclasses import replace
from pkgutil import resolve_name

import pytest

from beatrice.benchmarks import commands
from beatrice.benchmarks.real import GRID
from beatrice.benchmarks.stages import BASELINES_PRESETS
from beatrice.cli import CHAIN, VERBS
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.prompts import ANSWER_PRESETS
from beatrice.extract.label.labels import LABEL_PRESETS
from beatrice.extract.run.directory import (
    PRESETS,
    NewRun,
    RunDir,
    as_json,
    decode_section,
)
from beatrice.extract.run.verbs import SIZES
from beatrice.extract.signals.extract import EXTRACT_PRESETS
from beatrice.extract.world.stage import WORLD_PRESETS
from beatrice.jaxprobe.commands import HEAD_SIZES, SizeOptions, TrainingOptions
from beatrice.jaxprobe.config import (
    CALIBRATE_PRESETS,
    GRID_PRESETS,
    INTERVAL_PRESETS,
    SELECT_PRESETS,
    GridConfig,
    StreamConfig,
)
from beatrice.jaxprobe.stages import TRAIN, grid_config, select_config
from beatrice.pgir.stages import CONTROL_PRESETS
from beatrice.selection.anatomy import ANATOMY_PRESETS
from beatrice.selection.greedy import OPTIMISM
from beatrice.selection.stages import SELECT, SWEEP_PRESETS

SECTIONS = {
    "world": WORLD_PRESETS,
    "answer": ANSWER_PRESETS,
    "label": LABEL_PRESETS,
    "extract": EXTRACT_PRESETS,
    "sweep": SWEEP_PRESETS,
    "train": GRID_PRESETS,
    "select": SELECT_PRESETS,
    "calibrate": CALIBRATE_PRESETS,
    "intervals": INTERVAL_PRESETS,
    "baselines": BASELINES_PRESETS,
    "control": CONTROL_PRESETS,
    "anatomy": ANATOMY_PRESETS,
}
STAGES = (
    "world answer label extract sweep train select calibrate evaluate baselines control"
)


@pytest.mark.parametrize(
    "settings",
    [
        *(presets[preset] for presets in SECTIONS.values() for preset in PRESETS),
        BackboneConfig(model="owner/model", dtype="bfloat16", device="cuda"),
        replace(EXTRACT_PRESETS["paper"], hidden_layers=(1, 5)),
        GridConfig(stream=StreamConfig()).mixed(),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_a_section_survives_the_manifest(settings):
    assert decode_section(as_json(settings), type(settings), "it") == settings


def test_every_stage_of_the_chain_has_a_verb_and_its_own_section():
    stages = list(map(resolve_name, CHAIN))
    assert [stage.name for stage in stages] == [*STAGES.split(), "report"]
    for stage in stages:
        assert (stage.verb or stage.name).split()[0] in VERBS
        if stage.presets:
            assert stage.presets == SECTIONS[stage.section or stage.name]


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun(preset="smoke", seed=7)) as run:
        yield run


def options(**flags):
    return TrainingOptions(**flags).change


@pytest.mark.parametrize("option", ["mixed", "streamed", "linear_first"])
def test_options_of_training_stay_with_the_run(run, option):
    chosen = options(**{option: True})
    result = run.resolve_section("train", GRID_PRESETS, chosen)
    assert result == chosen(GRID_PRESETS["smoke"]) != GRID_PRESETS["smoke"]
    for again in (options(), chosen):  # without an option, and with the same
        assert run.resolve_section("train", GRID_PRESETS, again) == result
    assert grid_config(run) == result.seeded(7)
    both = options(mixed=True, streamed=True, linear_first=True)
    with pytest.raises(ValueError, match="you asked for .*train.(encoder|stream)"):
        run.resolve_section("train", GRID_PRESETS, both)


@pytest.mark.parametrize(
    ("option", "refusal"),
    [
        ("mixed", "run with train.encoder.matmul_.*asked for .*matmul_dtype='bfloat16"),
        ("streamed", "train.stream=None; you asked for train.stream={'n_chunk': 64"),
    ],
)
def test_a_training_option_is_refused_once_a_run_is_settled_without_it(
    run, option, refusal
):
    assert grid_config(run).encoder.matmul_dtype != "bfloat16"
    with pytest.raises(ValueError, match=refusal):
        run.resolve_section("train", GRID_PRESETS, options(**{option: True}))


@pytest.mark.parametrize(
    ("text", "preset", "config"),
    [
        *((SIZES, *preset) for preset in GRID_PRESETS.items()),
        *((HEAD_SIZES, *preset) for preset in SELECT_PRESETS.items()),
        (commands.SIZES, "demo", GRID),
    ],
)
def test_the_help_of_presets_names_their_sizes(text, preset, config):
    words = next(size for size in text.split("; ") if size.startswith(preset))
    is_grid, train = isinstance(config, GridConfig), config.train
    width = config.encoder.hidden if is_grid else config.head.hidden
    assert re.search(rf"\bwidth {width}\b", words)
    assert re.search(rf"\bbatches of {train.batch_size}\b", words)
    assert f"{train.max_epochs} epochs at {train.learning_rate:g}" in words
    if is_grid:
        assert ("regressions" in words) == config.encoder.is_linear_first
        assert ("one seed" in words) == (train.n_seeds == 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_sizes_of_a_grid_can_be_changed_one_by_one(preset):
    config = GRID_PRESETS[preset]
    wide = config.resized(width=24, seeds=7)
    assert (wide.encoder.hidden, wide.train.n_seeds) == (24, 7)
    ratio = config.encoder.projection / config.encoder.hidden
    assert wide.encoder.projection == 24 * ratio
    again = wide.resized(width=config.encoder.hidden, seeds=config.train.n_seeds)
    assert again.train == config.train
    longer = config.resized(epochs=90, learning_rate=0.5)
    assert (longer.train.max_epochs, longer.train.learning_rate) == (90, 0.5)
    assert longer.train.lr_patience == config.train.lr_patience
    assert config.resized() == config
    with pytest.raises(ValueError, match="n_seeds must be .* at least 1"):
        config.resized(seeds=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_command_gives_the_same_section_whatever_was_typed_before(preset):
    config = GRID_PRESETS[preset]
    for line in (SizeOptions(epochs=1), SizeOptions(width=5), SizeOptions(width=128)):
        once = line.change(config, preset)
        others = SizeOptions(epochs=once.train.max_epochs, width=3)
        assert line.change(once, preset) == once
        again = line.change(others.change(config, preset), preset)
        assert again.train == once.train
        assert line.width is None or again.encoder == once.encoder
    steady = config.linear_first()
    assert steady.train.lr_patience is None
    assert SizeOptions(epochs=90).change(steady, preset).train.lr_patience is None


def test_the_rate_patience_of_an_older_section_is_kept():
    old = as_json(GRID_PRESETS["few"])
    old["train"]["lr_patience"] = 12
    section = decode_section(old, GridConfig, "train")
    assert section.linear_first().train.lr_patience == 12


def test_sizes_of_a_stage_may_change_until_its_outputs_exist(run):
    def change(config):
        return config.resized(width=4)

    assert grid_config(run).encoder.hidden == 8
    # Recorded, as nothing is trained.
    assert TRAIN.resolve_section(run, change).encoder.hidden == 4
    assert grid_config(run).encoder.hidden == 4
    run.examples.write_text("")
    run.encoders("closed_book").mkdir(parents=True)
    assert TRAIN.resolve_section(run, change) == TRAIN.resolve_section(run)
    refusal = r"hidden=4; you asked for .*hidden=6.*, or delete .*encoders/closed_book"
    with pytest.raises(ValueError, match=refusal):
        TRAIN.resolve_section(run, lambda config: config.resized(width=6))
    with pytest.raises(ValueError, match="n_seeds must be .* at least 1") as refused:
        TRAIN.resolve_section(run, lambda config: config.resized(seeds=0))
    assert "delete" not in str(refused.value)
    # No result depends on the memory that training is planned for.
    planned = TRAIN.resolve_section(run, lambda c: replace(c, device_memory=9))
    assert planned.device_memory == 9


def test_sizes_of_heads_may_change_until_heads_exist(run):
    for n in (3, 5):
        settled = SELECT.resolve_section(
            run, lambda config, n=n: config.resized(epochs=n)
        )
        assert settled.train.max_epochs == n
    assert OPTIMISM.identity(settled) != OPTIMISM.identity(settled.resized(epochs=3))
    run.selection.mkdir()
    with pytest.raises(ValueError, match="max_epochs=7.*, or delete .*selection"):
        SELECT.resolve_section(run, lambda config: config.resized(epochs=7))


def test_the_runs_seed_replaces_the_protocols_seed(run):
    assert grid_config(run).train.root_seed == 7
    assert select_config(run).train.root_seed == 7
    assert run.section("train", GridConfig) == GRID_PRESETS["smoke"]  # not stored twice
