"""The combination encoder in PyTorch, alone and stacked: what the grid is timed beside.

The function of `jaxprobe.encoder` at an encoder's own widths: only the families that it
reads are projected. Weights are a flat dictionary.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    dropout,
    gelu,
    layer_norm,
    pad,
)

from beatrice.benchmarks.bench.grid import made_up_features
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.families import N_FAMILIES
from beatrice.jaxprobe.grid import Member
from beatrice.jaxprobe.memory import Workload, families_of

Arrays = Mapping[str, np.ndarray]
Weights = dict[str, torch.Tensor]
LAYER_NORM_EPSILON = 1e-6  # Flax's
GROUP_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TorchData:
    """Training examples, families apart.

    Attributes:
      tokens: per family `[n_examples, n_tokens, d_family]`.
      real: `[n_examples, n_tokens]` float32.
      labels: `[n_examples]` float32.
    """

    tokens: tuple[torch.Tensor, ...]
    real: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def made_up(cls, workload: Workload, n_examples: int, seed: int) -> "TorchData":
        """Make the workload's data."""
        features, labels = made_up_features(workload, n_examples, seed)
        tokens = np.concatenate(features.tokens, axis=1)
        real = np.concatenate(features.masks, axis=1)
        return cls(
            tokens=tuple(torch.tensor(tokens[..., s]) for s in workload.dims.slices),
            real=torch.tensor(real, dtype=torch.float32),
            labels=torch.tensor(labels, dtype=torch.float32),
        )


def optimizer_of(weights: Weights, workload: Workload) -> torch.optim.AdamW:
    """Return AdamW in its fused form."""
    return torch.optim.AdamW(
        weights.values(),
        lr=workload.learning_rate,
        weight_decay=workload.weight_decay,
        fused=True,
    )


@dataclasses.dataclass(frozen=True)
class TorchEncoder:
    """What an encoder's function depends on besides its weights.

    Attributes:
      config: widths, dropout and noise.
      families: that are read, ascending.
      widths: padded tokens of each span.
    """

    config: EncoderConfig
    families: tuple[int, ...]
    widths: tuple[int, ...]


def weights_of(arrays: Arrays, encoder: TorchEncoder) -> dict[str, np.ndarray]:
    """Return the weights of `jaxprobe`'s encoder, without families that are not read.

    Args:
      arrays: by path, as in "span_0/conv_0_0/kernel"; also gradients, since every
        weight only changes its place.
      encoder: whose weights are wanted.
    """
    read, width = list(encoder.families), encoder.config.projection
    unread = {f"projection_{f}" for f in range(N_FAMILIES) if f not in read}
    weights = {
        name: _outputs_last(name, np.asarray(x))
        for name, x in arrays.items()
        if name not in unread
    }
    weights["projection_bias"] = weights["projection_bias"][read].reshape(-1)
    for name, x in weights.items():
        d_out = x.shape[-1]
        if name.endswith("entry_kernel"):
            weights[name] = x.reshape(-1, width, d_out)[read].reshape(-1, d_out)
        if "/conv_" in name and name.endswith("kernel"):  # [3, d_in, d_out]
            weights[name] = x.reshape(-1, d_out)
    return {name: np.array(x, order="C") for name, x in weights.items()}


def _outputs_last(name: str, x: np.ndarray) -> np.ndarray:
    """`[d_out, ...]`, as `jaxprobe` keeps weights, with the outputs behind."""
    is_weight = name.endswith("kernel") or name.startswith("projection_")
    is_weight &= not name.endswith("bias")
    return np.moveaxis(x, 0, -1) if is_weight else x


