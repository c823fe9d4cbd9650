import dataclasses
import json

import numpy as np
import pytest
from benchmarks.stages.configurations import config_from_manifest
from benchmarks.stages.presets import make_config
from benchmarks.stages.rows import Rows

from benchmarks.speed.mixed_cost import ALL, compare, measure
from extract.run.directory import RunDir
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES

CONFIG = dataclasses.replace(make_config("smoke"), n_bootstrap=200)


def rows_of(n, labels):
    names = np.full(n, "test")
    return Rows(
        setting="closed_book",
        ids=np.array([f"q{i}" for i in range(n)]),
        datasets=names,
        splits=np.where(np.arange(n) < n // 2, "train", "test"),
        variants=names,
        labels=labels,
        is_labelled=np.ones(n, bool),
    )


@pytest.fixture
def said():
    """Rows, and what three seeds of every encoder say of them."""
    rng = np.random.default_rng(0)
    labels = rng.random(800) < 0.5
    logits = labels + rng.standard_normal((3 * N_SUBSETS, 800))
    return rows_of(800, labels), logits


def test_encoders_that_say_the_same_differ_by_nothing(said):
    rows, logits = said
    found = list(compare(CONFIG, rows, logits, logits))
    assert [row.encoder for row in found] == [ALL, *SUBSET_NAMES]
    for row in found:
        assert row.mixed == row.single and row.low == row.high == 0
        assert row.n == 400 and 0.6 < row.single < 0.9


def test_one_encoder_that_has_become_blind_is_found(said):
    rows, logits = said
    blind = logits.copy()
    blind[3::N_SUBSETS] = np.random.default_rng(1).standard_normal((3, 800))
    found = {row.encoder: row for row in compare(CONFIG, rows, logits, blind)}
    worse = {name for name, row in found.items() if row.high < 0}
    assert worse == {ALL, SUBSET_NAMES[3]}
    lost = found[SUBSET_NAMES[3]].mixed - found[SUBSET_NAMES[3]].single
    mean = found[ALL].mixed - found[ALL].single
    assert mean == pytest.approx(lost / N_SUBSETS)
    assert found[SUBSET_NAMES[3]].mixed == pytest.approx(0.5, abs=0.08)


def test_a_run_in_mixed_precision_is_no_reference(tmp_path):
    config = make_config("smoke", is_mixed=True)
    with pytest.raises(ValueError, match="name another run"):
        next(measure(RunDir(tmp_path), config, lambda done, total: None))


def test_mixed_precision_is_part_of_a_run():
    config = make_config("smoke", is_mixed=True)
    found = config_from_manifest(json.loads(json.dumps(config.as_json())))
    assert found == config != make_config("smoke")
