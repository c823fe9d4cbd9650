"""How the factors of float32 products are rounded, which is a setting of the process.

On a CPU, logits of bfloat16 models are multiplied under such a setting, for a few
milliseconds at a time, which would also round another thread's float32 products. This
package computes its own inside `exact_products`, during which none of its threads
changes the setting. It knows nothing of other threads: call
`torch.set_float32_matmul_precision("highest")` if you multiply float32 numbers next to
a bfloat16 model. That setting is left unchanged, and logits then take longer.
"""

import collections
import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from beatrice.extract.forks import ForkLock

_SETTING = ForkLock()
_LOADING, _DEFAULT_DTYPE = ForkLock(), ForkLock()
# How many nested `exact_products` blocks each thread is in.
_EXACT: collections.Counter[int] = collections.Counter()
# Runs compiled code uncompiled while any thread is in such a block; not empty then, if
# Torch's compiler is loaded. Without it nothing is compiled, and it takes a second.
_UNCOMPILED: list[contextlib.ExitStack] = []
_PROCESS: list[int] = []  # the process that first loaded weights or computed


def _drop_lost_threads() -> None:
    for thread in _EXACT.keys() - {threading.get_ident()}:
        del _EXACT[thread]


os.register_at_fork(after_in_child=_drop_lost_threads)


def check_default_dtype() -> None:
    """Check that Torch's default dtype is float32, in which sums are computed."""
    with _computing():
        default = torch.get_default_dtype()
    if default != torch.float32:
        raise ValueError(
            f"Torch's default dtype is {str(default).removeprefix('torch.')}, in which "
            "sums would be computed; expected float32: call "
            "torch.set_default_dtype(torch.float32) after loading your weights"
        )


@contextlib.contextmanager
def loading_weights(dtype: torch.dtype) -> Iterator[None]:
    """Let one thread at a time load weights, and none compute if they are not float32.

    While Transformers builds a model, the default dtype of the whole process is that of
    the weights, and some functions are replaced. A second thread that loaded at the
    same time would take these for the usual ones, and restore them for good.
    """
    _use_threads_of_this_process()
    with _LOADING, contextlib.ExitStack() as stack:
        if dtype != torch.float32:
            stack.enter_context(_DEFAULT_DTYPE)
            # No other thread begins to compute, and all that do end.
            while _EXACT.keys() - {threading.get_ident()}:
                time.sleep(0.005)
        yield


def _computing() -> contextlib.AbstractContextManager[None]:
    """Wait while another thread loads weights, unless this thread computes already."""
    _use_threads_of_this_process()
    is_inside = threading.get_ident() in _EXACT
    return contextlib.nullcontext() if is_inside else _DEFAULT_DTYPE


def _use_threads_of_this_process() -> None:
    """Limit Torch to one thread in a process forked from one that used Torch here.

    Torch's thread pool does not survive a fork: in its first parallel operation, the
    child would wait for threads that it does not have.
    """
    if not _PROCESS:
        _PROCESS.append(os.getpid())
    if _PROCESS[0] != os.getpid() and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warnings.warn(
            "this process was forked from one that had loaded a model, so Torch uses "
            "one thread here, since its threads do not survive a fork; for more, load "
            "models only in processes that were started by 'spawn'",
            stacklevel=2,
        )


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Keep other threads and autocast from rounding this thread's float32 products.

    Tensors made without a device are on the CPU, whatever Torch's default device is.
    Compiled code runs uncompiled in the whole process meanwhile: hooks would not see
    compiled layers, or would be compiled too, which takes minutes.
    """
    thread = threading.get_ident()
    depth = _EXACT[thread]
    # A fork waits for threads that hold a lock. Without this one, it could wait for a
    # thread that loads weights, that one for this thread, and this one for the fork.
    with ForkLock(), contextlib.ExitStack() as stack:
        stack.callback(_end_products, thread, depth)
        with _computing(), _SETTING:
            check_default_dtype()
            if not _UNCOMPILED and "torch._dynamo" in sys.modules:
                _UNCOMPILED.append(contextlib.ExitStack())
                _UNCOMPILED[0].enter_context(torch.compiler.set_stance("force_eager"))
            _EXACT[thread] = depth + 1
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
            stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def _end_products(thread: int, depth: int) -> None:
    # The count is never raised here: an interrupt may have come before it was, or let a
    # block end after the one around it, when the garbage collector finds it.
    with _SETTING:
        _EXACT[thread] = min(depth, _EXACT[thread])
        if not _EXACT[thread]:
            del _EXACT[thread]
        if not _EXACT and _UNCOMPILED:
            _UNCOMPILED.pop().close()


@contextlib.contextmanager
def products_of_bfloat16() -> Iterator[None]:
    """Multiply bfloat16 numbers that are stored as float32 with a CPU's bfloat16 units.

    The products are exact and summed in float32, several times faster (AMX). Nothing
    changes on a processor without such units, while another thread is inside
    `exact_products`, or if the process requires the highest precision. One thread at a
    time changes the setting: a second would restore the first one's value for good.
    """
    mkldnn: Any = torch.backends.mkldnn
    matmul = mkldnn.matmul
    with _SETTING:
        before = matmul.fp32_precision
        if before != "ieee" and _EXACT.keys() <= {threading.get_ident()}:
            matmul.fp32_precision = "bf16"
            try:
                yield
            finally:
                matmul.fp32_precision = before
            return
    yield


def float32_precision(device: torch.device) -> str:
    """Return the type to which a device rounds float32 factors: "none", "tf32", ….

    Torch's `get_float32_matmul_precision` fails if the setting was changed for only one
    kind of device, as `products_of_bfloat16` does in another thread.
    """
    backends: Any = torch.backends
    backend = backends.cuda if device.type == "cuda" else backends.mkldnn
    with _SETTING:
        return backend.matmul.fp32_precision


def rounding_of(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type to which a device rounds factors; TF32 counts as float16."""
    if dtype != torch.float32:
        return dtype
    # TF32 keeps ten bits of a float32, as many as float16 has.
    allowed = {"tf32": torch.float16, "bf16": torch.bfloat16}
    return allowed.get(float32_precision(device), torch.float32)
