"""The work of training: encoders, their batches, and the FLOPs of a step."""

import dataclasses
from collections.abc import Sequence

from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.features.subsets import FamilyDims

Member = tuple[int, int]  # subset, seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Encoders, and the batches they are trained on.

    Attributes:
      encoder: widths.
      dims: channels of the families.
      spans: per span the fewest and the most tokens of an example; lengths between
        them are equally likely, and every example is padded to the most.
      batch_size: examples per step.
      n_steps: steps of each encoder in a turn.
      n_seeds: of the grid; 15 encoders each.
      learning_rate: constant.
      weight_decay: decoupled.
    """

    encoder: EncoderConfig
    dims: FamilyDims
    spans: tuple[tuple[int, int], ...]
    batch_size: int
    n_steps: int
    n_seeds: int = 3
    learning_rate: float = 2e-4
    weight_decay: float = 0.01

    @property
    def members(self) -> list[Member]:
        """Every encoder, seed-major."""
        return [(k, s) for s in range(self.n_seeds) for k in range(self.dims.n_subsets)]

    @property
    def n_tokens(self) -> int:
        """Positions of an example, padding included."""
        return sum(most for _, most in self.spans)

    @property
    def n_examples(self) -> int:
        """Training examples of a turn: each is seen once."""
        return self.batch_size * self.n_steps

    def quiet(self) -> "Workload":
        """Return the same without noise and dropout."""
        still = dataclasses.replace(self.encoder, dropout=0.0, input_noise=0.0)
        return dataclasses.replace(self, encoder=still)

    def mixed(self) -> "Workload":
        """Return the same with products of bfloat16."""
        mixed = dataclasses.replace(self.encoder, matmul_dtype="bfloat16")
        return dataclasses.replace(self, encoder=mixed)


def families_of(member: Member) -> tuple[int, ...]:
    """Return the families that a member reads."""
    bits = member[0] + 1
    return tuple(f for f in range(bits.bit_length()) if bits >> f & 1)


def step_flops(workload: Workload, member: Member) -> int:
    """Floating-point operations of one encoder's step, from shapes.

    Matrix products only, at the encoder's own widths, over all positions of the batch,
    padded ones included. Forward plus backward is three products for one, and two for
    the first projection, whose inputs need no gradient.
    """
    config, read = workload.encoder, families_of(member)
    sizes = [workload.dims.sizes[f] for f in read]
    hidden, n_spans = config.hidden, len(workload.spans)
    projection = 2 * sum(sizes) * config.projection
    entry = 2 * len(read) * config.projection * hidden
    convolutions = config.n_blocks * 2 * (2 * 3 * hidden * hidden)
    per_token = 2 * projection + 3 * (entry + convolutions)
    n_vectors = n_spans + n_spans * (n_spans - 1) // 2
    mlp = 2 * n_vectors * config.d_pooled * hidden + 2 * hidden
    per_example = workload.n_tokens * per_token + 3 * mlp
    return workload.batch_size * per_example


def turn_flops(workload: Workload, members: Sequence[Member]) -> int:
    """Operations of a turn: `n_steps` of each member."""
    return workload.n_steps * sum(step_flops(workload, member) for member in members)


def in_parts(
    workload: Workload, groups: Sequence[Sequence[Member]], n_parts: int
) -> list[list[Member]]:
    """Deal groups of members out so that every part has about as much to do."""
    parts: list[list[Member]] = [[] for _ in range(n_parts)]
    loads = [0] * n_parts
    costs = [turn_flops(workload, group) for group in groups]
    for i in sorted(range(len(groups)), key=lambda i: -costs[i]):
        part = loads.index(min(loads))
        parts[part].extend(groups[i])
        loads[part] += costs[i]
    return parts
