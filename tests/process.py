"""Run the command line as a user calls it, and Python, in separate processes."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from beatrice.extract.run.process import n_cores
from beatrice.jaxprobe.config import XLA_FLAGS, old_emitter

ROOT = Path(__file__).parent.parent
BEATRICE = (sys.executable, "-m", "beatrice")
# No test needs more than the two cores of the smallest machine, and most of a JAX
# test's time is compilation, which need not optimise code that runs for milliseconds.
ENVIRON = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # The flags of the smallest preset, which halve the time of compilation.
    "XLA_FLAGS": " ".join(
        [XLA_FLAGS["smoke"], *(f"--{name}=false" for name in old_emitter())]
    ),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # Like `filterwarnings` in pyproject.toml, for processes that a test starts.
    "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
    "HF_HUB_OFFLINE": "1",
    # Two workers whose threads wait for each other on two cores take twice as long; and
    # a verb asks for two threads, which wait by spinning unless told to sleep.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


@contextlib.contextmanager
def little_room():
    """Let no file grow beyond 4 KiB, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        yield
    finally:  # before pytest writes its own line
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_line(*words, code=0, **environ) -> subprocess.CompletedProcess[str]:
    """Run a line, and return what it printed; it must end with this code."""
    done = subprocess.run(
        list(map(str, words)),
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done


def call(*words, **options) -> subprocess.CompletedProcess[str]:
    """Run `beatrice` with some words, see `run_line`."""
    return run_line(*BEATRICE, *words, **options)


def run_python(program, *words, **options) -> subprocess.CompletedProcess[str]:
    """Run a Python program, see `run_line`."""
    return run_line(sys.executable, "-c", program, *words, **options)


def unshare(*words, **options) -> subprocess.CompletedProcess[str]:
    """Run a line with its own users or disks; skip the test if that is forbidden."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine lets nobody unshare users and disks")
    return run_line("unshare", *words, **options)


def on_disk(options, folder, program, code=0) -> subprocess.CompletedProcess[str]:
    """Run a Python program with a small disk, mounted with `options`, as a folder."""
    mount = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    line = (sys.executable, "-c", program, folder)
    return unshare("-rm", "sh", "-c", mount, folder, *line, code=code)


def loaded_by(program) -> set[str]:
    """Return the names of the modules that a program has loaded at its end."""
    done = run_python(f"{program}\nimport sys\nprint(*sys.modules)")
    return set(done.stdout.split())


def forked(work) -> int:
    """Do some work in a forked process; return its exit code, 0 if it succeeded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # JAX's
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(60)  # a child that waits ends
    with contextlib.suppress(Exception):
        work()
        os._exit(0)
    os._exit(1)


@contextlib.contextmanager
def interrupted_once():
    """Yield a function that interrupts the block when another thread first calls it.

    After that each core may have made one call, but none makes another.
    """
    calls, main = [], threading.main_thread()

    def interrupt(*_):
        if threading.current_thread() is not main:
            calls.append(None)
            if len(calls) == 1:
                signal.pthread_kill(main.ident, signal.SIGINT)
            time.sleep(0.1)  # by then the main thread has been interrupted

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores
    try:
        with pytest.raises(KeyboardInterrupt):
            yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    assert 1 <= len(calls) <= n_cores()


def interrupt_where(is_due, work):
    """Send Ctrl-C when Python first enters code that is due in `work`; it must end it.

    It may come later, when changes have been undone.
    """

    def trace(frame, event, arg):
        if not sent.is_set() and is_due(frame.f_code):
            sent.set()
            signal.raise_signal(signal.SIGINT)

    sent, tracer = threading.Event(), sys.gettrace()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores
    try:
        with pytest.raises(KeyboardInterrupt):
            sys.settrace(trace)
            work()
            sys.settrace(tracer)
            assert sent.is_set()
            time.sleep(30)
    finally:
        sys.settrace(tracer)
        signal.signal(signal.SIGINT, before)


def start(*words, **environ) -> subprocess.Popen[str]:
    """Start a line in a session of its own, so that all of it can be killed."""
    return subprocess.Popen(
        list(map(str, words)),
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process) -> str:
    """Wait for a started process, which must succeed; return its stderr."""
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return errors


def kill(process) -> bool:
    """Kill a process with its children; return whether it was still running."""
    is_running = process.poll() is None
    if is_running:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return is_running
