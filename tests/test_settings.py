"""The sections of every room: what a manifest holds of them is what is read again."""

import dataclasses
from functools import partial

import pytest

from beatrice.cli import CHAIN, VERBS
from benchmarks.baselines.stage import BASELINES_PRESETS
from extract.backbone.names import BackboneConfig
from extract.generate.requests import ANSWER_PRESETS
from extract.label.verdicts import LABEL_PRESETS
from extract.run.directory import RunDir
from extract.run.manifest import PRESETS, NewRun, as_json, decode_section
from extract.run.verbs import load_stage
from extract.signals.stage import EXTRACT_PRESETS
from extract.world.commands import WORLD_PRESETS
from jaxprobe.commands import with_options
from jaxprobe.config import StreamConfig
from jaxprobe.evaluation import INTERVAL_PRESETS
from jaxprobe.settings import (
    GRID_PRESETS,
    SELECT_PRESETS,
    GridConfig,
    grid_config,
    select_config,
)
from jaxprobe.stage import CALIBRATE_PRESETS
from pgir.controllers.stage import CONTROL_PRESETS
from selection.sweep import SWEEP_PRESETS

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
}
STAGES = (
    "world answer label extract sweep train select calibrate evaluate baselines control"
)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_survives_the_manifest(name, preset):
    settings = SECTIONS[name][preset]
    assert decode_section(as_json(settings), type(settings), name) == settings


@pytest.mark.parametrize(
    "settings",
    [
        BackboneConfig(model="owner/model", dtype="bfloat16", device="cuda"),
        dataclasses.replace(EXTRACT_PRESETS["paper"], hidden_layers=(1, 5)),
        GridConfig(stream=StreamConfig()).mixed(),
    ],
)
def test_what_is_chosen_survives_it_too(settings):
    assert decode_section(as_json(settings), type(settings), "it") == settings


def test_every_stage_of_the_chain_has_a_verb_and_the_section_it_is_known_by():
    stages = [load_stage(place) for place in CHAIN]
    assert [stage.name for stage in stages] == [*STAGES.split(), "report"]
    for stage in stages:
        assert stage.name in VERBS
        if stage.presets:
            assert stage.presets == SECTIONS[stage.section or stage.name]


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun(preset="smoke", seed=7)) as run:
        yield run


def options(**given):
    names = ("is_streamed", "is_mixed", "is_linear_first")
    return partial(with_options, **(dict.fromkeys(names, False) | given))


@pytest.mark.parametrize("option", ["is_mixed", "is_streamed", "is_linear_first"])
def test_options_of_training_stay_with_the_run(run, option):
    chosen = options(**{option: True})
    found = run.settle("train", GRID_PRESETS, chosen)
    assert found == chosen(GRID_PRESETS["smoke"]) != GRID_PRESETS["smoke"]
    assert run.settle("train", GRID_PRESETS, options()) == found  # none is given
    assert run.settle("train", GRID_PRESETS, chosen) == found
    assert grid_config(run) == found.seeded(7)
    both = options(is_mixed=True, is_streamed=True, is_linear_first=True)
    with pytest.raises(ValueError, match="you asked for .*train.(encoder|stream)"):
        run.settle("train", GRID_PRESETS, both)


def test_a_run_that_is_trained_without_an_option_is_not_trained_with_it(run):
    assert grid_config(run).encoder.matmul_dtype != "bfloat16"
    asked = "you asked for train.encoder.matmul_dtype='bfloat16'"
    with pytest.raises(ValueError, match=f"run with train.encoder.matmul_.*{asked}"):
        run.settle("train", GRID_PRESETS, options(is_mixed=True))


def test_a_run_that_holds_its_store_in_memory_is_not_streamed(run):
    grid_config(run)
    told = "a run with train.stream=None; you asked for train.stream={'n_chunk': 64"
    with pytest.raises(ValueError, match=told):
        run.settle("train", GRID_PRESETS, options(is_streamed=True))


def test_the_runs_seed_takes_the_place_of_the_protocols(run):
    assert grid_config(run).train.root_seed == 7
    assert select_config(run).train.root_seed == 7
    assert run.section("train", GridConfig) == GRID_PRESETS["smoke"]  # not stored twice
