"""What detectors read is kept by name and part, and read again when it must be."""

import dataclasses

import numpy as np

from benchmarks.baselines import readings
from benchmarks.baselines.catalogue import catalogue
from benchmarks.baselines.detector import identities
from benchmarks.baselines.readings import (
    kept_readings,
    parts_of,
    rows_read,
)
from extract.records import read_records, write_lines
from extract.run.contents import answers_file, samples_file
from extract.run.files import write_text_atomic
from jaxprobe.checkpoint import save_cache
from tests.benchmarks.baselines.drawn import evidence, sample

NAMES = ("llmcheck_hidden", "p_true")


def keep(given, name, values, seconds=2.0, peak_bytes=0):
    """Leave parts on disk as an earlier start would."""
    folder = given.run.path / "readings" / given.rows.setting / name
    key = identities(given, [name])[name]
    for rows in parts_of(len(values)):
        arrays = {"values": values[rows], "seconds": np.float64(seconds)}
        arrays["peak_bytes"] = np.int64(peak_bytes + rows.start)
        arrays["rows"] = np.arange(rows.start, rows.start + len(values[rows]))
        save_cache(folder / f"{rows.start:07d}.safetensors", arrays, key)


def unread(given, wanted):
    """Return by name the rows that would be read now."""
    rows = {name: [] for name in wanted}
    for part in parts_of(len(given.rows.ids)):
        for name, missing in readings._held(given, wanted, part)[1].items():
            rows[name] += missing
    return rows


def test_parts_hold_every_row_once():
    assert [i for part in parts_of(600) for i in range(600)[part]] == list(range(600))
    assert [part.stop - part.start for part in parts_of(600)] == [256, 256, 88]


def test_what_an_earlier_start_read_is_not_read_again(tmp_path):
    given = evidence(tmp_path, [["a"]] * 300)
    states = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    scalars = np.arange(300, dtype=np.float32)
    keep(given, "llmcheck_hidden", states)
    keep(given, "p_true", scalars)
    ticks = []
    # There is no model in this run: reading anything would fail.
    wanted = dict.fromkeys(NAMES, np.arange(300))
    found = kept_readings(given, wanted, lambda: ticks.append(1))
    np.testing.assert_array_equal(found.values["llmcheck_hidden"], states)
    np.testing.assert_array_equal(found.values["p_true"], scalars)
    assert found.seconds == dict.fromkeys(NAMES, 4.0) and len(ticks) == 2
    # The most of the parts, not their sum.
    assert found.peak_bytes == dict.fromkeys(NAMES, 256)
    left = unread(given, wanted)
    assert {name: len(rows) for name, rows in left.items()} == dict.fromkeys(NAMES, 0)
    (given.run.path / "readings/closed_book/p_true/0000256.safetensors").unlink()
    assert unread(given, wanted)["p_true"] == list(range(256, 300))


def test_training_answers_are_read_for_those_that_learn_from_them_alone(tmp_path):
    splits = ["train", "validation", "test"] * 4
    given = evidence(tmp_path, [["a"]] * 12, splits=splits)
    known = catalogue()
    untrained, trained = known["llmcheck_hidden"], known["lookback_lens"]
    wanted = rows_read(given, [untrained, trained])
    evaluated = [row for row in range(12) if row % 3]
    assert wanted["llmcheck_hidden_all"].tolist() == evaluated
    assert wanted["lookback"].tolist() == list(range(12))
    values = np.arange(12, dtype=np.float32)[:, None]
    path = given.run.path / "readings/closed_book/llmcheck_hidden_all"
    key = identities(given, wanted)["llmcheck_hidden_all"]
    kept = {"values": values[evaluated], "rows": np.array(evaluated)}
    cost = {"seconds": np.float64(2.0), "peak_bytes": np.int64(0)}
    save_cache(path / "0000000.safetensors", kept | cost, key)
    few = {"llmcheck_hidden_all": wanted["llmcheck_hidden_all"]}
    found = kept_readings(given, few)
    laid_out = np.where(np.arange(12)[:, None] % 3 == 0, np.nan, values)
    np.testing.assert_array_equal(found.values["llmcheck_hidden_all"], laid_out)
    assert found.seconds["llmcheck_hidden_all"] == 3.0  # of 8 rows 2, of 12 rows 3
    # Asked for on every row, what is there does not do.
    whole = {"llmcheck_hidden_all": np.arange(12)}
    assert unread(given, whole)["llmcheck_hidden_all"] == list(range(12))


def test_other_answers_or_questions_are_read_again_and_other_labels_are_not(tmp_path):
    given = evidence(tmp_path, [["a"], ["b"]])
    before = identities(given, NAMES)
    labels = dataclasses.replace(given.rows, labels=~given.rows.labels)
    assert identities(dataclasses.replace(given, rows=labels), NAMES) == before
    for path in (answers_file(given.run), given.run.examples):
        text = path.read_text()
        path.write_text(text + text.splitlines(keepends=True)[-1])
        after = identities(given, NAMES)
        assert all(after[name] != before[name] for name in NAMES)
        path.write_text(text)
    assert identities(given, NAMES) == before


def test_drawn_answers_matter_to_what_reads_them_alone(tmp_path):
    given = evidence(tmp_path, [["a"], ["b"]])
    before = identities(given, NAMES)
    drawn = list(read_records(samples_file(given.run), type(sample("a"))))
    write_text_atomic(samples_file(given.run), write_lines(drawn[:1]))
    after = identities(given, NAMES)
    assert after["llmcheck_hidden"] == before["llmcheck_hidden"]
    assert after["p_true"] != before["p_true"]


def test_fewer_samples_than_another_row_leave_nan_behind():
    rows = [np.ones((2, 3)), np.full((1, 3), 2.0), np.ones((0, 3))]
    found = readings._stack(rows)
    assert found.shape == (3, 2, 3)
    np.testing.assert_array_equal(np.isnan(found[..., 0]).sum(axis=1), [0, 1, 2])
    np.testing.assert_array_equal(readings._stack(list(np.arange(3.0))), [0, 1, 2])