def _convolve(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Kernel size 3 over tokens, as one product over shifted rows."""
    wide = pad(x, (0, 0, 1, 1))
    rows = torch.cat([wide[:, :-2], x, wide[:, 2:]], dim=-1)
    return rows @ kernel + bias


def _group_norm(
    x: torch.Tensor,
    real: torch.Tensor,
    n_real: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    n_groups: int,
) -> torch.Tensor:
    """Statistics of real tokens only; `x` is zero on padding, and so is the result.

    Args:
      x: `[n_examples, n_tokens, d]`.
      real: 1 on real tokens, broadcast against `x`.
      n_real: `[n_examples]`.
      scale: `[d]`.
      bias: `[d]`.
      n_groups: divides `d`.
    """
    size = scale.shape[0] // n_groups
    count = n_real.clamp(min=1.0)[:, None] * size
    mean = x.sum(dim=1).unflatten(1, (n_groups, size)).sum(dim=2) / count
    square = (x * x).sum(dim=1).unflatten(1, (n_groups, size)).sum(dim=2) / count
    variance = (square - mean * mean).clamp(min=0.0)
    inv_std = torch.rsqrt(variance + GROUP_NORM_EPSILON)
    gain = inv_std.repeat_interleave(size, dim=1) * scale
    shift = bias - mean.repeat_interleave(size, dim=1) * gain
    return (x * gain.unsqueeze(1) + shift.unsqueeze(1)) * real


def encode_span(
    x: torch.Tensor,
    real: torch.Tensor,
    weights: Weights,
    config: EncoderConfig,
    rate: float,
) -> torch.Tensor:
    """Residual blocks and pooling of one span.

    Args:
      x: `[n_examples, n_span_tokens, hidden]`, behind the width-1 convolution.
      real: `[n_examples, n_span_tokens]`, 1 on real tokens and 0 on padding.
      weights: of this span, names without its prefix.
      config: widths.
      rate: of the dropout.

    Returns:
      `[n_examples, 2 * hidden]`: maximum, then mean, over the real tokens.
    """
    n_real, real = real.sum(dim=1), real.unsqueeze(2)
    x = x * real

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        kernel, bias = weights[f"conv_{name}/kernel"], weights[f"conv_{name}/bias"]
        y = _convolve(x, kernel, bias) * real
        scale, shift = weights[f"norm_{name}/scale"], weights[f"norm_{name}/bias"]
        return _group_norm(y, real, n_real, scale, shift, config.n_groups)

    for block in range(config.n_blocks):
        y = gelu(layer(x, f"{block}_0"), approximate="tanh")
        if rate:
            y = dropout(y, rate)
        x = gelu(x + layer(y, f"{block}_1"), approximate="tanh")
    highest = x.masked_fill(real == 0, -1e30).amax(dim=1)
    highest = torch.where(n_real[:, None] > 0, highest, 0.0)
    mean = x.sum(dim=1) / n_real.clamp(min=1.0)[:, None]
    return torch.cat([highest, mean], dim=1)


def project(
    weights: Weights,
    tokens: Mapping[int, torch.Tensor],
    real: torch.Tensor,
    encoder: TorchEncoder,
    noise: float,
) -> torch.Tensor:
    """`[n_examples, n_tokens, n_read * projection]`, the families side by side."""
    parts = []
    for f in encoder.families:
        kernel, x = weights[f"projection_{f}"], tokens[f]
        # Behind the projection noise has covariance K'K. That is singular where the
        # family has fewer channels than the projection, and there drawing is cheap.
        behind = kernel.shape[0] > kernel.shape[1]
        if noise and not behind:
            x = (x + noise * torch.randn_like(x)) * real.unsqueeze(2)
        y = x @ kernel
        if noise and behind:
            root = torch.linalg.cholesky(kernel.mT @ kernel)
            drawn = torch.randn_like(y) * (noise * real.unsqueeze(2))
            y = y + drawn @ root.mT
        parts.append(y)
    return torch.cat(parts, dim=2) + weights["projection_bias"]


def apply_encoder(
    weights: Weights,
    tokens: Mapping[int, torch.Tensor],
    real: torch.Tensor,
    encoder: TorchEncoder,
    *,
    training: bool,
    span_function: Callable[..., torch.Tensor] = encode_span,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score a batch of answers.

    Args:
      weights: see `weights_of`.
      tokens: per family that is read `[n_examples, n_tokens, d_family]`, the spans one
        after another, zero on padding.
      real: `[n_examples, n_tokens]` float32, 1 on real tokens.
      encoder: what is computed.
      training: draws noise and dropout.
      span_function: `encode_span`, or the same compiled.

    Returns:
      logits `[n_examples]`, and the answer span's pooled vectors
      `[n_examples, 2 * hidden]`.
    """
    config = encoder.config
    rate, noise = (config.dropout, config.input_noise) if training else (0.0, 0.0)
    rows = project(weights, tokens, real, encoder, noise)
    vectors, start = [], 0
    for span, width in enumerate(encoder.widths):
        span_weights = {
            name.removeprefix(f"span_{span}/"): x
            for name, x in weights.items()
            if name.startswith(f"span_{span}/")
        }
        x = rows[:, start : start + width] @ span_weights.pop("entry_kernel")
        x = x + span_weights.pop("entry_bias")
        mask = real[:, start : start + width]
        vectors.append(span_function(x, mask, span_weights, config, rate))
        start += width
    pairs = itertools.combinations(vectors, 2)
    x = torch.cat([*vectors, *(a - b for a, b in pairs)], dim=1)
    x = x @ weights["mlp_in/kernel"] + weights["mlp_in/bias"]
    scale, bias = weights["mlp_norm/scale"], weights["mlp_norm/bias"]
    x = layer_norm(x, (config.hidden,), scale, bias, LAYER_NORM_EPSILON)
    x = gelu(x, approximate="tanh")
    x = x @ weights["mlp_out/kernel"] + weights["mlp_out/bias"]
    return x[:, 0], vectors[-1]


# Encoders as fast as we could write them: stacked in one compiled graph. Activations
# are `[n_members, channels, n_tokens, n_examples]`. A family's tokens are projected by
# one product for all members that read it, and by no other; weights lie stacked under
# one fused optimiser. The members of a stack share their batches, and those of a seed
# their input noise, as in the training grid; dropout is each member's own.

Drawn = dict[Any, torch.Tensor]


class Stack:
    """All members of a process side by side; a group is all of them."""

    def __init__(
        self,
        workload: Workload,
        weights: Mapping[Member, Arrays],
        compiled: bool = True,
    ) -> None:
        """Take initial weights of every member, as `jaxprobe` names them."""
        self.workload, self.config = workload, workload.encoder
        self.widths = [most for _, most in workload.spans]
        members = [Member(*member) for member in weights]
        self.groups = [members]
        readers = {
            f: [i for i, member in enumerate(members) if f in families_of(member)]
            for f in range(workload.dims.n_families)
        }
        self.readers = {f: torch.tensor(rows) for f, rows in readers.items() if rows}
        seeds = sorted({member.seed for member in members})
        self.n_seeds = len(seeds)
        self.seed_of = torch.tensor([seeds.index(member.seed) for member in members])
        self.weights = {
            name: x.contiguous().requires_grad_()
            for name, x in self._stacked(members, weights).items()
        }
        self.optimizer = optimizer_of(self.weights, workload)
        self.loss = self._loss
        if compiled:
            self.loss = torch.compile(self._loss, dynamic=False)

    def _stacked(
        self, members: list[Member], weights: Mapping[Member, Arrays]
    ) -> Weights:
        """Stack weights, outputs before inputs; a family's are of its readers alone."""
        config, width = self.config, self.config.projection
        encoders = [
            TorchEncoder(config, families_of(member), tuple(self.widths))
            for member in members
        ]
        each = [
            {name: torch.from_numpy(x) for name, x in weights_of(arrays, e).items()}
            for arrays, e in zip(weights.values(), encoders, strict=True)
        ]
        stacked = {}
        for f, rows in self.readers.items():
            pairs = [
                (each[i], families_of(members[i]).index(f) * width)
                for i in rows.tolist()
            ]
            parts = {
                f"project_{f}": [x[f"projection_{f}"].T for x, _ in pairs],
                f"project_bias_{f}": [
                    x["projection_bias"][at : at + width] for x, at in pairs
                ],
            }
            for s in range(len(self.widths)):
                parts[f"entry_{f}_{s}"] = [
                    x[f"span_{s}/entry_kernel"][at : at + width].T for x, at in pairs
                ]
            stacked.update({name: torch.stack(x) for name, x in parts.items()})
        for name in each[0]:
            if "entry_kernel" not in name and not name.startswith("projection_"):
                x = torch.stack([params[name] for params in each])
                stacked[name] = x.mT if x.ndim == 3 else x
        return stacked

    @staticmethod
    def arrange(data: TorchData) -> TorchData:
        """Put tokens before examples."""
        return TorchData(
            tokens=tuple(x.transpose(0, 1).contiguous() for x in data.tokens),
            real=data.real.T.contiguous(),
            labels=data.labels,
        )

    def step(self, group: list[Member], data: TorchData, rows) -> list[float]:
        """Take one step of every member; return their losses."""
        real = data.real[:, rows]
        tokens = {f: data.tokens[f][:, rows] for f in self.readers}
        draws = self._draws(tokens, real)
        tokens = {f: x.flatten(0, 1) for f, x in tokens.items()}
        self.optimizer.zero_grad(set_to_none=True)
        inputs = tokens, real, data.labels[rows], draws, self._drops(real)
        total, losses = self.loss(self.weights, *inputs)
        total.backward()
        self.optimizer.step()
        return losses.tolist()

    def _draws(self, tokens: Drawn, real: torch.Tensor) -> Drawn:
        """Draw noise: onto narrow families' tokens, of wide ones for the projection."""
        draws, deviation = {}, self.config.input_noise
        for f in self.readers if deviation else ():
            x = tokens[f]
            if x.shape[2] <= self.config.projection:
                tokens[f] = x + deviation * torch.randn_like(x) * real[..., None]
            else:
                shape = self.n_seeds, self.config.projection, real.numel()
                draws[f] = torch.randn(shape) * (deviation * real.flatten())
        return draws

    def _drops(self, real: torch.Tensor) -> Drawn:
        """Draw a byte for every activation that dropout sees."""
        drops = {}
        for s, width in enumerate(self.widths if self.config.dropout else ()):
            for block in range(self.config.n_blocks):
                hidden, n_members = self.config.hidden, len(self.seed_of)
                shape = n_members, hidden, width, real.shape[1]
                words = torch.empty(-(-math.prod(shape) // 8), dtype=torch.int64)
                drawn = words.random_(-(2**63), None).view(torch.uint8)
                drops[s, block] = drawn[: math.prod(shape)].view(shape)
        return drops

    def _loss(self, weights, tokens, real, labels, draws, drops):
        """Sum of the members' losses, and each of them."""
        projected, n_examples = {}, real.shape[1]
        for f, rows in self.readers.items():
            kernel = weights[f"project_{f}"]
            y = (kernel.flatten(0, 1) @ tokens[f].T).view(*kernel.shape[:2], -1)
            if f in draws:
                root = torch.linalg.cholesky(kernel @ kernel.mT)
                y = y + root @ draws[f][self.seed_of[rows]]
            y = y + weights[f"project_bias_{f}"][..., None]
            projected[f] = y.view(*kernel.shape[:2], *real.shape)
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
            mask = real[at]
            x = x.view(*x.shape[:2], width, n_examples) * mask
            vectors.append(self._span(weights, s, x, mask, drops))
            start += width
        pairs = itertools.combinations(vectors, 2)
        x = torch.cat([*vectors, *(a - b for a, b in pairs)], 1)
        x = torch.bmm(weights["mlp_in/kernel"], x) + weights["mlp_in/bias"][..., None]
        centred = x - x.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        x = centred * torch.rsqrt(variance + LAYER_NORM_EPSILON)
        scale, bias = (weights[f"mlp_norm/{x}"][..., None] for x in ("scale", "bias"))
        x = gelu(x * scale + bias, approximate="tanh")
        logits = (weights["mlp_out/kernel"].mT * x).sum(1) + weights["mlp_out/bias"]
        losses = binary_cross_entropy_with_logits(
            logits, labels.expand_as(logits), reduction="none"
        ).mean(1)
        return losses.sum(), losses

    def _span(self, weights, s, x, mask, drops):
        """Residual blocks and pooling, `[n_members, 2 * hidden, n_examples]`."""
        n_real = mask.sum(0)
        count = n_real.clamp(min=1.0)
        keep = 1.0 - self.config.dropout

        def layer(x, name):
            kernel, bias = (weights[f"span_{s}/conv_{name}/{x}"] for x in _LINEAR)
            scale, shift = (weights[f"span_{s}/norm_{name}/{x}"] for x in _AFFINE)
            y = _convolve_stack(x, kernel, bias) * mask
            return _group_norm_stack(y, mask, count, scale, shift, self.config.n_groups)

        for block in range(self.config.n_blocks):
            y = gelu(layer(x, f"{block}_0"), approximate="tanh")
            if drops:
                keep_mask = drops[s, block] >= round(256 * self.config.dropout)
                y = y * (keep_mask * (1 / keep))
            x = gelu(x + layer(y, f"{block}_1"), approximate="tanh")
        highest = x.masked_fill(mask == 0, -1e30).amax(2)
        highest = torch.where(n_real > 0, highest, 0.0)
        return torch.cat([highest, x.sum(2) / count], 1)


_LINEAR, _AFFINE = ("kernel", "bias"), ("scale", "bias")


def _convolve_stack(x, kernel, bias):
    """Kernel size 3 over tokens, `[n_members, hidden, 3 * hidden]`."""
    edge = torch.zeros_like(x[:, :, :1])
    before, after = (
        torch.cat(parts, 2) for parts in ((edge, x[:, :, :-1]), (x[:, :, 1:], edge))
    )
    y = torch.bmm(kernel, torch.cat([before, x, after], 1).flatten(2))
    return y.view(x.shape) + bias[:, :, None, None]


def _group_norm_stack(x, mask, count, scale, bias, n_groups):
    """Statistics of real tokens only; `x` is zero on padding, and so is the result."""
    size = x.shape[1] // n_groups
    mean, square = (
        y.sum(2).unflatten(1, (n_groups, size)).sum(2) / (count * size)
        for y in (x, x * x)
    )
    inv_std = torch.rsqrt((square - mean * mean).clamp(min=0.0) + GROUP_NORM_EPSILON)
    gain = inv_std.repeat_interleave(size, 1) * scale[..., None]
    shift = bias[..., None] - mean.repeat_interleave(size, 1) * gain
    return (x * gain[:, :, None] + shift[:, :, None]) * mask
