"""The survey of Transformers' types: a part of it, and whether it would notice."""

import dataclasses
import math

import numpy as np
import pytest

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.commands import RowPrinter
from beatrice.benchmarks.bench.oracle import (
    SIGNALS,
    SURVEY_TOLERANCE,
    TOLERANCE,
    Exactness,
    largest_errors,
    require_types,
    summary,
    survey_one,
    survey_types,
)

# One of each kind: a recurrent mixer, latent attention, windows, alibi or parallel
# blocks, sparse keys, sinks, multipliers.
EXACT = (
    "bamba",
    "deepseek_v3",
    "exaone4",
    "falcon",
    "glm_moe_dsa",
    "gpt_neo",
    "gpt_oss",
    "granite",
    "granite_swa",
    "phi",
)
REFUSED = {
    "doge": "miss the change of the residual stream",
    "gemma3n": "4 residual streams",
    "inkling_text": "position_bias",
    "mllama": "teach extract/backbone/layout.py this family",
    "roberta": "expected the list of layers",
}


@pytest.mark.parametrize("lengths", ["short", "beyond"])
@pytest.mark.parametrize("name", EXACT)
def test_a_type_that_is_read_is_exact_within_windows_and_beyond(name, lengths):
    row = survey_one(name, lengths)
    assert row.outcome == "exact", row.reason
    assert max(row.errors.values()) < SURVEY_TOLERANCE


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_type_that_is_refused_has_its_reason(name, reason):
    row = survey_one(name)
    assert row.outcome == "refused", row.reason
    assert reason in row.reason


def readings(n_tokens=20):
    rng = np.random.default_rng(0)
    return [{name: rng.normal(size=(n_tokens, 3)) for name in SIGNALS}]


@pytest.mark.parametrize("family", SIGNALS)
@pytest.mark.parametrize("change", [1e-3, np.nan])
def test_one_number_that_is_off_is_an_error(family, change):
    measured, expected = readings(), readings()
    assert max(largest_errors(measured, expected).values()) == 0
    measured[0][family][3, 1] += change
    errors = largest_errors(measured, expected)
    assert [name for name in SIGNALS if not errors[name] < SURVEY_TOLERANCE] == [family]
    assert max(largest_errors(measured, expected, n_spared=1).values()) == 0
    measured[0][family] = measured[0][family][:, :2]
    assert largest_errors(measured, expected)[family] == np.inf


def test_a_wrong_type_fails_the_survey_and_is_named(capsys):
    rows = survey_types(["doge"], RowPrinter(as_json=True))
    require_types(rows)
    wrong = dataclasses.replace(rows[0], outcome="wrong", reason="KeyError: 'x'")
    with pytest.raises(ValueError, match=r"found wrong: doge \(short\)"):
        require_types([*rows, wrong])
    assert "* wrong: KeyError: 'x' (1): doge" in list(summary([*rows, wrong]))
    assert capsys.readouterr().out.count('"outcome": "refused"') == len(rows)


@pytest.mark.slow
def test_every_type_is_exact_or_refused():
    require_types(survey_types([], RowPrinter(as_json=True)))


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
