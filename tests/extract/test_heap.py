import subprocess
import sys

import pytest

from extract.backbone.loading import keep_freed_memory

# Takes, fills and frees 48 MiB five times; prints the pages that the system gave for
# the last four. Not by NumPy, which asks for huge pages.
CHURN = """
import resource, sys
from extract.backbone.loading import keep_freed_memory

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


def pages_of(mode):
    done = subprocess.run(
        [sys.executable, "-c", CHURN, mode], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to")
def test_freed_memory_is_used_again_and_is_not_without_the_call():
    n_pages = 4 * (48 << 20) // 4096
    assert pages_of("leave") > n_pages // 16  # a sixteenth, where pages are larger
    assert pages_of("keep") < n_pages // 64


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_a_user_who_set_the_allocator_keeps_that_setting(name):
    assert keep_freed_memory({name: "1"}) is False
