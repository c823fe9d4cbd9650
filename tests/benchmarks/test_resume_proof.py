"""Extraction that is killed and resumed, and whether a difference would be seen."""

import shutil

import pytest

from benchmarks.resume_proof import ResumeConfig, compare, prove
from extract.keeping import Kept


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept", [Kept(), Kept(dtype="int8", hidden_spans="answer", hidden_layers=(2, 5))]
)
def test_killed_extractions_end_with_the_bytes_of_one_that_was_not(tmp_path, kept):
    config = ResumeConfig(n_examples=400, n_kills=3, preset="smoke", kept=kept)
    found = prove(tmp_path, config, lambda done, total: None)
    assert found.n_kills == 3
    assert found.n_before[-1] < found.n_ranges
    assert found.differing == ()
