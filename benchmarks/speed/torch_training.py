"""Training steps of the encoders in PyTorch, one after another or stacked.

Both ways share data, draws and optimiser. The loop trains each encoder by itself, at
its own widths; `torch.func.vmap` trains several with one call, which is one encoder's
seeds (of the same widths) or the whole grid (all families, gated by masks).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.func import grad_and_value, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.forecasts.train_work import (
    Losses,
    Member,
    Workload,
    families_of,
    made_up_features,
    weights_file,
)
from benchmarks.speed.torch_encoders import (
    TorchEncoder,
    Weights,
    apply_encoder,
    encode_span,
    weights_of,
)
from benchmarks.speed.torch_setting import Setting, blocks_of
from jaxprobe.features.subsets import N_FAMILIES

Arrays = Mapping[str, np.ndarray]


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
        real = np.concatenate(features.masks, axis=1).astype(np.float32)
        return cls(
            tokens=tuple(
                torch.from_numpy(np.ascontiguousarray(tokens[..., s]))
                for s in workload.dims.slices
            ),
            real=torch.from_numpy(real),
            labels=torch.from_numpy(labels.astype(np.float32)),
        )


def encoder_of(
    workload: Workload, families: tuple[int, ...], setting: Setting
) -> TorchEncoder:
    """Return the function of an encoder that reads these families."""
    return TorchEncoder(
        config=workload.encoder,
        families=families,
        widths=tuple(most for _, most in workload.spans),
        convolution=setting.convolution,
        noise=setting.noise,
    )


def _optimizer(
    weights: Weights, workload: Workload, kind: Literal["fused", "foreach"]
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        weights.values(),
        lr=workload.learning_rate,
        weight_decay=workload.weight_decay,
        **{kind: True},
    )


class Loop:
    """Encoders one after another, each at its own widths."""

    def __init__(
        self, workload: Workload, setting: Setting, weights: Mapping[Member, Arrays]
    ) -> None:
        """Take initial weights of every member, as `jaxprobe` names them."""
        self.workload = workload
        self.setting = setting
        self.groups = [[member] for member in weights]
        self.span_function = (
            torch.compile(encode_span, dynamic=False)
            if setting.compiled
            else encode_span
        )
        self._state = {m: self._started(m, arrays) for m, arrays in weights.items()}

    def _started(self, member: Member, arrays: Arrays):
        encoder = encoder_of(self.workload, families_of(member), self.setting)
        weights = {
            name: torch.from_numpy(x).requires_grad_()
            for name, x in weights_of(arrays, encoder).items()
        }
        return encoder, weights, _optimizer(weights, self.workload, "fused")

    def step(self, group: Sequence[Member], data: TorchData, rows) -> list[float]:
        """Take one step of a group of one; return its loss in a list."""
        encoder, weights, optimizer = self._state[group[0]]
        tokens = {f: data.tokens[f][rows] for f in encoder.families}
        logits, _ = apply_encoder(
            weights,
            tokens,
            data.real[rows],
            encoder,
            training=True,
            span_function=self.span_function,
        )
        loss = binary_cross_entropy_with_logits(logits, data.labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return [loss.item()]


class Stacked:
    """Encoders side by side by `torch.func.vmap`, their weights stacked."""

    def __init__(
        self, workload: Workload, setting: Setting, weights: Mapping[Member, Arrays]
    ) -> None:
        """Take initial weights of every member, as `jaxprobe` names them."""
        self.workload = workload
        self.setting = setting
        self.groups = blocks_of(list(weights), setting)
        self._state = {tuple(g): self._started(g, weights) for g in self.groups}

    def _started(self, group: Sequence[Member], weights: Mapping[Member, Arrays]):
        every = range(N_FAMILIES)
        families = tuple(f for f in every if any(f in families_of(m) for m in group))
        encoder = encoder_of(self.workload, families, self.setting)
        own = [weights_of(weights[member], encoder) for member in group]
        stacked = {
            name: torch.from_numpy(np.stack([x[name] for x in own])) for name in own[0]
        }
        read = [[float(f in families_of(m)) for f in families] for m in group]
        gates = torch.tensor(read).repeat_interleave(
            self.workload.encoder.projection, dim=1
        )

        def loss(weights, gates, tokens, real, labels):
            logits, _ = apply_encoder(
                weights, tokens, real, encoder, training=True, gates=gates
            )
            return binary_cross_entropy_with_logits(logits, labels)

        # Batches are shared by the block; what is drawn is each member's own.
        gradient = vmap(
            grad_and_value(loss),
            in_dims=(0, 0, None, None, None),
            randomness="different",
        )
        if self.setting.compiled:
            gradient = torch.compile(gradient, dynamic=False)
        optimizer = _optimizer(stacked, self.workload, "foreach")
        return encoder, stacked, gates, gradient, optimizer

    def step(self, group: Sequence[Member], data: TorchData, rows) -> list[float]:
        """Take one step of every member of a group; return their losses."""
        encoder, weights, gates, gradient, optimizer = self._state[tuple(group)]
        tokens = {f: data.tokens[f][rows] for f in encoder.families}
        grads, losses = gradient(
            weights, gates, tokens, data.real[rows], data.labels[rows]
        )
        for name, weight in weights.items():
            weight.grad = grads[name]
        optimizer.step()
        return losses.tolist()


class TorchContestant:
    """The loop or the stacked members as a contestant of `beatrice bench train`."""

    def __init__(
        self,
        workload: Workload,
        setting: Setting,
        members: Sequence[Member],
        folder: Path,
        *,
        stacked: bool,
    ) -> None:
        """Read initial weights from `folder`."""
        torch.set_num_threads(setting.n_threads)
        self.workload = workload
        self.setting = setting
        self.members = members
        self.folder = folder
        self.kind = Stacked if stacked else Loop

    def _start(self, workload: Workload, members: Sequence[Member]) -> Loop | Stacked:
        # Seeds beyond those that were written start like the first: as costly.
        written = self.folder.glob("*.safetensors")
        seeds = {int(path.stem.split("-")[1]) for path in written}
        weights = {
            (subset, seed): load_file(
                weights_file(self.folder, (subset, seed if seed in seeds else 0))
            )
            for subset, seed in members
        }
        return self.kind(workload, self.setting, weights)

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return the losses of steps on one batch; it is not parted here."""
        data = TorchData.made_up(workload, workload.batch_size, seed=1)
        members = [m for m in self.members if weights_file(self.folder, m).exists()]
        trainer = self._start(workload, members)
        return train(trainer, data, n_steps, workload.batch_size)

    def prepare(self) -> None:
        """Make the data and weights; compile by a step of every member."""
        work = self.workload
        self._data = TorchData.made_up(work, work.n_examples, seed=2)
        self._trainer = self._start(work, self.members)
        train(self._trainer, self._data, 1, work.batch_size)

    def turn(self) -> None:
        """Train every member for `n_steps` batches."""
        train(
            self._trainer, self._data, self.workload.n_steps, self.workload.batch_size
        )


def train(
    trainer: Loop | Stacked, data: TorchData, n_steps: int, batch_size: int
) -> Losses:
    """Train every member for `n_steps` batches, in the order of the data.

    Returns:
      The loss of every step, by member.
    """
    losses: Losses = {}
    for group in trainer.groups:
        for step in range(n_steps):
            first = step * batch_size % len(data.labels)
            # Gathered by number, as shuffled rows have to be.
            rows = torch.arange(first, first + batch_size)
            found = trainer.step(group, data, rows)
            for member, loss in zip(group, found, strict=True):
                losses.setdefault(member, []).append(loss)
    return losses
