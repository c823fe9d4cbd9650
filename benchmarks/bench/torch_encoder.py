"""The combination encoder in PyTorch, against which the training grid is timed.

It computes the function of `jaxprobe.encoder`, as fast as we could write it. Members
are stacked, all of a process in one compiled graph or each by itself. Activations are
`[n_members, channels, n_tokens, n_examples]`. One product projects a family's tokens
for exactly the members that read it; stacked weights share one fused optimiser. The
members of a stack share batches, and those of a seed input noise, as in the training
grid; dropout is drawn per member.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from beatrice.benchmarks.bench.grid import Workload, made_up_features
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.grid import Member

Arrays = Mapping[str, np.ndarray]
Weights = dict[str, torch.Tensor]
Drawn = dict[Any, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TorchData:
    """Training examples by family, with the token axis before the example axis."""

    # `[n_tokens, n_examples, d_family]` for each family, spans one after another, zero
    # on padding.
    tokens: tuple[torch.Tensor, ...]
    real: torch.Tensor  # `[n_tokens, n_examples]` float32, 1 on real tokens
    labels: torch.Tensor  # `[n_examples]` float32

    @classmethod
    def made_up(cls, workload: Workload, n_examples: int, seed: int) -> "TorchData":
        """Make random data for a workload."""
        features, labels = made_up_features(workload, n_examples, seed)
        tokens = np.concatenate(features.tokens, axis=1).swapaxes(0, 1)
        real = np.concatenate(features.masks, axis=1).T
        return cls(
            tokens=tuple(torch.tensor(tokens[..., s]) for s in workload.dims.slices),
            real=torch.tensor(real, dtype=torch.float32),
            labels=torch.tensor(labels, dtype=torch.float32),
        )


class Stack:
    """A stack of members, trained together; `weights` are their stacked weights."""

    def __init__(
        self,
        workload: Workload,
        weights: Mapping[Member, Arrays],
        compiled: Literal["whole", "spans"] | None,
    ) -> None:
        """Take every member's initial weights, under their names in `jaxprobe`."""
        self.config, self.widths = workload.config.encoder, workload.widths
        self.members = list(weights)
        readers = {
            f: [i for i, (subset, _) in enumerate(self.members) if reads[subset]]
            for f, reads in enumerate(workload.dims.subset_masks.T)
        }
        self.readers = {f: torch.tensor(rows) for f, rows in readers.items() if rows}
        seeds = sorted({member.seed for member in self.members})
        self.n_seeds = len(seeds)
        self.seed_of = torch.tensor([seeds.index(x.seed) for x in self.members])
        self.weights = {
            name: x.requires_grad_() for name, x in self.stacked(weights).items()
        }
        self.optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=workload.config.train.learning_rate,
            weight_decay=workload.config.train.weight_decay,
            fused=True,
        )
        self._span = compiled_span() if compiled == "spans" else encode_span
        self._loss = self.loss
        if compiled == "whole":
            self._loss = torch.compile(self.loss, dynamic=False, fullgraph=True)

    def stacked(self, arrays: Mapping[Member, Arrays]) -> Weights:
        """Stack weights or gradients; those of a family only for its readers."""
        each = list(arrays.values())
        parts: dict[str, list[np.ndarray]] = {}
        for f, rows in self.readers.items():
            readers = [each[i] for i in rows.tolist()]
            parts[f"project_{f}"] = [x[f"projection_{f}"] for x in readers]
            parts[f"project_bias_{f}"] = [x["projection_bias"][f] for x in readers]
            for s in range(len(self.widths)):
                kernels = [x[f"span_{s}/entry_kernel"] for x in readers]
                shape = self.config.hidden, -1, self.config.projection
                parts[f"entry_{f}_{s}"] = [x.reshape(shape)[:, f] for x in kernels]
        for name in each[0]:
            if "entry_kernel" not in name and not name.startswith("projection_"):
                parts[name] = [x[name] for x in each]
            if "/conv_" in name and name.endswith("kernel"):  # of three tokens
                parts[name] = [x.reshape(len(x), -1) for x in parts[name]]
        return {name: torch.tensor(np.stack(x)) for name, x in parts.items()}

    def step(self, data: TorchData, rows: torch.Tensor) -> torch.Tensor:
        """Take one step with every member; return their losses `[n_members]`."""
        self.optimizer.zero_grad(set_to_none=True)
        inputs = self.inputs(data, rows)
        total, losses = self._loss(self.weights, data.labels[rows], *inputs)
        total.backward()
        self.optimizer.step()
        return losses.detach()

    def inputs(self, data: TorchData, rows: torch.Tensor) -> tuple[Any, ...]:
        """Return a step's tokens, which of them are real, noise and dropout bytes."""
        real = data.real[:, rows]
        tokens = {f: data.tokens[f][:, rows] for f in self.readers}
        draws = self._draws(tokens, real)
        tokens = {f: x.flatten(0, 1) for f, x in tokens.items()}
        return tokens, real, draws, self._drops(real)

    def _draws(self, tokens: Drawn, real: torch.Tensor) -> Drawn:
        """Add noise to narrow families' tokens; draw that of wide ones for later.

        After the projection, noise has covariance K K', which is singular if a family
        has fewer channels than the projection; noise on its tokens is cheap, though.
        """
        draws, deviation = {}, self.config.input_noise
        for f in self.readers if deviation else ():
            x = tokens[f]
            if x.shape[2] <= self.config.projection:
                tokens[f] = x + deviation * torch.randn_like(x) * real[..., None]
            else:
                shape = self.n_seeds, self.config.projection, real.numel()
                noise = torch.randn(shape, device=real.device)
                draws[f] = noise * (deviation * real.flatten())
        return draws

    def _drops(self, real: torch.Tensor) -> list[list[torch.Tensor]]:
        """Draw a random byte for every activation under dropout, by span and block."""
        config, n_members = self.config, len(self.members)
        n_blocks = config.n_blocks if config.dropout else 0

        def draw(width: int) -> torch.Tensor:
            shape = n_members, config.hidden, width, real.shape[1]
            n_words = -(-math.prod(shape) // 8)
            words = torch.empty(n_words, dtype=torch.int64, device=real.device)
            drawn = words.random_(-(2**63), None).view(torch.uint8)
            return drawn[: math.prod(shape)].view(shape)

        return [[draw(width) for _ in range(n_blocks)] for width in self.widths]

    def loss(
        self, weights: Weights, labels: torch.Tensor, *inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the members' losses, and each member's loss."""
        logits = self.logits(weights, *inputs)
        losses = binary_cross_entropy_with_logits(
            logits, labels.expand_as(logits), reduction="none"
        ).mean(1)
        return losses.sum(), losses

    def project(
        self, weights: Weights, f: int, tokens: torch.Tensor, draws: Drawn
    ) -> torch.Tensor:
        """Return a family's projection, `[n_readers, projection, n_positions]`."""
        kernel = weights[f"project_{f}"]
        y = (kernel.flatten(0, 1) @ tokens.T).view(*kernel.shape[:2], -1)
        if f in draws:
            root = torch.linalg.cholesky(kernel @ kernel.mT)
            y = y + root @ draws[f][self.seed_of[self.readers[f]]]
        return y + weights[f"project_bias_{f}"][..., None]

    def logits(
        self,
        weights: Weights,
        tokens: Drawn,
        real: torch.Tensor,
        draws: Drawn,
        drops: list[list[torch.Tensor]],
    ) -> torch.Tensor:
        """Return the logits of a batch of answers, `[n_members, n_examples]`.

        Args:
          weights: the stack's weights.
          tokens: `[n_tokens * n_examples, d_family]` for each family.
          real: `[n_tokens, n_examples]` float32, 1 on real tokens.
          draws: noise of wide families, to add after their projection.
          drops: dropout bytes by span and block; empty without dropout.
        """
        projected, n_examples = {}, real.shape[1]
        for f, x in tokens.items():
            y = self.project(weights, f, x, draws)
            projected[f] = y.view(*y.shape[:2], *real.shape)
        vectors, start = [], 0
        for s, width in enumerate(self.widths):
            at = slice(start, start + width)
            x = weights[f"span_{s}/entry_bias"][..., None]
            x = x.expand(-1, -1, width * n_examples)
            for f, rows in self.readers.items():
                y = torch.bmm(
                    weights[f"entry_{f}_{s}"], projected[f][:, :, at].flatten(2)
                )
                x = x.index_add(0, rows, y) if len(rows) < len(x) else x + y
            prefix = f"span_{s}/"
            of_span = {
                name.removeprefix(prefix): w
                for name, w in weights.items()
                if name.startswith(prefix)
            }
            x = x.view(*x.shape[:2], width, n_examples)
            vectors.append(self._span(x, real[at], of_span, drops[s], self.config))
            start += width
        pairs = itertools.combinations(vectors, 2)
        x = torch.cat([*vectors, *(a - b for a, b in pairs)], 1)
        x = torch.bmm(weights["mlp_in/kernel"], x) + weights["mlp_in/bias"][..., None]
        centred = x - x.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        x = centred * torch.rsqrt(variance + 1e-6)  # Flax's epsilon
        scale, bias = (weights[f"mlp_norm/{x}"][..., None] for x in ("scale", "bias"))
        x = gelu(x * scale + bias, approximate="tanh")
        logits = torch.bmm(weights["mlp_out/kernel"], x)[:, 0]
        return logits + weights["mlp_out/bias"]


def encode_span(
    x: torch.Tensor,
    mask: torch.Tensor,
    weights: Weights,
    drops: list[torch.Tensor],
    config: EncoderConfig,
) -> torch.Tensor:
    """Apply the residual blocks and the pooling of one span.

    Args:
      x: `[n_members, hidden, n_span_tokens, n_examples]`, after the entry layer.
      mask: `[n_span_tokens, n_examples]`, 1 on real tokens and 0 on padding.
      weights: of this span, by names without its prefix.
      drops: dropout bytes of the shape of `x`, by block; empty without dropout.
      config: widths and dropout rate.

    Returns:
      `[n_members, 2 * hidden, n_examples]`: maximum, then mean, over the real tokens.
    """
    n_real, x = mask.sum(0), x * mask
    count = n_real.clamp(min=1.0)

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        kernel, bias = (weights[f"conv_{name}/{x}"] for x in ("kernel", "bias"))
        scale, shift = (weights[f"norm_{name}/{x}"] for x in ("scale", "bias"))
        y = _convolve(x, kernel, bias) * mask
        return _group_norm(y, mask, count, scale, shift, config.n_groups)

    for block in range(config.n_blocks):
        y = gelu(layer(x, f"{block}_0"), approximate="tanh")
        if drops:
            keep_mask = drops[block] >= round(256 * config.dropout)
            y = y * (keep_mask * (1 / (1.0 - config.dropout)))
        x = gelu(x + layer(y, f"{block}_1"), approximate="tanh")
    highest = x.masked_fill(mask == 0, -1e30).amax(2)
    highest = torch.where(n_real > 0, highest, 0.0)
    return torch.cat([highest, x.sum(2) / count], 1)


@functools.cache
def compiled_span() -> Callable[..., torch.Tensor]:
    """Return `encode_span` compiled, once per process for all members and widths."""
    return torch.compile(encode_span, dynamic=False, fullgraph=True)


def _convolve(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Convolve over tokens with kernels of size 3 `[n_members, hidden, 3 * hidden]`."""
    edge = torch.zeros_like(x[:, :, :1])
    before, after = (
        torch.cat(parts, 2) for parts in ((edge, x[:, :, :-1]), (x[:, :, 1:], edge))
    )
    y = torch.bmm(kernel, torch.cat([before, x, after], 1).flatten(2))
    return y.view(x.shape) + bias[:, :, None, None]


def _group_norm(
    x: torch.Tensor,
    mask: torch.Tensor,
    count: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    n_groups: int,
) -> torch.Tensor:
    """Normalise by statistics of real tokens; `x` and the result are 0 on padding."""
    size = x.shape[1] // n_groups
    mean, square = (
        y.sum(2).unflatten(1, (n_groups, size)).sum(2) / (count * size)
        for y in (x, x * x)
    )
    inv_std = torch.rsqrt((square - mean * mean).clamp(min=0.0) + 1e-5)
    gain = inv_std.repeat_interleave(size, 1) * scale[..., None]
    shift = bias[..., None] - mean.repeat_interleave(size, 1) * gain
    return (x * gain[:, :, None] + shift[:, :, None]) * mask
