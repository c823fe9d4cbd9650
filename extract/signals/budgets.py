"""How much of a reading is alive at once, by device.

A chunk costs one launch of each of its kernels whatever its size. On a CPU small
chunks stay in the cache and launches are free; on a GPU a chunk of a million weights
is microseconds of work behind a dozen launches, and a large batch would be thousands.
Results do not depend on the budget, up to the order of sums.
"""

import dataclasses

import torch

# Of a GPU's memory, for the two float32 buffers of the largest chunk: 1.25 GiB of 80.
_SHARE = 64
_BYTES_PER_WEIGHT = 2 * 4
_LEAST = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingBudget:
    """Sizes of the chunks that are read; the defaults suit a CPU.

    Attributes:
      n_attention_weights: most attention weights alive at once.
      n_tokens_per_chunk: tokens whose logits are alive at once.
      n_words_per_block: vocabulary entries whose logits are alive at once; at least 2.
    """

    n_attention_weights: int = 3 * 2**19
    n_tokens_per_chunk: int = 2048
    n_words_per_block: int = 2**11

    def __post_init__(self) -> None:
        """Check the fields."""
        if min(self.n_attention_weights, self.n_tokens_per_chunk) < 1:
            raise ValueError(f"a budget is at least 1, found {self}")
        if self.n_words_per_block < 2:
            raise ValueError(f"n_words_per_block is at least 2, found {self}")


def budget_of_memory(n_bytes: int) -> ReadingBudget:
    """Return the budget of an accelerator with so much memory.

    Weights, and logits of a block, each take a 64th of it at most, in powers of two:
    2^27 of either on 80 GiB, 2^25 on 24 GiB.
    """
    most = max(_LEAST, n_bytes // _SHARE // _BYTES_PER_WEIGHT)
    n_weights = 1 << (most.bit_length() - 1)
    n_tokens = 4096  # the head's weights are read once per chunk
    return ReadingBudget(
        n_attention_weights=n_weights,
        n_tokens_per_chunk=n_tokens,
        n_words_per_block=max(2, n_weights // n_tokens),
    )


def budget_for(device: torch.device) -> ReadingBudget:
    """Return the budget of a device."""
    if device.type != "cuda":
        return ReadingBudget()
    return budget_of_memory(torch.cuda.get_device_properties(device).total_memory)
