"""What is remembered from process to process: nothing that could be another now."""

import os
import shutil
from pathlib import Path

import pytest

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.run.files import sha256_file
from beatrice.extract.run.remembered import remembered, sha256_of_model


@pytest.fixture(autouse=True)
def place(tmp_path):
    before = os.environ["BEATRICE_REMEMBERED"]
    os.environ["BEATRICE_REMEMBERED"] = str(tmp_path / "remembered")
    yield tmp_path / "remembered"
    os.environ["BEATRICE_REMEMBERED"] = before


def test_what_was_found_is_found_again_under_its_key_alone(place):
    found = iter(range(9))

    def find():
        return next(found)

    assert remembered("check", {"a": 1}, find) == 0
    assert remembered("check", {"a": 1}, find) == 0
    assert remembered("check", {"a": 2}, find) == 1
    assert remembered("other", {"a": 1}, find) == 2
    for path in place.iterdir():  # whoever edits one has it found again
        path.write_text(path.read_text().replace('"value": 0', '"value": 7'))
    assert remembered("check", {"a": 1}, find) == 3


def test_an_error_or_none_is_not_remembered():
    def fail():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            remembered("check", {}, fail)
        assert remembered("check", {}, lambda: None) is None
    assert remembered("check", {}, lambda: 5) == 5


def test_the_sum_of_a_models_file_is_remembered_until_the_file_changes(place, tmp_path):
    weights = WEIGHTS / "model.safetensors"
    assert sha256_of_model(weights) == sha256_file(weights)
    assert len(list(place.iterdir())) == 1  # nobody has changed it for long
    path = Path(shutil.copy(weights, tmp_path))
    old = path.stat().st_mtime_ns - 10**12
    os.utime(path, ns=(old, old))  # which does not set the time of the change
    before = sha256_of_model(path)
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(old, old))
    assert before != sha256_of_model(path)
    assert len(list(place.iterdir())) == 1  # it may change again within a tick
