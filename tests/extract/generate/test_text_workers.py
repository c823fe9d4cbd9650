"""Workers that reword, judge and sample together write what one process writes."""

import shutil

import msgspec
import pytest

from beatrice.extract.records import write_lines
from beatrice.extract.run.directory import RunDir
from tests.extract.small_run import beatrice, questions, smoke

LINES = {  # each in several batches
    "rewrite": "--model embedded --max-new-tokens 8 --set batch_tokens=400".split(),
    "label": "--judge embedded --vote majority --set batch_tokens=2000".split(),
    "sample": "--n-samples 3 --set batch_tokens=300".split(),
}
ROLES = {"rewrite": "rewrite", "label": "judge", "sample": "sample"}
WRITTEN = {
    "rewrite": ("rewrites.jsonl", "replies/rewrite.json"),
    "label": ("labels.jsonl", "replies/judge.json"),
    "sample": ("samples/samples.jsonl", "samples/config.json"),
}


def do(verb, run, rank=0, world_size=1, options=()):
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return beatrice(verb, run, *LINES[verb], *options, **environ)


def written(verb, run):
    return {name: (run / name).read_bytes() for name in WRITTEN[verb]}


def texts(verb, run):
    """What was written, in any order; without the time it took."""
    lines = (run / "replies" / f"{ROLES[verb]}.jsonl").read_text().splitlines()
    return sorted(line[: line.index(', "seconds"')] for line in lines)


def parts(verb, run):
    return sorted((run / "parts" / ROLES[verb]).glob("*.jsonl"))


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "answered"
    bare = [msgspec.structs.replace(one, rewritten=()) for one in questions(2, 1, 1)][
        :4
    ]
    with RunDir.open(path, smoke()) as run:
        run.examples.write_text(write_lines(bare))
    beatrice("answer", path)
    return path


@pytest.fixture(scope="module", params=list(LINES))
def verb(request):
    return request.param


@pytest.fixture(scope="module")
def alone(answered, verb):
    path = shutil.copytree(answered, answered.with_name(f"{verb}-alone"))
    do(verb, path)
    return path


@pytest.fixture
def run(answered, tmp_path):
    return shutil.copytree(answered, tmp_path / "run")


def test_whoever_comes_last_writes_what_one_process_writes(verb, run, alone):
    for rank in (2, 0):
        said = do(verb, run, rank, 3).stderr
        assert "texts of other workers are missing" in said
        assert not (run / WRITTEN[verb][0]).exists()
        assert not RunDir(run).stage_done(verb)
    do(verb, run, 1, 3)
    assert written(verb, run) == written(verb, alone)
    assert texts(verb, run) == texts(verb, alone)
    assert not parts(verb, run)
    assert RunDir(run).stage_done(verb)
    assert "already done" in do(verb, run, 1, 3).stderr
    assert "already done" in do(verb, run).stderr


def test_a_killed_workers_texts_are_not_asked_for_again(verb, run, alone):
    do(verb, run, 0, 2)
    (file,) = parts(verb, run)
    content = file.read_bytes()
    n_there = content.count(b"\n")
    assert 0 < n_there < len(texts(verb, alone))
    cut = file.with_name("0-of-2@elsewhere.1.jsonl")  # of another process
    cut.write_bytes(content[: len(content) * 2 // 3])  # killed in mid-line
    file.unlink()
    n_kept = cut.read_bytes().count(b"\n")
    said = do(verb, run).stderr
    found = texts(verb, alone)
    assert f"{len(found) - n_kept} texts generated, {n_kept}" in said or verb == "label"
    assert written(verb, run) == written(verb, alone)
    assert texts(verb, run) == found


def test_a_dry_run_counts_what_workers_have_left_and_writes_nothing(verb, run):
    def asked(*worker):
        lines = do(verb, run, *worker, options=["--dry-run"]).stdout.splitlines()
        (line,) = (line for line in lines if "requests" in line)
        return int(line.split()[-1])

    before = asked(0, 1)
    do(verb, run, 1, 2)
    (file,) = parts(verb, run)
    n_there = file.read_bytes().count(b"\n")
    assert asked(0, 1) == asked(0, 2) == before - n_there
    assert parts(verb, run) == [file]
