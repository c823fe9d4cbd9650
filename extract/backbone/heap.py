"""Let the process keep the memory it frees, and use it again.

A forward pass on a CPU frees and takes the same large blocks in every layer. The C
library hands them back to the system at once, which gives them again page by page, each
cleared first (`tests/extract/test_heap.py` counts them).
"""

import ctypes
import os
import sys
from collections.abc import Mapping

# Of <malloc.h>; glibc alone has them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Blocks up to this size are kept; the largest activations of one layer are below it.
_LARGEST_BLOCK = 64 << 20
_MOST_KEPT = 512 << 20


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Keep up to 512 MiB of freed memory, in blocks of at most 64 MiB, from now on.

    For the whole process. Without effect where the C library is not glibc, and where
    the environment says how it allocates (`MALLOC_…_THRESHOLD_`, `GLIBC_TUNABLES`).

    Returns:
      Whether it was done.
    """
    own = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in environ for name in own):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either alone would stop glibc from finding the other by itself.
    done = (
        mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK),
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT),
    )
    return all(done)
