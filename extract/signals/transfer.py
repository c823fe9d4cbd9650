"""The way of readings from the device to the host, beside the device's work.

On a GPU a copy goes to pinned memory in a stream of its own, so that it runs while the
next layer, or the next batch, is computed; the host waits once per batch. Elsewhere
there is nothing to wait for.
"""

from collections.abc import Callable

import torch


class HostCopies:
    """Copies of one batch from a device whose copies are finished when they return."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that `take_rows` may fill, not initialised."""
        return torch.empty(shape, dtype=dtype)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values on the host; they may be read after `wait`."""
        return values.cpu()

    def take_rows(
        self, values: torch.Tensor, index: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Put rows of the values into `room`; they may be read after `wait`."""
        if values.device == out.device:
            torch.index_select(values, 0, index, out=out)
        else:
            out.copy_(values.index_select(0, index))

    def wait(self) -> None:
        """Return when every copy has arrived."""


class CudaCopies(HostCopies):
    """The same from a CUDA device, without stopping whoever feeds it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Begin a batch; `stream` carries copies alone."""
        self._stream = stream
        self._arrived = torch.cuda.Event()

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory, without which a copy would be a synchronous one."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)  # Torch reuses it

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Queue a copy behind the work that makes the values."""
        host = self.room(values.shape, values.dtype)
        self._queue(values, host)
        return host

    def take_rows(
        self, values: torch.Tensor, index: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Pick rows on the device and queue their copy."""
        self._queue(values.index_select(0, index), out)

    def _queue(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Copy behind the work that makes the values, and beside what follows."""
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(self._stream):
            host.copy_(values, non_blocking=True)
            self._arrived.record()
        # Their memory must not be given to the next layer before they are copied.
        values.record_stream(self._stream)

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
