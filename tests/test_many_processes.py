"""Processes that train together get the same encoders as a single process."""

import dataclasses
import shutil
import time

import jax
import pytest

from beatrice.extract.records import SETTINGS
from beatrice.extract.run.console import Progress
from beatrice.extract.run.contents import settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import Share
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.config import GRID_PRESETS
from beatrice.jaxprobe.stages import TRAIN, grid_config
from beatrice.jaxprobe.train import _caches
from tests.extract.small_run import beatrice
from tests.process import BEATRICE, finish, kill, start
from tests.test_one_setting import examples_of, make_run


def start_share(run, rank, world_size, *options):
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return start(*BEATRICE, "train", run, *options, **environ)


def train_together(run, *options):
    """Train in two processes, which must succeed; return the stderr of each."""
    parts = [start_share(run, rank, 2, *options) for rank in range(2)]
    return [finish(process) for process in parts]


def complete_run(path, case, settings):
    make_run(path, examples_of(case, n_train=64), settings)
    for verb in ("answer", "label", "extract", "sweep"):
        beatrice(verb, path)
    return path


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "untrained"
    return complete_run(path, "closed-book", ("closed_book",))


@pytest.fixture(scope="module")
def trained_by_one(untrained):
    path = shutil.copytree(untrained, untrained.with_name("alone"))
    beatrice("train", path)
    return path


@pytest.fixture
def run(untrained, tmp_path):
    return shutil.copytree(untrained, tmp_path / "run")


def check_same(first, other):
    """Assert that checkpoints are equal bit by bit; a CPU trains members singly."""
    (left, about_left), (right, about_right) = map(checkpoint.restore, (first, other))
    assert about_left == about_right
    assert jax.tree.structure(left) == jax.tree.structure(right)
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in leaves)


def check_same_encoders(run, other):
    for setting in settings_of(RunDir(run)):
        check_same(*(RunDir(path).encoders(setting) for path in (run, other)))


def members(run):
    """Return the files of finished members and when they were written."""
    files = (run / "encoders").glob("*.members/*/*.safetensors")
    return {file: file.stat().st_mtime_ns for file in files}


def test_two_processes_train_the_same_encoders_as_one_bit_by_bit(trained_by_one, run):
    output = train_together(run)
    assert RunDir(run).stage_done("train")
    assert sum("train: done in" in text for text in output) == 1
    assert not members(run)
    check_same_encoders(run, trained_by_one)
    (run / "encoders" / "closed_book.members").mkdir()  # of a killed process
    assert "already done" in beatrice("train", run).stderr
    assert not [*(run / "encoders").glob("*.members")]


@pytest.mark.slow
def test_four_shares_out_of_order_train_the_encoders_of_one(trained_by_one, run):
    for rank in (2, 0, 3, 1):
        output = finish(start(*BEATRICE, "train", run, "--shard", f"{rank}/4"))
        is_last = rank == 1
        assert ("encoders of other workers are missing" in output) != is_last
        assert RunDir(run).stage_done("train") == is_last
    check_same_encoders(run, trained_by_one)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_members_trained_by_killed_processes_are_not_trained_again(
    trained_by_one, run, world_size
):
    processes = [start_share(run, rank, 2) for rank in range(2)]
    while len(members(run)) < 3:
        time.sleep(0.05)
        assert all(process.poll() is None for process in processes)
    for process in processes:
        kill(process)
    there = members(run)
    assert not (run / "encoders" / "closed_book").exists()
    if world_size == 1:
        beatrice("train", run)
    else:
        *others, last = range(world_size)
        for rank in others:
            finish(start_share(run, rank, world_size))
        # If no other member was missing, they are joined in one file by now.
        is_joined = (run / "encoders" / "closed_book").exists()
        waiting = {
            file: when
            for file, when in there.items()
            if not (is_joined and "closed_book.members" in file.parts)
        }
        assert waiting.items() <= members(run).items()
        finish(start_share(run, last, world_size))
    check_same_encoders(run, trained_by_one)


def test_one_process_uses_the_saved_members_of_a_share(run):
    beatrice("train", run, "--shard", "0/2")
    directory = RunDir(run)
    config = grid_config(directory).seeded(directory.seed)
    cache, _ = _caches(directory, config, "closed_book")
    names = [path.stem for path in cache.folder.glob("*.safetensors")]
    for name in names:  # a value that no training gives
        arrays = cache.load(name)
        cache.save(name, arrays | {"info.best_epoch": arrays["info.best_epoch"] - 999})
    beatrice("train", run)
    tree, _ = checkpoint.restore(directory.encoders("closed_book"))
    assert 0 < (tree["info"]["best_epoch"] < 0).sum() == len(names)


def test_rows_that_memory_cannot_hold_are_refused_before_any_is_read(run):
    for chunks in (run / "features" / "closed_book").glob("*/c"):
        shutil.rmtree(chunks)
    message = beatrice("train", run, "--set", "device_memory=99", code=1).stderr
    assert "training would hold" in message


@pytest.mark.slow
def test_the_share_that_finishes_last_finds_no_member_missing(tmp_path):
    path = complete_run(tmp_path / "run", "mixed", SETTINGS)
    # One setting at a time, as on an accelerator.
    config = dataclasses.replace(GRID_PRESETS["smoke"], device_memory=1 << 32)

    def train_share(rank, on_member=lambda done, total: None):
        """Return how many members are missing at the end of a share of two."""
        with RunDir.open(path, share=Share(rank, 2)) as run:
            return TRAIN.work(run, config, on_member, Progress())

    n_missing = []  # at the end of the share that works meanwhile

    def on_member(done, total):
        if done > total / 2 and not n_missing:
            n_missing.append(train_share(1))

    assert train_share(0, on_member) == 0 < n_missing[0]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["streamed", "linear_first"])
def test_two_processes_train_both_settings_in_other_ways_as_one_does(tmp_path, option):
    run = complete_run(tmp_path / "run", "mixed", SETTINGS)
    other = shutil.copytree(run, tmp_path / "other")
    words = "--set", f"{option}=true"
    beatrice("train", other, *words)
    train_together(run, *words)
    check_same_encoders(run, other)
