"""How PyTorch is run as a contestant of `beatrice bench train`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from benchmarks.forecasts.train_work import Member
from benchmarks.speed.torch_encoders import Convolution, Noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How PyTorch is run.

    Attributes:
      n_processes: the members are dealt out among.
      n_threads: of each process.
      convolution: see `TorchEncoder`.
      noise: see `TorchEncoder`.
      compiled: by `torch.compile`: the loop's span function, the vmap's whole gradient.
      block: what one vmap covers.
    """

    n_processes: int = 1
    n_threads: int = 2
    convolution: Convolution = "product"
    noise: Noise = "inputs"
    compiled: bool = False
    block: Literal["seeds", "grid"] = "seeds"

    def words(self, *, stacked: bool) -> str:
        """Describe it for the table."""
        how = {"product": "shifted product", "conv1d": "conv1d", "conv2d": "conv2d"}
        where = {"inputs": "at inputs", "projected": "behind projection"}
        parts = [
            f"{self.n_processes} x {self.n_threads} threads",
            how[self.convolution],
            f"noise {where[self.noise]}",
            "compiled" if self.compiled else "eager",
        ]
        return ", ".join(parts + [f"block: {self.block}"] * stacked)


def blocks_of(members: Sequence[Member], setting: Setting) -> list[list[Member]]:
    """Return the groups that one vmap covers each."""
    if setting.block == "grid":
        return [list(members)]
    subsets = sorted({subset for subset, _ in members})
    return [[m for m in members if m[0] == subset] for subset in subsets]
