"""To what the factors of float32 products are rounded: a setting of the process.

Logits of bfloat16 models are multiplied under such a setting on a CPU, a few
milliseconds at a time. Another thread's float32 products would be rounded meanwhile.
Those of this package stand inside `exact_products`, and no thread of it changes the
setting then. Of others' threads nothing is known: whoever multiplies float32 numbers
beside a bfloat16 model says `torch.set_float32_matmul_precision("highest")`, which is
left as it is, and its logits take longer.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from beatrice.extract.forks import ForkLock

_SETTING = ForkLock()
# How many blocks of `exact_products` each thread is inside of.
_EXACT: collections.Counter[int] = collections.Counter()
_UNCOMPILED = contextlib.ExitStack()  # entered while some thread is inside


def check_default_dtype() -> None:
    """Check that Torch's default type is the one that sums are kept in."""
    if (default := torch.get_default_dtype()) != torch.float32:
        raise ValueError(
            f"Torch's default type is {str(default).removeprefix('torch.')}, in which "
            "sums would be kept; expected float32: call "
            "torch.set_default_dtype(torch.float32) when your weights are loaded"
        )


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Let nothing round this thread's float32 products: no other thread, no autocast.

    What has no device of its own is on the CPU, whatever Torch's default device is.
    What is compiled runs as it is written meanwhile, in the whole process: of compiled
    layers hooks would see nothing, or be compiled too, which takes minutes.
    """
    check_default_dtype()
    thread = threading.get_ident()
    with _SETTING:
        if not _EXACT:
            _UNCOMPILED.enter_context(torch.compiler.set_stance("force_eager"))
        _EXACT[thread] += 1
    try:
        with contextlib.ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
                stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        with _SETTING:
            _EXACT[thread] -= 1
            if not _EXACT[thread]:
                del _EXACT[thread]
            if not _EXACT:
                _UNCOMPILED.close()


@contextlib.contextmanager
def products_of_bfloat16() -> Iterator[None]:
    """Multiply bfloat16 numbers that are stored as float32 by a CPU's units for them.

    The products are exact and summed in float32, several times faster (AMX); a
    processor without such units multiplies as before, and so does this thread while
    another has exact products, or where the process asks for the highest precision.
    One thread at a time has the setting: the second would restore the first one's for
    good.
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
    """Return what this process rounds float32 factors to on a device: "none", "tf32".

    Torch's `get_float32_matmul_precision` fails where somebody has chosen that for one
    kind of device, as another thread does in `products_of_bfloat16`.
    """
    backends: Any = torch.backends
    backend = backends.cuda if device.type == "cuda" else backends.mkldnn
    with _SETTING:
        return backend.matmul.fp32_precision


def rounding_of(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return to which type the factors of a device's products are rounded.

    For TF32, which keeps ten bits of a float32, stands float16, which has as many.
    """
    if dtype != torch.float32:
        return dtype
    allowed = {"tf32": torch.float16, "bf16": torch.bfloat16}
    return allowed.get(float32_precision(device), torch.float32)
