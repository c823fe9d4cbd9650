"""Encoders in PyTorch as fast as we could write them: stacked in one compiled graph.

Activations are `[n_members, channels, n_tokens, n_examples]`. A family's tokens are
projected by one product for all members that read it, and by no other; weights lie
stacked under one fused optimiser. The members of a stack share their batches, and those
of a seed their input noise, as in the training grid; dropout is each member's own.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from beatrice.benchmarks.bench.torch_encoder import (
    GROUP_NORM_EPSILON,
    LAYER_NORM_EPSILON,
    Arrays,
    TorchData,
    TorchEncoder,
    Weights,
    optimizer_of,
    weights_of,
)
from beatrice.jaxprobe.grid import Member
from beatrice.jaxprobe.memory import Workload, families_of

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
            y = _convolve(x, kernel, bias) * mask
            return _group_norm(y, mask, count, scale, shift, self.config.n_groups)

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


def _convolve(x, kernel, bias):
    """Kernel size 3 over tokens, `[n_members, hidden, 3 * hidden]`."""
    edge = torch.zeros_like(x[:, :, :1])
    before, after = (
        torch.cat(parts, 2) for parts in ((edge, x[:, :, :-1]), (x[:, :, 1:], edge))
    )
    y = torch.bmm(kernel, torch.cat([before, x, after], 1).flatten(2))
    return y.view(x.shape) + bias[:, :, None, None]


def _group_norm(x, mask, count, scale, bias, n_groups):
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
