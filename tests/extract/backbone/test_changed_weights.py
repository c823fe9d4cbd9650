"""A run whose backbone changes under it, on the command line."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.records import write_lines
from beatrice.extract.run.directory import RunDir
from tests.extract.small_run import beatrice, questions, smoke


@pytest.fixture
def run_dir(tmp_path):
    """An answered run of a few questions, on a backbone of its own."""
    model = tmp_path / "model"
    shutil.copytree(WEIGHTS, model)
    with RunDir.open(tmp_path / "run", smoke(model)) as run:
        run.examples.write_text(write_lines(questions()))
    beatrice("answer", run.path)
    return run.path


def halve_weights(path):
    tensors = load_file(path / "model.safetensors")
    changed = {k: t * 0.5 if "down_proj" in k else t for k, t in tensors.items()}
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})


def test_weights_changed_between_answer_and_extract_are_refused(run_dir):
    model = run_dir.parent / "model"
    answered = json.loads((run_dir / "answers" / "backend.json").read_text())
    halve_weights(model)
    said = beatrice("extract", run_dir, code=1).output
    assert f"answered by revision {answered['revision'][:12]}" in said
    assert str(model) in said and "delete" in said
    assert not (run_dir / "features").exists()
    shutil.copy(WEIGHTS / "model.safetensors", model)
    beatrice("extract", run_dir)


def test_whoever_reads_the_last_range_finishes_the_stage(run_dir):
    # So few answers are one range per setting, which is worker 0's.
    said = beatrice("extract", run_dir, RANK="1", WORLD_SIZE="2").output
    assert "extract 1/2: 2 ranges of other workers are missing" in said
    assert not RunDir(run_dir).stage_done("extract")
    beatrice("extract", run_dir, "--shard", "0/2")
    assert RunDir(run_dir).stage_done("extract")
    assert "already done" in beatrice("extract", run_dir, "--shard", "1/2").output
