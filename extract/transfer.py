"""The way of readings from the device to the host, beside the device's work.

On a GPU a copy goes to pinned memory in a stream of its own, so that it runs while the
next layer, or the next batch, is computed; the host waits once per batch. Elsewhere
there is nothing to wait for.
"""

from collections.abc import Callable

import torch


class HostCopies:
    """Copies of one batch from a device whose copies are finished when they return."""

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values on the host; they may be read after `wait`."""
        return values.cpu()

    def wait(self) -> None:
        """Return when every copy has arrived."""


class CudaCopies(HostCopies):
    """The same from a CUDA device, without stopping whoever feeds it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Begin a batch; `stream` carries copies alone."""
        self._stream = stream
        self._arrived = torch.cuda.Event()

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Queue a copy behind the work that makes the values."""
        # Pinned, or the copy would be a synchronous one; Torch reuses freed blocks.
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(self._stream):
            host.copy_(values, non_blocking=True)
            self._arrived.record()
        # Their memory must not be given to the next layer before they are copied.
        values.record_stream(self._stream)
        return host

    def wait(self) -> None:
        """Wait for the last copy; the stream keeps their order."""
        self._arrived.synchronize()


def host_copies(device: torch.device) -> Callable[[], HostCopies]:
    """Return what begins the copies of a batch; batches share one stream."""
    if device.type != "cuda":
        return HostCopies
    stream = torch.cuda.Stream(device)
    return lambda: CudaCopies(stream)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host values on the device, without waiting for what runs there."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
