import gc
import os
import shutil
import sys
from pathlib import Path

import filelock
import pytest

from tests.process import ENVIRON, ROOT

MOST_COMPILED_BYTES = 2**31
MOST_MAPPINGS = 10_000  # of memory
for name, value in ENVIRON.items():  # before JAX or Torch start
    os.environ.setdefault(name, value)
# All test files, workers and child processes share what they compile, also with the
# next session. Nothing is written to the user's own cache.
COMPILED = ROOT / ".pytest_cache" / "compiled"
os.environ.setdefault("BEATRICE_REMEMBERED", str(ROOT / ".pytest_cache" / "remembered"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))


def pytest_configure(config):
    is_first = not hasattr(config, "workerinput")
    if is_first and COMPILED.exists():
        sizes = (file.stat().st_size for file in COMPILED.rglob("*"))
        if sum(sizes) > MOST_COMPILED_BYTES:
            shutil.rmtree(COMPILED)
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def clear_compiled_code():
    """Drop what is compiled before it is too much, and freeze what imports have loaded.

    A process that keeps everything it compiles reaches six gigabytes and the number of
    memory mappings that Linux allows (65,530), and then the compiler crashes. Scanning
    two million objects of libraries takes the garbage collector half a second.
    """
    gc.collect()
    gc.freeze()
    yield
    import jax

    maps = Path("/proc/self/maps")  # on Linux
    if not maps.exists() or len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """Return a function that makes a folder once for all workers of a session.

    A test that changes its contents works on a copy.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def folder(name, make):
        path, done = base / name, base / f"{name}.done"
        with filelock.FileLock(base / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)  # left by a failed worker
                make(path)
                done.touch()
        return path

    return folder


@pytest.fixture
def threads_as_before():
    """Restore Torch's number of threads after a benchmark has changed it."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smoke_run(shared_folder):
    """A finished run of the smallest preset, both settings, as `demo` leaves it."""
    from tests.extract.small_run import beatrice

    return shared_folder(
        "smoke", lambda path: beatrice("demo", path, "--preset", "smoke")
    )


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """A user's current folder; Python's path, to which plugs add, is restored."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
