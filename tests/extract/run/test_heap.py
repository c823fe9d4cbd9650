import sys

import pytest

from beatrice.extract.run.memory import keep_freed_memory, return_freed_memory
from tests.process import run_python

# Takes, fills and frees 48 MiB five times; prints the pages that the system gave for
# the last four. Not by NumPy, which asks for huge pages.
CHURN = """
import resource, sys
from beatrice.extract.run.memory import keep_freed_memory

def churn():
    b"x" * (48 << 20)

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    assert keep_freed_memory({})
churn()
before = pages()
for _ in range(4):
    churn()
print(pages() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to")
def test_freed_memory_is_used_again_and_is_not_without_the_call():
    n_pages = 4 * (48 << 20) // 4096  # a sixteenth of it, where pages are larger
    assert int(run_python(CHURN, "leave").stdout) > n_pages // 16
    assert int(run_python(CHURN, "keep").stdout) < n_pages // 64


# Frees a block of 24 MiB, by which glibc learns to keep such blocks, then leaves one of
# 16 MiB below one that stays; prints how much of it is still resident.
LEARN = """
import ctypes, sys
from beatrice.extract.run.memory import held_bytes, return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def taken(n_bytes):
    block = libc.malloc(n_bytes)
    ctypes.memset(block, 1, n_bytes)
    return block

if sys.argv[1] == "return":
    assert return_freed_memory({})
libc.free(taken(24 << 20))
before = held_bytes()
block, above = taken(16 << 20), taken(4096)
libc.free(block)
print(held_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to")
def test_freed_blocks_are_given_back_and_are_not_without_the_call():
    assert int(run_python(LEARN, "leave").stdout) > 12 << 20
    assert int(run_python(LEARN, "return").stdout) < 4 << 20


@pytest.mark.parametrize("tell", [keep_freed_memory, return_freed_memory])
@pytest.mark.parametrize(
    "name",
    [
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_ARENA_MAX",
        "GLIBC_TUNABLES",
    ],
)
def test_a_user_who_set_the_allocator_keeps_that_setting(name, tell):
    assert tell({name: "1"}) is False
