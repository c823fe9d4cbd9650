"""The embedded backbone with a real, untrained detector."""

import pytest

from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.pgir.bridge import ProbedBackbone
from beatrice.pgir.scorer import Scorer
from tests.pgir.small import make_detector


@pytest.fixture(scope="session")
def backbone():
    return load_backbone(WEIGHTS)


@pytest.fixture(scope="session")
def probed(backbone):
    config = GenerationConfig(max_new_tokens=8)
    return ProbedBackbone(backbone, make_detector(backbone), config)


@pytest.fixture(scope="session")
def scorer(probed):
    return Scorer(probed.backbone, probed.detector, probed.config)
