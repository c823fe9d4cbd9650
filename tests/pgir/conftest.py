"""The embedded backbone with a real, untrained detector."""

import pytest

from extract.backbone.loading import load_backbone
from extract.backbone.names import WEIGHTS
from extract.generate.requests import GenerationConfig
from extract.generate.templates import TEMPLATES
from pgir.bridge import ProbedBackbone
from tests.pgir.small_detector import make_detector


@pytest.fixture(scope="session")
def backbone():
    return load_backbone(WEIGHTS)


@pytest.fixture(scope="session")
def probed(backbone):
    return ProbedBackbone(
        backbone,
        make_detector(backbone),
        TEMPLATES["short"],
        GenerationConfig(max_new_tokens=8),
    )
