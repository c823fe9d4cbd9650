"""Who this worker is, as launchers say it."""

import pytest

from extract.run.workers import find_worker, local_rank, rank_and_world_size

ARRAY = {
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "8",
    "SLURM_ARRAY_TASK_MIN": "0",
}
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, (0, 1), id="nobody"),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "0"}, (3, 8), id="torchrun"
        ),
        pytest.param(
            {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4), id="srun"
        ),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1), id="a batch script"
        ),
        pytest.param(ARRAY, (3, 8), id="an array"),
        pytest.param(ARRAY | {"SLURM_PROCID": "0"}, (3, 8), id="an array's script"),
        pytest.param(
            {**ARRAY, "SLURM_ARRAY_TASK_MIN": "2"}, (1, 8), id="an array from 2"
        ),
        pytest.param(
            ARRAY | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            (3, 8),
            id="an array with srun of one task",
        ),
        pytest.param(
            ARRAY | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            (7, 16),
            id="an array with srun of two tasks",
        ),
        pytest.param(
            ARRAY | {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            (7, 16),
            id="an array with torchrun",
        ),
        pytest.param(
            ARRAY | {"RANK": "3", "WORLD_SIZE": "8"}, (3, 8), id="an array, by hand"
        ),
        pytest.param(
            DAEMON | {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"},
            (5, 8),
            id="Open MPI under SLURM",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "3"}, (1, 3), id="a job"
        ),
    ],
)
def test_the_launcher_says_who_this_worker_is(environ, expected):
    assert rank_and_world_size(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is set without WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set without RANK; set RANK to this"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "without OMPI_COMM_WORLD_RANK"),
        ({"JOB_COMPLETION_INDEX": "1"}, "without JOB_COMPLETIONS"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', expected a whole number"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is '', expected a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2', expected a whole"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK gives rank 4, WORLD_SIZE gives 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE gives 0 workers"),
        (ARRAY | {"SLURM_ARRAY_TASK_MIN": "m"}, "SLURM_ARRAY_TASK_MIN is 'm'"),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "14"}, "rank 14.*without gaps"),
    ],
)
def test_half_a_launcher_and_a_wrong_number_are_refused_by_name(environ, message):
    with pytest.raises(ValueError, match=message):
        find_worker(environ)


def test_a_worker_names_what_said_so():
    assert (
        find_worker({"RANK": "0", "WORLD_SIZE": "8"}).said_by == "RANK=0 WORLD_SIZE=8"
    )
    assert find_worker({}).said_by == ""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 0),
        ({"SLURM_LOCALID": "3"}, 3),
        (DAEMON | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}, 1),
    ],
)
def test_each_worker_of_a_machine_has_its_own_number(environ, expected):
    assert local_rank(environ) == expected
