"""Extraction that is killed and resumed, and whether a difference would be seen."""

import dataclasses
import shutil

import numpy as np
import pytest

from benchmarks.speed.resume import ResumeConfig, compare, is_half_written, prove
from extract.signals.stage import EXTRACT_PRESETS
from extract.store.families import Family
from extract.store.spec import StoreSpec
from extract.store.write import create_store, write_range


def test_a_changed_a_missing_and_a_new_file_are_seen(tmp_path):
    for name in ("a", "b/c", "b/d"):
        path = tmp_path / "one" / "features" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = tmp_path / "one", tmp_path / "two"
    (two / "features" / "a.__lock").write_bytes(b"left by a killed writer")
    assert compare(one, two) == (3, 7, ())
    (two / "features" / "a").write_bytes(b"A")
    (two / "features" / "b" / "d").unlink()
    (two / "features" / "e").write_bytes(b"")
    assert compare(one, two) == (4, 7, ("a", "b/d", "e"))


def test_files_of_a_range_without_its_record_are_seen(tmp_path):
    spec = StoreSpec(
        families={"prob": Family(shape=(5,))},
        keys=(("a",), ("b",)),
        lengths=np.array([60, 60]),
        spans=np.zeros((2, 3, 2), np.int64),
        rows_per_shard=64,
        hidden_layers=(),
        fingerprint={},
    )
    assert not is_half_written(tmp_path / "store")  # nothing yet
    store = create_store(tmp_path / "store", spec)
    write_range(store, 0, {"prob": np.zeros((60, 5), np.float32)})
    assert not is_half_written(tmp_path / "store")
    (tmp_path / "store" / store.commit_key(0)).unlink()
    assert is_half_written(tmp_path / "store")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept", [{}, {"dtype": "int8", "hidden_spans": "answer", "hidden_layers": (2, 5)}]
)
def test_killed_extractions_end_with_the_bytes_of_one_that_was_not(tmp_path, kept):
    extract = dataclasses.replace(EXTRACT_PRESETS["smoke"], **kept)
    config = ResumeConfig(n_examples=400, n_kills=3, preset="smoke", extract=extract)
    found = prove(tmp_path, config, lambda done, total: None)
    assert found.n_kills == 3
    assert found.n_before[-1] < found.n_ranges
    assert found.differing == ()
