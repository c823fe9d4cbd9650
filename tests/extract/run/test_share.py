"""Which share of the work this process has, and what belongs to it."""

import sys

import pytest

from beatrice.extract.backbone.names import torch_device
from beatrice.extract.run.process import (
    Share,
    find_share,
    gpu_of_process,
    keep_freed_memory,
    return_freed_memory,
)
from tests.process import run_python

SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
MPIRUN |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPIRUN_SAYS = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
GIVEN_BY = {
    "nobody": ({}, None, (0, 1), ""),
    "torchrun": (TORCHRUN, None, (3, 8), "RANK=3 WORLD_SIZE=8"),
    "srun": (SRUN, None, (2, 4), "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4"),
    "torchrun under srun": (SRUN | TORCHRUN, None, (3, 8), "RANK=3 WORLD_SIZE=8"),
    "mpirun": (MPIRUN, None, (1, 2), MPIRUN_SAYS),
    "mpirun in a Slurm job": (SRUN | MPIRUN, None, (1, 2), MPIRUN_SAYS),
    "MPICH's mpirun": (PMI, None, (3, 4), "PMI_RANK=3 PMI_SIZE=4"),
    "MPICH's by Slurm": (SRUN | PMI, None, (3, 4), "PMI_RANK=3 PMI_SIZE=4"),
    "a shell by Slurm and PMI": (
        SRUN | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        None,
        (2, 4),
        "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4",
    ),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, (0, 1), ""),
    "an option": ({}, "2/3", (2, 3), "--shard 2/3"),
    "an option, alone": ({}, "0/1", (0, 1), "--shard 0/1"),
    "an option before a launcher": (TORCHRUN, "2/3", (2, 3), "--shard 2/3"),
}


@pytest.mark.parametrize(
    ("environ", "shard", "expected", "source"), GIVEN_BY.values(), ids=GIVEN_BY
)
def test_a_launcher_or_an_option_gives_a_worker_its_share(
    environ, shard, expected, source
):
    share = find_share(shard, environ)
    assert share == Share(*expected) and share.source == source


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is set without WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set without RANK; set both, or neither"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "expected a whole number, found 'x'"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK= WORLD_SIZE=2: expected a whole numb"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "expected a whole number, found '-2'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 WORLD_SIZE=4: rank 4 of 4 workers"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0 workers"),
        (SRUN | {"SLURM_PROCID": "9"}, "rank 9 of 4 workers.*without gaps"),
        ("4/4", "--shard 4/4: rank 4 of 4 workers; ranks are 0 to workers - 1"),
        ("0/0", "--shard 0/0: rank 0 of 0 workers"),
        ("x/2", "--shard x/2: expected a whole number, found 'x'"),
        ("1/", "--shard 1/: expected a whole number, found ''"),
        ("-1/2", "expected a whole number, found '-1'"),
        ("1/2/3", "expected a whole number, found '2/3'"),
        ("3", "--shard 3: expected i/n, such as 0/4 for the first of 4"),
        ("", "expected i/n"),
    ],
)
def test_incomplete_launcher_variables_and_wrong_numbers_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        find_share(given, {}) if isinstance(given, str) else find_share(environ=given)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),  # a single process may use every GPU
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (TORCHRUN, 1),
        (SRUN, 1),
        (SRUN | PMI, 3),
        (SRUN | {"LOCAL_RANK": "0"}, 0),  # torchrun under srun
        (SRUN | {"CUDA_VISIBLE_DEVICES": "3"}, 0),  # Slurm shows each worker its own
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1),
        (TORCHRUN | {"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1),
    ],
)
def test_a_launchers_workers_have_a_gpu_each(environ, expected, tmp_path):
    assert gpu_of_process(environ, tmp_path / "no driver") == expected


@pytest.mark.parametrize("n_cards", [1, 2, 4])
def test_jax_and_torch_assign_gpus_alike_for_any_number_of_gpus(n_cards, tmp_path):
    for card in range(n_cards):
        (tmp_path / f"0000:0{card}:00.0").mkdir()
    for number in range(5):
        environ = {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": str(number)}
        gpu = gpu_of_process(environ, tmp_path)
        assert torch_device("cuda", n_cards, environ) == f"cuda:{gpu}"


def test_a_local_rank_that_is_not_a_number_is_named():
    with pytest.raises(ValueError, match="LOCAL_RANK: expected a whole number"):
        gpu_of_process(TORCHRUN | {"LOCAL_RANK": "first"})


@pytest.mark.parametrize("cost", [None, lambda item: item])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_are_disjoint_cover_everything_and_keep_the_order(world_size, cost):
    items = [9, 1, 8, 2, 7]
    shares = [Share(rank, world_size).mine(items, cost) for rank in range(world_size)]
    assert sorted(sum(shares, [])) == sorted(items)
    for share in shares:
        assert [items.index(item) for item in share] == sorted(map(items.index, share))


def test_shares_by_cost_are_about_equally_expensive_and_by_count_are_not():
    costs = {"a": 100, "b": 1, "c": 99, "d": 2, "e": 1}
    assert Share(0, 2).mine(costs, costs.get) == ["a", "b", "e"]
    assert Share(1, 2).mine(costs, costs.get) == ["c", "d"]
    assert Share(1, 2).mine(costs) == ["b", "d"]  # control: every second item


# Allocates, fills and frees 48 MiB five times; prints the page faults of the last
# four. Without NumPy, which asks for huge pages.
CHURN = """
import resource, sys
from beatrice.extract.run.process import keep_freed_memory

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    assert keep_freed_memory({})
b"x" * (48 << 20)
before = pages()
for _ in range(4):
    b"x" * (48 << 20)
print(pages() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to")
def test_freed_memory_is_reused_only_after_the_call():
    n_pages = 4 * (48 << 20) // 4096  # a sixteenth if pages have 64 KiB
    assert int(run_python(CHURN, "leave").stdout) > n_pages // 16
    assert int(run_python(CHURN, "keep").stdout) < n_pages // 64


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to")
@pytest.mark.parametrize("most", [64, 32, 16])  # MiB that this glibc accepts
def test_an_old_glibc_gets_the_limit_that_it_accepts_or_none(most):
    limits = {}

    def mallopt(name, value):
        is_taken = name != -3 or value <= most << 20
        limits.update({name: value} if is_taken else {})
        return int(is_taken)

    assert keep_freed_memory({}, mallopt) == (most >= 32)
    assert limits == ({-3: most << 20, -1: 512 << 20} if most >= 32 else {})


# Frees a block of 24 MiB, by which glibc learns to keep such blocks, then frees one of
# 16 MiB below one in use; prints how much of it is still resident.
LEARN = """
import sys
from beatrice.extract.run.process import resident_bytes, return_freed_memory

if sys.argv[1] == "return":
    assert return_freed_memory({})
b"x" * (24 << 20)
before = resident_bytes()
block, above = b"x" * (16 << 20), b"x" * 9999
del block
print(resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to")
def test_freed_blocks_are_returned_to_the_system_only_after_the_call():
    assert int(run_python(LEARN, "leave").stdout) > 12 << 20
    assert int(run_python(LEARN, "return").stdout) < 4 << 20


@pytest.mark.parametrize("tell", [keep_freed_memory, return_freed_memory])
def test_a_users_own_settings_of_the_allocator_are_kept(tell):
    names = ("TRIM_THRESHOLD_", "MMAP_THRESHOLD_", "ARENA_MAX")
    for name in (*(f"MALLOC_{name}" for name in names), "GLIBC_TUNABLES"):
        assert tell({name: "1"}) is False
