"""Benches choose how many threads Torch has; the tests behind them do not notice."""

import pytest
import torch


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
