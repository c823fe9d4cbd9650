import os
import socket
import subprocess
import sys

import pytest

from jaxprobe.fit.group import coordinator
from tests.process import ROOT


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def explicit(rank, n, port):
    address = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
    return {**address, "RANK": str(rank), "WORLD_SIZE": str(n)}


def torchrun(rank, n, port):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)}
    return {**meeting, **local, "RANK": str(rank), "WORLD_SIZE": str(n)}


def srun(rank, n, port):
    return {
        "SLURM_JOB_ID": str(port),
        "JAX_COORDINATOR_PORT": str(port),  # otherwise it comes from the job's number
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(n),
        "SLURM_STEP_NUM_TASKS": str(n),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def meet(mode, n=3, launcher=explicit):
    """Return how each of some processes that meet ends, and what it says."""
    environ, port = {**os.environ, "PYTHONPATH": str(ROOT)}, free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jaxprobe.fit.group_worker", mode],
            cwd=ROOT,
            env={**environ, **launcher(rank, n, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]
    said = [process.communicate(timeout=240) for process in started]
    return [process.returncode for process in started], said


@pytest.mark.parametrize("launcher", [explicit, torchrun, srun])
def test_all_processes_have_what_each_has(launcher):
    codes, said = meet("fine", launcher=launcher)
    assert codes == [0, 0, 0], said
    for out, _ in said:
        assert out.splitlines()[-1] == "[0, 1, 2] [False, False, True]"


@pytest.mark.parametrize("mode", ["killed", "failed"])
def test_where_one_process_ends_the_others_say_so_and_end(mode):
    codes, said = meet(mode)
    assert codes == [1, -9 if mode == "killed" else 1, 1], said
    # Process 0 keeps the meeting; where another hears of its end first, JAX says so.
    (sentence,) = said[0][1].splitlines()
    assert "process 0 of 3: another one has ended" in sentence
    assert "the same line again" in sentence


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),  # JAX finds it under Slurm and Open MPI
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, "node1:29501"),
        ({"MASTER_ADDR": "node1"}, "node1:29501"),
        (
            {"MASTER_ADDR": "node1", "MASTER_PORT": "5", "JAX_COORDINATOR_PORT": "99"},
            "node1:99",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "MASTER_ADDR": "node1"}, "a:1"),
    ],
)
def test_where_processes_meet_is_what_the_launcher_says(environ, expected):
    assert coordinator(environ) == expected


def test_a_port_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="MASTER_PORT: expected a whole number"):
        coordinator({"MASTER_ADDR": "node1", "MASTER_PORT": "x"})
