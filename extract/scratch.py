"""Memory that readings compute in, kept from one chunk, layer and batch to the next.

On a CPU fresh pages cost more than the sums that are made in them. A GPU's allocator
keeps its memory itself.
"""

import torch


class Scratch:
    """Float32 memory of one device, for one reading at a time."""

    def __init__(self, device: torch.device) -> None:
        """Hold nothing yet."""
        self._device = device
        self._kept = torch.empty(0, device=device)

    def floats(self, n_floats: int) -> torch.Tensor:
        """Return `[n_floats]` float32, not initialised.

        It is the same memory every time: what was returned before must not be used
        any more.
        """
        if self._device.type != "cpu":
            return torch.empty(n_floats, device=self._device)
        if len(self._kept) < n_floats:
            self._kept = torch.empty(0)  # let go of it first
            self._kept = torch.empty(n_floats)
        return self._kept[:n_floats]
