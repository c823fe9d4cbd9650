"""Training steps of the encoders in PyTorch, one after another or stacked.

Both ways share data, draws and optimiser. The loop trains each encoder by itself;
`torch.func.vmap` trains the seeds of one subset, which have the same widths, with one
call.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.func import grad_and_value, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from beatrice.benchmarks.speed.grid import Losses, made_up_features, weights_file
from beatrice.benchmarks.speed.torch_encoder import (
    Arrays,
    Convolution,
    Noise,
    TorchEncoder,
    Weights,
    apply_encoder,
    encode_span,
    weights_of,
)
from beatrice.extract.run.memory import begin_peak
from beatrice.jaxprobe.fit.work import Member, Workload, families_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How PyTorch is run.

    Attributes:
      n_processes: the members are split among.
      n_threads: of each process.
      convolution: see `TorchEncoder`.
      noise: see `TorchEncoder`.
      compiled: the loop's span function, by `torch.compile`.
    """

    n_processes: int = 1
    n_threads: int = 2
    convolution: Convolution = "product"
    noise: Noise = "inputs"
    compiled: bool = False

    def text(self) -> str:
        """Describe it for the table."""
        how = {"product": "shifted product", "conv1d": "conv1d"}
        where = {"inputs": "at inputs", "projected": "behind projection"}
        return (
            f"{self.n_processes} x {self.n_threads} threads, {how[self.convolution]}, "
            f"noise {where[self.noise]}, {'compiled' if self.compiled else 'eager'}"
        )


# What was fastest at the paper's widths; a search begins with it, and tries changes in
# this order.
_EAGER = Setting(n_processes=2, n_threads=1, noise="projected")
FASTEST = {"loop": dataclasses.replace(_EAGER, compiled=True), "vmap": _EAGER}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "loop": [
        {"noise": "inputs"},
        {"convolution": "conv1d"},
        {"n_processes": 1, "n_threads": 2},
        {"compiled": False},
    ],
    "vmap": [{"noise": "inputs"}, {"n_processes": 1, "n_threads": 2}],
}


def by_subset(members: Iterable[Member]) -> list[list[Member]]:
    """Return the members in groups of one subset's seeds, which one vmap covers."""
    groups: dict[int, list[Member]] = {}
    for subset, seed in members:
        groups.setdefault(subset, []).append((subset, seed))
    return list(groups.values())


def encoder_of(workload: Workload, member: Member, setting: Setting) -> TorchEncoder:
    """Return the function of a member."""
    return TorchEncoder(
        config=workload.encoder,
        families=families_of(member),
        widths=tuple(most for _, most in workload.spans),
        convolution=setting.convolution,
        noise=setting.noise,
    )


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


def _optimizer(weights: Weights, workload: Workload, kind: str) -> torch.optim.AdamW:
    """Return AdamW in its "fused" or its "foreach" form."""
    return torch.optim.AdamW(
        weights.values(),
        lr=workload.learning_rate,
        weight_decay=workload.weight_decay,
        **{kind: True},
    )


class Loop:
    """Encoders one after another; a group is one of them."""

    def __init__(
        self, workload: Workload, setting: Setting, weights: Mapping[Member, Arrays]
    ) -> None:
        """Take initial weights of every member, as `jaxprobe` names them."""
        self.workload = workload
        self.groups = [[member] for member in weights]
        self._span_function = encode_span
        if setting.compiled:
            self._span_function = torch.compile(encode_span, dynamic=False)
        self._state = {}
        for member, arrays in weights.items():
            encoder = encoder_of(workload, member, setting)
            own = {
                name: torch.from_numpy(x).requires_grad_()
                for name, x in weights_of(arrays, encoder).items()
            }
            self._state[member] = encoder, own, _optimizer(own, workload, "fused")

    def step(self, group: Sequence[Member], data: TorchData, rows) -> list[float]:
        """Take one step of a group; return its loss in a list."""
        encoder, weights, optimizer = self._state[group[0]]
        tokens = {f: data.tokens[f][rows] for f in encoder.families}
        logits, _ = apply_encoder(
            weights,
            tokens,
            data.real[rows],
            encoder,
            training=True,
            span_function=self._span_function,
        )
        loss = binary_cross_entropy_with_logits(logits, data.labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return [loss.item()]


class Stacked:
    """Encoders side by side by `torch.func.vmap`; a group is a subset's seeds."""

    def __init__(
        self, workload: Workload, setting: Setting, weights: Mapping[Member, Arrays]
    ) -> None:
        """Take initial weights of every member, as `jaxprobe` names them."""
        self.groups = by_subset(weights)
        self._state = {}
        for group in self.groups:
            encoder = encoder_of(workload, group[0], setting)
            own = [weights_of(weights[member], encoder) for member in group]
            stacked = {
                name: torch.from_numpy(np.stack([x[name] for x in own]))
                for name in own[0]
            }
            optimizer = _optimizer(stacked, workload, "foreach")
            self._state[group[0]] = encoder, stacked, optimizer

    def step(self, group: Sequence[Member], data: TorchData, rows) -> list[float]:
        """Take one step of every member of a group; return their losses."""
        encoder, weights, optimizer = self._state[group[0]]
        tokens = {f: data.tokens[f][rows] for f in encoder.families}
        real, labels = data.real[rows], data.labels[rows]

        def loss(weights: Weights) -> torch.Tensor:
            logits, _ = apply_encoder(weights, tokens, real, encoder, training=True)
            return binary_cross_entropy_with_logits(logits, labels)

        # The batch is shared by the group; what is drawn is each member's own.
        grads, losses = vmap(grad_and_value(loss), randomness="different")(weights)
        for name, weight in weights.items():
            weight.grad = grads[name]
        optimizer.step()
        return losses.tolist()


class TorchTrainer:
    """The loop or the stacked members as a method of `beatrice bench train`."""

    def __init__(
        self,
        workload: Workload,
        setting: Setting,
        members: Sequence[Member],
        folder: Path,
        kind: str,
    ) -> None:
        """Train by "loop" or "vmap"; initial weights are read from `folder`."""
        torch.set_num_threads(setting.n_threads)
        self.workload = workload
        self.setting = setting
        self.members = members
        self.folder = folder
        self.kind = {"loop": Loop, "vmap": Stacked}[kind]

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
        """Return the losses of steps on one batch, which is not split here."""
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
        begin_peak()

    def turn(self) -> None:
        """Train every member for `n_steps` batches."""
        work = self.workload
        train(self._trainer, self._data, work.n_steps, work.batch_size)


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
