"""What detectors read is cached by name and part, and read again when it must be."""

import numpy as np
import pytest

from beatrice.benchmarks.baselines import readings
from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.baselines.readings import (
    AnswerReader,
    cached_readings,
    load_part,
    parts_of,
    reading_keys,
    rows_read,
)
from beatrice.jaxprobe.checkpoint import Cache
from tests.benchmarks.baselines.drawn import inputs

NAMES = ("llmcheck_hidden", "p_true")
IDENTITIES = {"answers": "1", "samples": "2"}


def no_model():
    raise AssertionError("nothing was to be read")


def keep(cache, values, rows=None, seconds=2.0, peak_bytes=0):
    """Leave parts on disk as an earlier start would."""
    places = np.arange(len(values)) if rows is None else rows
    for part in parts_of(int(places.max()) + 1):
        own = (places >= part.start) & (places < part.stop)
        cost = {"seconds": np.float64(seconds)}
        cost |= {"peak_bytes": np.int64(peak_bytes + part.start)}
        arrays = {"values": values[own], "rows": places[own], **cost}
        cache.save(f"{part.start:07d}", arrays)


def unread(wanted, caches, n_rows):
    """Return by name the rows that would be read now."""
    rows = {name: [] for name in wanted}
    for part in parts_of(n_rows):
        for name, missing in load_part(wanted, caches, part)[1].items():
            rows[name] += missing
    return rows


def test_parts_hold_every_row_once():
    assert [i for part in parts_of(600) for i in range(600)[part]] == list(range(600))
    assert [part.stop - part.start for part in parts_of(600)] == [256, 256, 88]


def test_what_an_earlier_start_read_is_not_read_again(tmp_path):
    given = inputs([["a"]] * 300)
    caches = {name: Cache(tmp_path / name, "key") for name in NAMES}
    states = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    scalars = np.arange(300, dtype=np.float32)
    for name, values in zip(NAMES, (states, scalars), strict=True):
        keep(caches[name], values)
    ticks = []
    wanted = dict.fromkeys(NAMES, np.arange(300))
    reading = AnswerReader(given, no_model)
    read = cached_readings(reading, wanted, 300, caches, lambda: ticks.append(1))
    np.testing.assert_array_equal(read.values["llmcheck_hidden"], states)
    np.testing.assert_array_equal(read.values["p_true"], scalars)
    assert read.seconds == dict.fromkeys(NAMES, 4.0) and len(ticks) == 2
    # The most of the parts, not their sum.
    assert read.peak_bytes == dict.fromkeys(NAMES, 256)
    assert unread(wanted, caches, 300) == {name: [] for name in NAMES}
    (tmp_path / "p_true" / "0000256.safetensors").unlink()
    assert unread(wanted, caches, 300)["p_true"] == list(range(256, 300))
    with pytest.raises(AssertionError, match="nothing was to be read"):
        cached_readings(reading, wanted, 300, caches)


def test_training_answers_are_read_for_those_that_learn_from_them_alone(tmp_path):
    given = inputs([["a"]] * 12, splits=["train", "validation", "test"] * 4)
    known = catalogue()
    untrained, trained = known["llmcheck_hidden"], known["lookback_lens"]
    wanted = rows_read(given.rows, [untrained, trained])
    evaluated = np.array([row for row in range(12) if row % 3])
    np.testing.assert_array_equal(wanted["llmcheck_hidden_all"], evaluated)
    assert wanted["lookback"].tolist() == list(range(12))
    values = np.arange(12, dtype=np.float32)[:, None]
    caches = {"llmcheck_hidden_all": Cache(tmp_path, "key")}
    keep(caches["llmcheck_hidden_all"], values[evaluated], evaluated)
    few = {"llmcheck_hidden_all": evaluated}
    read = cached_readings(AnswerReader(given, no_model), few, 12, caches)
    laid_out = np.where(np.arange(12)[:, None] % 3 == 0, np.nan, values)
    np.testing.assert_array_equal(read.values["llmcheck_hidden_all"], laid_out)
    assert read.seconds["llmcheck_hidden_all"] == 3.0  # of 8 rows 2, of 12 rows 3
    # Asked for on every row, what is there does not do.
    whole = {"llmcheck_hidden_all": np.arange(12)}
    assert unread(whole, caches, 12)["llmcheck_hidden_all"] == list(range(12))


@pytest.mark.parametrize(
    ("changed", "gone"), [("answers", set(NAMES)), ("samples", {"p_true"})]
)
def test_drawn_answers_matter_to_what_reads_them_alone_and_others_to_all(changed, gone):
    before = reading_keys("closed_book", IDENTITIES, NAMES)
    after = reading_keys("closed_book", IDENTITIES | {changed: "9"}, NAMES)
    assert {name for name in NAMES if before[name] != after[name]} == gone


def test_fewer_samples_than_another_row_leave_nan_behind():
    rows = [np.ones((2, 3)), np.full((1, 3), 2.0), np.ones((0, 3))]
    stacked = readings._stack(rows)
    assert stacked.shape == (3, 2, 3)
    np.testing.assert_array_equal(np.isnan(stacked[..., 0]).sum(axis=1), [0, 1, 2])
    np.testing.assert_array_equal(readings._stack(list(np.arange(3.0))), [0, 1, 2])
