import numpy as np
import pytest

import beatrice
from beatrice.extract.run.directory import RunDir


@pytest.fixture(scope="module")
def run(smoke_run):
    return RunDir(smoke_run)


@pytest.fixture(scope="module")
def model():
    return beatrice.LanguageModel("embedded")


@pytest.fixture
def rng():
    return np.random.default_rng(0)
