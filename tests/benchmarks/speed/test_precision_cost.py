import numpy as np
import pytest

from benchmarks.speed.precision import (
    ALL,
    MIXED_HEAD,
    compare,
    measure_mixed,
)
from extract.run.directory import RunDir
from extract.run.manifest import NewRun
from jaxprobe.features.rows import Rows
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.metrics import BootstrapConfig
from jaxprobe.settings import GRID_PRESETS

BOOTSTRAP = BootstrapConfig(n_resamples=200, seed=0)


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
def rows_and_logits():
    """Rows, and the logits of three seeds of every encoder."""
    rng = np.random.default_rng(0)
    labels = rng.random(800) < 0.5
    logits = labels + rng.standard_normal((3 * N_SUBSETS, 800))
    return rows_of(800, labels), logits


def test_equal_logits_differ_by_nothing(rows_and_logits):
    rows, logits = rows_and_logits
    found = list(compare(BOOTSTRAP, rows, logits, logits))
    assert [row.encoder for row in found] == [ALL, *SUBSET_NAMES]
    for row in found:
        assert row.mixed == row.single and row.difference == (0, 0, 0)
        assert 0.6 < row.single < 0.9 and len(row.cells()) == len(MIXED_HEAD)


def test_one_encoder_that_has_become_blind_is_found(rows_and_logits):
    rows, logits = rows_and_logits
    blind = logits.copy()
    blind[3::N_SUBSETS] = np.random.default_rng(1).standard_normal((3, 800))
    found = {row.encoder: row for row in compare(BOOTSTRAP, rows, logits, blind)}
    worse = {name for name, row in found.items() if row.difference.high < 0}
    assert worse == {ALL, SUBSET_NAMES[3]}
    lost = found[SUBSET_NAMES[3]].mixed - found[SUBSET_NAMES[3]].single
    mean = found[ALL].mixed - found[ALL].single
    assert mean == pytest.approx(lost / N_SUBSETS)
    assert found[SUBSET_NAMES[3]].mixed == pytest.approx(0.5, abs=0.08)


def test_a_run_in_mixed_precision_is_no_reference(tmp_path):
    sections = {"train": GRID_PRESETS["smoke"].mixed()}
    with RunDir.open(
        tmp_path / "run", NewRun(preset="smoke", sections=sections)
    ) as run:
        with pytest.raises(ValueError, match="name another run"):
            next(measure_mixed(run, lambda done, total: None))
