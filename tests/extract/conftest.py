"""The shipped model as a backend, and what it is asked."""

import pytest

from extract.backbone.loading import load_backbone
from extract.backbone.names import WEIGHTS
from extract.generate.local import TransformersGenerator
from extract.generate.requests import PromptConfig, make_requests
from extract.world.commands import WORLD_PRESETS
from extract.world.facts import make_world
from extract.world.questions import make_examples


@pytest.fixture(scope="module")
def local():
    return TransformersGenerator(backbone=load_backbone(WEIGHTS))


@pytest.fixture(scope="module")
def requests(local):
    section = WORLD_PRESETS["smoke"]
    examples = list(make_examples(make_world(section.world), section.questions))
    return make_requests(examples, local.backbone, PromptConfig(), 10).requests
