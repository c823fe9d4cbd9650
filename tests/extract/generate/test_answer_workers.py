"""Workers that answer together write what one process writes alone."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from beatrice.extract.backbone.names import own_device
from beatrice.extract.generate.requests import ANSWER_PRESETS, GenerationConfig
from beatrice.extract.records import write_lines
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.share import Share
from tests.extract.small_run import beatrice, questions, smoke

ROOT = Path(__file__).parents[3]


# A few prompts with contexts fill a batch.
BATCHES = dataclasses.replace(
    ANSWER_PRESETS["smoke"],
    generation=GenerationConfig(max_new_tokens=10, tokens_per_batch=600),
)


def make_run(path):
    found = questions(n_train=10, n_evaluation=5)
    with RunDir.open(path, smoke(answer=BATCHES)) as run:
        run.examples.write_text(
            write_lines(msgspec.structs.replace(e, rewritten=()) for e in found)
        )
    return path


def answer(run_dir, rank=0, world_size=1, *, code=0, by="torchrun", verb=("answer",)):
    line, environ = [verb[0], run_dir, *verb[1:]], {}
    if by == "torchrun":
        environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    else:
        line += ["--shard", f"{rank}/{world_size}"]
    return beatrice(*line, code=code, **environ).stderr


def answers(run_dir):
    """Return every file of the answers and its bytes."""
    folder = run_dir / "answers"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("alone") / "run")
    answer(run)
    return answers(run)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def part(run):
    (file,) = (run / "parts" / "answer").iterdir()
    return file


@pytest.mark.parametrize(
    ("by", "ranks"), [("torchrun", (0, 1, 2)), ("--shard", (2, 0, 1))]
)
def test_whoever_comes_last_puts_together_what_one_process_writes(
    run, alone, ranks, by
):
    *others, last = ranks
    for rank in others:
        said = answer(run, rank, 3, by=by)
        assert "answers of other workers are missing" in said
        assert not (run / "answers" / "answers.jsonl").exists()
        assert RunDir(run).stage_record("answer") is None
    assert f"answer {last}/3" in answer(run, last, 3, by=by)
    assert answers(run) == alone
    assert not (run / "parts" / "answer").exists()
    assert RunDir(run).stage_done("answer")
    assert "already done" in answer(run, 1, 3, by=by)
    assert "already done" in answer(run)


def test_a_part_has_only_its_workers_batches(run, alone):
    answer(run, 1, 2)
    rows = part(run).read_bytes().splitlines(keepends=True)
    whole = alone["answers.jsonl"].splitlines(keepends=True)
    assert 0 < len(rows) < len(whole)
    assert set(rows) < set(whole)


@pytest.mark.parametrize("way", ["same line", "one process", "other world size"])
def test_a_killed_workers_part_is_continued(run, alone, way):
    answer(run, 0, 2)
    file = part(run)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])  # a kill in mid-line
    kept = content[: len(content) * 2 // 3].count(b"\n")
    file.rename(file.with_name("0-of-2@elsewhere.1.jsonl"))  # of another process
    if way == "same line":
        answer(run, 0, 2)
        n_again = part_lines(run) - kept
        assert 0 < n_again < content.count(b"\n")
        answer(run, 1, 2)
    elif way == "one process":
        answer(run)
    else:
        for rank in (2, 0, 1):
            answer(run, rank, 3)
    assert answers(run) == alone


def part_lines(run):
    folder = run / "parts" / "answer"
    return sum(p.read_bytes().count(b"\n") for p in folder.glob("*.jsonl"))


def test_two_processes_of_one_rank_do_no_harm(run, alone):
    answer(run, 0, 2)
    file = part(run)
    file.with_name("0-of-2@twice.1.jsonl").write_bytes(file.read_bytes())
    answer(run, 1, 2)
    assert answers(run) == alone


def test_one_process_and_workers_keep_each_other_out(run):
    with RunDir.open(run, smoke(answer=BATCHES), share=Share(0, 2)):
        assert "workers that a launcher started" in answer(run, code=1)
    answer(run)


def test_answers_to_other_prompts_are_set_aside_and_not_taken_in(run, alone):
    answer(run, 0, 2)
    file = part(run)
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    rows[0]["prompt_ids"][0] += 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer(run, 1, 2)
    assert not (run / "answers" / "answers.jsonl").exists()
    assert "no longer asked" in answer(run)
    assert answers(run)["answers.jsonl"] == alone["answers.jsonl"]


SERVED = ("--server", "http://x/v1")


@pytest.mark.parametrize("by", ["torchrun", "--shard"])
@pytest.mark.parametrize(
    "verb",
    [
        ("answer", *SERVED),
        ("sample", *SERVED),
        ("rewrite", "--model", "m", *SERVED),
        ("label", "--judge", "m", *SERVED),
        ("label",),
        ("label", "--judge", "embedded", "--audit"),
    ],
)
def test_what_is_not_shared_says_that_it_is_one_processs_work(run, verb, by):
    said = answer(run, 0, 2, code=2, by=by, verb=verb)
    assert "is one process's work, and 2 were launched" in " ".join(said.split())


@pytest.mark.parametrize(
    "verb", ["calibrate", "report", "doctor", "demo", "sweep", "select"]
)
def test_a_verb_that_nobody_shares_says_so(run, verb):
    said = answer(run, 1, 2, code=2, verb=(verb,))
    assert f"{verb} is one process's work" in " ".join(said.split())


def test_each_process_has_a_gpu_of_its_own():
    assert own_device("cuda", 8, {"LOCAL_RANK": "3"}) == "cuda:3"
    assert own_device("cuda", 1, {"SLURM_LOCALID": "3"}) == "cuda:0"  # shown one only
    assert own_device("cuda", 0, {}) == "cuda:0"
    assert own_device("cuda:5", 8, {"LOCAL_RANK": "3"}) == "cuda:5"
    assert own_device("cpu", 0, {"LOCAL_RANK": "3"}) == "cpu"


@pytest.mark.slow
def test_torchrun_starts_workers_that_answer_together(run, alone):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "beatrice", "answer", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert answers(run) == alone
