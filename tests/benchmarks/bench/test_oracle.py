import dataclasses
import math

import pytest

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.oracle import SIGNALS, TOLERANCE, Exactness


def make_row(**changes):
    row = Exactness(
        name="llama",
        float32=dict.fromkeys(SIGNALS, 1e-6),
        bfloat16=dict.fromkeys(SIGNALS, 1e-6),
        gap=dict.fromkeys(SIGNALS, 1e-2),
    )
    return dataclasses.replace(row, **changes)


def test_small_errors_are_accepted():
    oracle.require([make_row()])


@pytest.mark.parametrize("error", [2 * TOLERANCE, math.inf, math.nan])
def test_a_large_or_undefined_float32_error_is_named(error):
    row = make_row(float32={**make_row().float32, "attn": error})
    with pytest.raises(ValueError, match="llama: float32 attn"):
        oracle.require([make_row(), row])


def test_a_bfloat16_error_beyond_the_models_own_gap_is_named():
    row = make_row(bfloat16={**make_row().bfloat16, "resid": 2e-2})
    with pytest.raises(ValueError, match="llama: bfloat16 resid"):
        oracle.require([row])


def test_a_reading_that_is_not_a_number_is_the_worst_error():
    import numpy as np

    right = [{name: np.zeros(3) for name in SIGNALS}]
    wrong = [{**right[0], "prob": np.array([0.0, np.nan, 0.0])}]
    assert oracle.largest_errors(wrong, right)["prob"] == math.inf
    assert oracle.largest_errors(right, right) == dict.fromkeys(SIGNALS, 0.0)
