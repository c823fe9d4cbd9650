import numpy as np
import pytest

from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.checkpoint import Cache
from tests.records import flip_bit

TREE = {"a": {"b": np.arange(600.0, dtype=np.float32)}, "c": np.ones((2, 3), np.int32)}


def test_a_checkpoint_comes_back_as_it_was_and_leaves_nothing_beside_it(tmp_path):
    checkpoint.save(tmp_path / "x", {"old": np.zeros(2)}, {"version": 0})
    checkpoint.save(tmp_path / "x", TREE, {"version": 1})
    tree, config = checkpoint.restore(tmp_path / "x")
    np.testing.assert_array_equal(tree["a"]["b"], TREE["a"]["b"])
    assert tree["c"].dtype == np.int32 and config == {"version": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_flipped_bit_in_any_file_is_refused(tmp_path):
    checkpoint.save(tmp_path / "x", TREE, {"version": 1})
    files = [p for p in (tmp_path / "x").rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) > 3
    for path in files:
        whole = path.read_bytes()
        flip_bit(path, len(whole) // 2)
        with pytest.raises(ValueError, match="is damaged"):
            checkpoint.restore(tmp_path / "x")
        path.write_bytes(whole)
    checkpoint.restore(tmp_path / "x")


def test_missing_and_added_files_are_refused(tmp_path):
    checkpoint.save(tmp_path / "x", TREE, {})
    (tmp_path / "x" / "extra").write_text("")
    with pytest.raises(ValueError, match="extra is not in checksums.json"):
        checkpoint.restore(tmp_path / "x")
    (tmp_path / "x" / "extra").unlink()
    (tmp_path / "x" / checkpoint.CONFIG).unlink()
    with pytest.raises(ValueError, match="config.json is missing"):
        checkpoint.restore(tmp_path / "x")
    with pytest.raises(ValueError, match="checksums.json is missing; copy the folder"):
        checkpoint.restore(tmp_path / "nowhere")


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "x", TREE, {"version": 1})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "x", TREE, {"version": object()})
    assert checkpoint.restore(tmp_path / "x")[1] == {"version": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_parts_come_back_under_their_key_alone_and_a_damaged_one_is_missing(tmp_path):
    cache = Cache(tmp_path / "parts", "data 1")
    names = ["grid/0-0", "grid/1-0", "linear"]
    cache.save("grid/0-0", {"w": np.arange(6.0).reshape(2, 3), "n": np.int32(4)})
    assert cache.missing(names) == names[1:]
    arrays = cache.load("grid/0-0")
    assert arrays["n"] == 4 and arrays["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert Cache(cache.folder, "data 2").missing(names) == names
    path = cache.path("grid/0-0")
    whole = path.read_bytes()
    for at in (len(whole) // 3, len(whole) - 1):
        flip_bit(path, at)
        assert cache.load("grid/0-0") is None
        path.write_bytes(whole)
    cache.clear()
    assert not list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Cache()
    cache.save("a", {"w": np.zeros(2)})
    cache.clear()
    assert cache.missing(["a"]) == ["a"] and not list(tmp_path.iterdir())
