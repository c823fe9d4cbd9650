"""Workers that answer, rewrite, judge or sample together write what one would."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beatrice.extract.backbone.names import torch_device
from beatrice.extract.generate.answers import answer_stage, open_local
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import run_workers
from beatrice.extract.run.stages import run_stage
from beatrice.extract.signals.sequence import first_read_token
from tests.extract.signals.test_written import SMALL_BATCHES
from tests.extract.small_run import beatrice, make_run, questions
from tests.process import run_line

# With these options the work of a verb takes several batches.
STAGES = {
    "answer": "",
    "rewrite": "--model embedded --max-new-tokens 8 --set batch_tokens=400",
    "label": "--judge embedded --set vote=majority --set batch_tokens=2000",
    "sample": "--n-samples 3 --set batch_tokens=300",
}
WRITTEN = {
    "answer": ("answers/answers.jsonl", "answers/backend.json"),
    "rewrite": ("rewrites.jsonl", "replies/rewrite.json"),
    "label": ("labels.jsonl", "replies/judge.json"),
    "sample": ("samples/samples.jsonl", "samples/config.json"),
}


def do(verb, run, rank=0, world_size=1, *, by="torchrun", options=(), code=0):
    line, environ = [verb, run, *STAGES[verb].split(), *options], {}
    if by == "torchrun":
        environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    else:
        line += ["--shard", f"{rank}/{world_size}"]
    return beatrice(*line, code=code, **environ)


def written(verb, run):
    return {name: (run / name).read_bytes() for name in WRITTEN[verb]}


def name_of_parts(verb):
    return "judge" if verb == "label" else verb


def texts(verb, run):
    """Sorted replies without their seconds; `answer` has none."""
    path = run / "replies" / f"{name_of_parts(verb)}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else ()
    return sorted(line[: line.index(', "seconds"')] for line in lines)


def parts(verb, run):
    return sorted((run / "parts" / name_of_parts(verb)).glob("*.jsonl"))


def n_lines(paths):
    return sum(path.read_bytes().count(b"\n") for path in paths)


def cut(file):
    """Cut a worker's file to two thirds, as if left by another killed process."""
    content = file.read_bytes()
    killed = file.with_name("0-of-2@elsewhere.1.jsonl")
    killed.write_bytes(content[: len(content) * 2 // 3])
    file.unlink()
    return killed


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run without answers, and a smaller one with answers."""
    folder = tmp_path_factory.mktemp("begun")
    for name, examples in (
        ("asked", questions(n_train=10, n_evaluation=5)),
        ("answered", questions(2, 1, 1)[:4]),
    ):
        bare = [msgspec.structs.replace(e, rewritten=()) for e in examples]
        make_run(folder / name, bare, answer=SMALL_BATCHES)
    beatrice("answer", folder / "answered")
    return {v: folder / ("asked" if v == "answer" else "answered") for v in STAGES}


@pytest.fixture(scope="module", params=list(STAGES))
def verb(request):
    return request.param


@pytest.fixture(scope="module")
def alone(begun, verb, tmp_path_factory):
    """A run done by one process."""
    path = shutil.copytree(begun[verb], tmp_path_factory.mktemp("alone") / "run")
    do(verb, path)
    return path


@pytest.fixture
def run(begun, verb, tmp_path):
    return shutil.copytree(begun[verb], tmp_path / "run")


@pytest.fixture
def run_path(begun, tmp_path):
    return shutil.copytree(begun["answer"], tmp_path / "asked")


class Shares(Progress):
    """Keep the shares of the work that were reported as done."""

    def __init__(self):
        self.shares = []

    @contextlib.contextmanager
    def stage(self, name):
        yield lambda done, total: self.shares.append(done / total)


def test_progress_counts_tokens_since_the_longest_prompts_come_first(run_path):
    run, progress = RunDir(run_path), Shares()
    run_stage(answer_stage(open_local), run, progress)
    n_new = SMALL_BATCHES.generation.max_new_tokens
    lines = (run_path / WRITTEN["answer"][0]).read_text().splitlines()
    n_tokens = [
        len(row["prompt_ids"]) - first_read_token(row["context_span"][0]) + n_new
        for row in map(json.loads, lines)
    ]
    reached = np.cumsum(n_tokens) / np.sum(n_tokens)
    shares = progress.shares
    assert len(shares) > 3 and shares[0] == 0 and np.isin(shares[1:], reached).all()
    assert shares[1] > 1.1 * (np.argmax(reached == shares[1]) + 1) / len(reached)


@pytest.mark.parametrize("by", ["torchrun", "--shard"])
def test_the_last_worker_writes_what_one_process_writes(verb, run, alone, by):
    kind = "answers" if verb == "answer" else "texts"
    for rank in (2, 0):
        notes = do(verb, run, rank, 3, by=by).stderr
        assert f"{kind} of other workers are missing" in notes
        assert "the same command in one process" in notes
        assert not (run / WRITTEN[verb][0]).exists()
        assert not RunDir(run).stage_done(verb)
    assert 0 < n_lines(parts(verb, run))
    do(verb, run, 1, 3, by=by)
    assert written(verb, run) == written(verb, alone)
    assert texts(verb, run) == texts(verb, alone)
    assert not parts(verb, run)
    assert RunDir(run).stage_done(verb)
    assert "already done" in do(verb, run, 1, 3, by=by).stderr
    assert "already done" in do(verb, run).stderr


def test_what_a_killed_worker_wrote_is_continued(verb, run, alone):
    do(verb, run, 0, 2)
    (file,) = parts(verb, run)
    n_whole = n_lines([file])
    n_left = n_lines([cut(file)])
    if verb == "answer":  # by the same commands
        do(verb, run, 0, 2)
        assert 0 < n_lines(parts(verb, run)) - n_left < n_whole
        do(verb, run, 1, 2)
    elif verb != "label":  # by one process
        output, n_texts = do(verb, run).stderr, len(texts(verb, alone))
        assert f"{n_texts - n_left} texts generated, {n_left}" in output
    else:  # by another number of workers
        for rank in (2, 0, 1):
            do(verb, run, rank, 3)
    assert written(verb, run) == written(verb, alone)
    assert texts(verb, run) == texts(verb, alone)


def test_a_dry_run_counts_what_workers_have_left_and_writes_nothing(verb, run):
    def n_requests(*worker):
        lines = do(verb, run, *worker, options=["--dry-run"]).stdout.splitlines()
        (line,) = (line for line in lines if "requests" in line)
        return int(line.split()[-1])

    before = n_requests(0, 1)
    do(verb, run, 1, 2)
    (file,) = parts(verb, run)
    assert n_requests(0, 1) == n_requests(0, 2) == before - n_lines([file])
    assert parts(verb, run) == [file]


def test_answers_to_other_prompts_are_set_aside(run_path):
    do("answer", run_path, 0, 2)
    (file,) = parts("answer", run_path)
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    rows[0]["prompt_ids"][0] += 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    do("answer", run_path, 1, 2)
    assert not (run_path / "answers" / "answers.jsonl").exists()
    assert "no longer asked" in do("answer", run_path).stderr


SERVED = ("--server", "http://x/v1")


@pytest.mark.parametrize(
    ("line", "by"),
    [
        *((("answer", *SERVED), by) for by in ("torchrun", "--shard")),
        (("sample", *SERVED), "torchrun"),
        (("rewrite", "--model", "m", *SERVED), "--shard"),
        (("label", "--judge", "m", *SERVED), "torchrun"),
        (("label",), "--shard"),
        (("label", "--judge", "embedded", "--audit"), "torchrun"),
        *(((v,), "torchrun") for v in ("calibrate", "report", "doctor", "demo")),
        *(((v,), "torchrun") for v in ("sweep", "select")),
    ],
)
def test_work_that_cannot_be_shared_is_refused_to_several_processes(run_path, line, by):
    verb, *options = line
    environ = {"RANK": "0", "WORLD_SIZE": "2"} if by == "torchrun" else {}
    shard = () if by == "torchrun" else ("--shard", "0/2")
    output = beatrice(verb, run_path, *options, *shard, code=2, **environ).stderr
    assert "runs in one process, but 2 were launched" in " ".join(output.split())


def test_only_the_device_cuda_becomes_a_gpu_of_each_process():
    environ = {"LOCAL_RANK": "3"}
    devices = ("cuda", 8), ("cuda", 1), ("cuda", 0), ("cuda:5", 8), ("cpu", 0)
    names = [torch_device(device, n_visible, environ) for device, n_visible in devices]
    assert names == ["cuda:3", "cuda:0", "cuda:0", "cuda:5", "cpu"]


@pytest.mark.slow
def test_torchrun_starts_workers_that_answer_together(run_path, begun, tmp_path):
    alone = shutil.copytree(begun["answer"], tmp_path / "alone")
    do("answer", alone)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "beatrice", "answer", str(run_path)]
    run_line(*command)
    assert written("answer", run_path) == written("answer", alone)


@pytest.mark.slow
def test_workers_of_one_command_answer_together_and_only_the_first_shows_it(
    run_path, begun, tmp_path, capfd
):
    alone = shutil.copytree(begun["answer"], tmp_path / "alone")
    do("answer", alone)
    assert run_workers(["answer", str(run_path)], 2) == 0
    assert written("answer", run_path) == written("answer", alone)
    shown = capfd.readouterr().err
    assert "answer 0/2" in shown and "answer 1/2" not in shown


def test_a_worker_that_fails_ends_the_others_and_says_why(tmp_path, capfd):
    assert run_workers(["answer", str(tmp_path / "nowhere")], 2) == 1
    assert "nowhere" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="not Linux")
def test_workers_end_with_the_process_that_started_them(run_path):
    code = "import sys; from beatrice.extract.run.process import run_workers"
    code += "; run_workers(['answer', sys.argv[1]], 2)"
    parent = subprocess.Popen([sys.executable, "-c", code, str(run_path)])
    while len(workers := processes_of(run_path) - {parent.pid}) < 2:
        assert parent.poll() is None
    parent.kill()
    parent.wait()
    until = time.monotonic() + 30
    while workers & processes_of(run_path):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert not (run_path / "answers" / "answers.jsonl").exists()
    do("answer", run_path)


def processes_of(path):
    """Numbers of the processes whose command line names a path."""
    lines = Path("/proc").glob("[0-9]*/cmdline")
    numbers = set()
    for line in lines:
        with contextlib.suppress(OSError):
            if os.fsencode(path) in line.read_bytes():
                numbers.add(int(line.parent.name))
    return numbers
