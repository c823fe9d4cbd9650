"""The embedded model's training: what decides its bytes."""

import dataclasses

import pytest
import torch

from beatrice.extract.world.facts import WorldConfig, make_world
from beatrice.extract.world.model import WorldModelConfig, train

TINY = WorldModelConfig(
    n_layers=2,
    n_steps=4,
    n_reading_steps=2,
    n_fact_rows=4,
    n_reading_rows=2,
)


@pytest.fixture(scope="module")
def world():
    return make_world(WorldConfig())


def trained(world, config=TINY):
    threads = torch.get_num_threads()
    try:
        model, _ = train(world, config, lambda *_: None)
    finally:
        torch.set_num_threads(threads)
    return {name: x.numpy().tobytes() for name, x in model.state_dict().items()}


def test_the_same_recipe_gives_the_same_bytes(world):
    assert trained(world) == trained(world)


def test_another_seed_gives_another_model(world):
    assert trained(world) != trained(world, dataclasses.replace(TINY, seed=1))
