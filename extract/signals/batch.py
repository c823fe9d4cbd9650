"""One padded batch: chunk sizes, rows, copies, and halving it if it does not fit."""

import contextlib
import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from beatrice.extract.forks import ForkLock
from beatrice.extract.run.console import Progress
from beatrice.extract.signals.precision import exact_products


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingBudget:
    """Sizes of the chunks that are read; the defaults suit a CPU.

    On a CPU, small chunks stay in the cache; on a GPU, each costs a dozen launches.
    Results do not depend on the budget, up to the order of sums.
    """

    n_attention_weights: int = 3 * 2**19  # most attention weights alive at once
    n_tokens_per_chunk: int = 2048  # tokens whose logits are alive at once
    # Vocabulary entries whose logits are alive at once; at least 2.
    n_words_per_block: int = 2**11


# A trial that fails wastes a pass: at most about one in 50.
_PARTS_PER_TRIAL = 100

Done = TypeVar("Done")


class DoesNotFit(ValueError):
    """The device cannot hold even a single text."""


def _reason(error: torch.OutOfMemoryError) -> str:
    return ". ".join(str(error).split(". ")[:2]).rstrip(".")


@contextlib.contextmanager
def raising_does_not_fit(n_tokens: int) -> Iterator[None]:
    """Raise `DoesNotFit` if the device cannot hold a text that is run by itself."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"one text of {n_tokens} tokens does not fit in the device's memory "
            f"({_reason(error)}); end whatever else uses it, load the model in "
            "bfloat16, give shorter passages, or use a device with more memory"
        ) from error


@dataclasses.dataclass(eq=False)
class BatchSplitter:
    """Runs batches, splitting them in half when they do not fit in device memory.

    Once a batch has not fitted, any of its size or more is split at once, unless a
    single text did not fit either. After every 100 parts, twice that size is allowed:
    the device may have been full only for a moment. Splitting changes values only by
    rounding.
    """

    # One per model: hooks see every pass of it, whichever thread runs it, and its
    # tokenizer keeps the settings of its last call.
    lock: ForkLock = dataclasses.field(default_factory=ForkLock)
    _too_many: float = math.inf  # tokens of a batch that did not fit, with padding
    _n_parts: int = 0  # done of batches that were split
    _is_noted: bool = False  # whether it was reported that batches are split

    def __reduce__(self) -> tuple[Any, ...]:
        """Start afresh in copies and other processes, since locks cannot be pickled."""
        return BatchSplitter, ()

    def run(
        self,
        work: Callable[[list[int]], Done],
        rows: Sequence[int],
        n_tokens_of: Callable[[int], int],
    ) -> Iterator[tuple[list[int], Done]]:
        """Yield the parts of a batch in order, each with the result of `work`."""
        rows = list(rows)
        longest = max(map(n_tokens_of, rows))
        n_tokens, before = len(rows) * longest, self._too_many
        if n_tokens < self._too_many or len(rows) == 1:
            guard = (
                raising_does_not_fit(longest)
                if len(rows) == 1
                else contextlib.nullcontext()
            )
            try:
                with guard, self.lock, exact_products():
                    done = work(rows)
            except torch.OutOfMemoryError as error:
                if not self._is_noted:
                    self._is_noted = True
                    Progress().note(
                        f"a batch of {len(rows)} texts, {n_tokens} tokens with "
                        "padding, does not fit in the device's memory "
                        f"({_reason(error)}); such batches are run in halves, which "
                        "changes numbers only by rounding"
                    )
                self._too_many = n_tokens
            else:
                yield rows, done
                return
            gc.collect()  # frees what the failed pass held
        middle = (len(rows) + 1) // 2
        try:
            for part in (rows[:middle], rows[middle:]):
                yield from self.run(work, part, n_tokens_of)
                self._n_parts += 1
                if self._n_parts % _PARTS_PER_TRIAL == 0:
                    self._too_many *= 2
        except DoesNotFit:
            # The batch size was not the problem: a single text is too long, or
            # something else filled the device for a moment.
            self._too_many = before
            raise


def budget_for(device: torch.device) -> ReadingBudget:
    """Return the budget of a device.

    On a GPU, attention weights and the logits of a block each take at most a 64th of
    its memory, in powers of two: 2^27 of either on 80 GiB, 2^25 on 24 GiB.
    """
    if device.type != "cuda":
        return ReadingBudget()
    n_bytes = torch.cuda.get_device_properties(device).total_memory
    most = max(2**20, n_bytes // 64 // (2 * 4))  # in two buffers of float32
    n_weights = 1 << (most.bit_length() - 1)
    n_tokens = 4096  # the head's weights are read once per chunk
    return ReadingBudget(
        n_attention_weights=n_weights,
        n_tokens_per_chunk=n_tokens,
        n_words_per_block=max(2, n_weights // n_tokens),
    )


class HostCopies:
    """Copies of one batch to the host, which on CUDA do not wait for other work."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """Begin a batch; on CUDA, all batches share a `stream` that only copies."""
        self._stream = stream
        self._arrived = None if stream is None else torch.cuda.Event()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory for `copy_rows` to fill."""
        # Pinned, or a copy would be synchronous; Torch reuses such memory.
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values on the host; read them only after `wait`."""
        if self._stream is None:
            return values.cpu()
        host = self.host_buffer(values.shape, values.dtype)
        self._queue(values, host)
        return host

    def copy_rows(
        self, values: torch.Tensor, index: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Copy rows of the values into a `host_buffer`; read it only after `wait`."""
        if values.device == out.device:
            torch.index_select(values, 0, index, out=out)
        else:
            self._queue(values.index_select(0, index), out)

    def _queue(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Copy after the work that computes the values, and parallel to later work."""
        if self._stream is None or self._arrived is None:
            host.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(self._stream):
            host.copy_(values, non_blocking=True)
            self._arrived.record()
        # Their memory must not be reused by the next layer before they are copied.
        values.record_stream(self._stream)

    def wait(self) -> None:
        """Wait for the last copy; the stream keeps copies in order."""
        if self._arrived is not None:
            self._arrived.synchronize()


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host values on the device, without waiting for work that runs there."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def pad_batch(rows: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """Stack to `[n_examples, n_tokens]`, padding right with each row's last id."""
    n_tokens = max(len(row) for row in rows)
    # A repeated id, not a pad token: Transformers warns about pad ids without a mask.
    padded = [np.pad(row, (0, n_tokens - len(row)), mode="edge") for row in rows]
    return to_device(torch.from_numpy(np.stack(padded)), device)


class TokenRows:
    """Some tokens of every example of a padded batch, end to end.

    They are picked by index, since counting a mask would make the host wait.
    """

    def __init__(
        self, edges: list[tuple[int, int]], n_tokens: int, device: torch.device
    ) -> None:
        """Select `[start, stop)` of each example; `n_tokens` includes padding."""
        indices = [
            np.arange(row * n_tokens + start, row * n_tokens + stop)
            for row, (start, stop) in enumerate(edges)
        ]
        self.stops = np.cumsum([stop - start for start, stop in edges]).tolist()
        self.index = to_device(torch.from_numpy(np.concatenate(indices)), device)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows `[n_rows, …]` of `[n_examples, n_tokens, …]`."""
        return values.flatten(0, 1).index_select(0, self.index)

    def slices(self) -> list[slice]:
        """Return the slice of rows of each example."""
        return [slice(*edges) for edges in itertools.pairwise([0, *self.stops])]
