"""`beatrice bench train`: what the training grid is worth beside PyTorch.

Five methods train the same encoders: (a) the grid as a run trains it, members side by
side; (b) a PyTorch loop over the encoders; (c) `torch.func.vmap` over the seeds of one
subset, which have the same widths; (d) the grid's members one at a time; (e) the grid
in mixed precision. From the same weights and batches all must give the same losses.
Then they take turns, so that a busy machine slows all of them, and each round measures
the fp32 peak of matrix products beside them. Every method has processes of its own,
with its own threads, compiler and memory, and waits without a load while another one is
timed.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.numpy import load_file
from torch.func import grad_and_value, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from beatrice.benchmarks.bench.commands import (
    AS_JSON,
    MIB,
    Remote,
    RowPrinter,
)
from beatrice.benchmarks.bench.grid import (
    Grid,
    Losses,
    machine,
    made_up_features,
    microworld,
    paper,
    weights_file,
)
from beatrice.benchmarks.bench.torch_encoder import (
    Arrays,
    Convolution,
    Noise,
    TorchEncoder,
    Weights,
    apply_encoder,
    encode_span,
    weights_of,
)
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.memory import begin_peak
from beatrice.extract.run.share import Share
from beatrice.jaxprobe.config import XLA_FLAGS
from beatrice.jaxprobe.families import subset_index
from beatrice.jaxprobe.grid import Member
from beatrice.jaxprobe.memory import (
    Workload,
    families_of,
    turn_flops,
)


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
        groups.setdefault(subset, []).append(Member(subset, seed))
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
            weights_here = {
                name: torch.from_numpy(x).requires_grad_()
                for name, x in weights_of(arrays, encoder).items()
            }
            self._state[member] = (
                encoder,
                weights_here,
                _optimizer(weights_here, workload, "fused"),
            )

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
            weights_here = [weights_of(weights[member], encoder) for member in group]
            stacked = {
                name: torch.from_numpy(np.stack([x[name] for x in weights_here]))
                for name in weights_here[0]
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
                weights_file(self.folder, Member(subset, seed if seed in seeds else 0))
            )
            for subset, seed in members
        }
        return self.kind(workload, self.setting, weights)

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return the losses of steps on one batch, which is not split here."""
        data = TorchData.made_up(workload, workload.batch_size, seed=1)
        members = [m for m in self.members if weights_file(self.folder, m).exists()]
        trainer = self._start(workload, members)
        return train_torch(trainer, data, n_steps, workload.batch_size)

    def prepare(self) -> None:
        """Make the data and weights; compile by a step of every member."""
        work = self.workload
        self._data = TorchData.made_up(work, work.n_examples, seed=2)
        self._trainer = self._start(work, self.members)
        train_torch(self._trainer, self._data, 1, work.batch_size)
        begin_peak()

    def turn(self) -> None:
        """Train every member for `n_steps` batches."""
        work = self.workload
        train_torch(self._trainer, self._data, work.n_steps, work.batch_size)


def train_torch(
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
            step_losses = trainer.step(group, data, rows)
            for member, loss in zip(group, step_losses, strict=True):
                losses.setdefault(member, []).append(loss)
    return losses


KINDS = {
    "grid": "(a) grid, two members side by side",
    "loop": "(b) PyTorch, loop over the encoders",
    "vmap": "(c) PyTorch, torch.func.vmap over a subset's seeds",
    "alone": "(d) JAX, encoders one at a time",
    "mixed": "(e) grid, products in bfloat16",
}
HEAD = (
    "method, encoder-steps/s, GFLOP/s, share of fp32 peak, (a) is faster by, peak MiB, "
    "largest loss difference"
).split(", ")
# Of losses near 0.7 after a few steps: fp32 sums in another order, and Adam's division
# makes a small difference of a small gradient a difference of a whole step.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2  # the same, with operands of eight bits
N_THREADS = 2  # members side by side, and threads of the products' peak
_TRIED_ON = ("HPR", "HRA")  # encoders of middling cost
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckSize:
    """How many steps on one batch, of how many seeds of a subset, compare losses."""

    n_examples: int = 32
    n_microbatches: int = 2
    n_steps: int = 4
    n_seeds: int = 2


def split_members(
    workload: Workload, groups: Sequence[Sequence[Member]], n_processes: int
) -> list[list[Member]]:
    """Split groups of members among processes that have about as much to do."""
    cost = functools.partial(turn_flops, workload)
    shares = [Share(rank, n_processes) for rank in range(n_processes)]
    return [list(itertools.chain(*share.mine(groups, cost))) for share in shares]


class Method:
    """One way to train: its processes, each with its share of the members."""

    def __init__(
        self,
        kind: str,
        workload: Workload,
        members: Sequence[Member],
        folder: Path,
        setting: Setting | None = None,
    ) -> None:
        """Start the processes; `setting` is PyTorch's, None for JAX.

        The folder has the initial weights, and what JAX compiles: several methods run
        the same executables, and one compiles them.
        """
        self.kind = kind
        self.workload = workload
        is_stacked = kind == "vmap"
        groups = by_subset(members) if is_stacked else [[member] for member in members]
        n_processes, n_threads = 1, os.cpu_count()
        if setting is not None:
            n_processes, n_threads = setting.n_processes, setting.n_threads
        environment = {
            "OMP_NUM_THREADS": str(n_threads),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", XLA_FLAGS["demo"]),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        }
        at_once = 1 if kind == "alone" else N_THREADS
        self._trainers = [
            Remote(environment, Grid, workload, share, at_once)
            if setting is None
            else Remote(
                environment, TorchTrainer, workload, setting, share, folder, kind
            )
            for share in split_members(workload, groups, n_processes)
        ]

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        """Call every process's trainer, and wait for all of them."""
        waited = [trainer.call(name, *arguments) for trainer in self._trainers]
        try:
            return [future.result() for future in waited]
        except Exception as error:
            raise ValueError(
                f"the process that trains by {self.kind!r} has failed: {error}"
            ) from error

    def losses(self, size: CheckSize) -> Losses:
        """Return losses of steps on one batch, of every member with given weights."""
        work = self.workload.quiet()
        work = dataclasses.replace(work, batch_size=size.n_examples, n_steps=1)
        parts = self._all("losses", work, size.n_steps, size.n_microbatches)
        every = {member: x for share in parts for member, x in share.items()}
        return {m: x for m, x in every.items() if m[1] < size.n_seeds}

    def prepare(self) -> None:
        """Make data and weights, and compile."""
        self._all("prepare")

    def turn(self) -> float:
        """Train every member for the workload's steps; return seconds."""
        began = time.perf_counter()
        self._all("turn")
        return time.perf_counter() - began

    def peak_mib(self) -> float:
        """Return peak memory above the libraries, summed over the processes."""
        return sum(trainer.peak().result() for trainer in self._trainers) / MIB

    def close(self) -> None:
        """End the processes."""
        for trainer in self._trainers:
            trainer.close()


def fastest(kind: str, workload: Workload, folder: Path, note: Note) -> Setting:
    """Return PyTorch's fastest setting for the encoders, found by trying.

    Each of `CHANGES` in turn is taken if it is faster: trying all combinations would
    take longer than what is measured. A setting that does not run here is passed over.
    """
    members = [
        Member(subset_index(x), s) for x in _TRIED_ON for s in range(workload.n_seeds)
    ]

    def rate(setting: Setting) -> float:
        """GFLOP/s, the better of two short turns."""
        method = Method(kind, workload, members, folder, setting)
        with contextlib.closing(method):
            method.prepare()
            seconds = min(method.turn() for _ in range(2))
        gflops = turn_flops(workload, members) / seconds / 1e9
        note(f"{kind}: {setting.text()}: {gflops:.1f} GFLOP/s")
        return gflops

    best, highest = FASTEST[kind], rate(FASTEST[kind])
    for change in CHANGES[kind]:
        new = dataclasses.replace(best, **change)
        try:
            gflops = rate(new) if new != best else 0.0
        except ValueError as error:
            note(f"{kind}: {new.text()}: {error}")
            continue
        if gflops > highest:
            best, highest = new, gflops
    return best


def largest_difference(ours: Losses, theirs: Losses) -> float:
    """Return the largest difference of two methods' losses."""
    if {m: len(x) for m, x in ours.items()} != {m: len(x) for m, x in theirs.items()}:
        raise ValueError(
            f"one method has trained {sorted(ours)}, another {sorted(theirs)}, or for "
            "another number of steps; their losses cannot be compared"
        )
    # NumPy's maximum, which a NaN goes through; Python's passes over it.
    every = [np.abs(np.subtract(x, theirs[m])).max() for m, x in ours.items()]
    return float(np.max(every))


def require_same_losses(by_method: dict[str, Losses]) -> dict[str, float]:
    """Return each method's largest difference from the grid."""
    grid = by_method["grid"]
    differences = {
        k: largest_difference(grid, losses) for k, losses in by_method.items()
    }
    for kind, difference in differences.items():
        tolerance = MIXED_TOLERANCE if kind == "mixed" else TOLERANCE
        if not difference <= tolerance:  # so that NaN fails
            raise ValueError(
                f"losses of {kind!r} differ from the grid's by {difference:.2g} from "
                f"the same weights and batches, more than {tolerance:g}: the timing "
                "would compare two things"
            )
    moved = float(np.min([abs(x[0] - x[-1]) for x in grid.values()]))
    same = [x for kind, x in differences.items() if kind != "mixed"]
    if not moved > 10 * max(TOLERANCE / 10, *same):
        raise ValueError(
            f"a loss moves by {moved:.2g} only, too little to compare trainings by; "
            "take more steps or a higher rate"
        )
    return differences


def product_gflops(n: int = 2048, n_repeats: int = 4) -> float:
    """Return the best rate of a square fp32 matrix product, in GFLOP/s."""
    torch.set_num_threads(N_THREADS)
    a, b = torch.rand(n, n), torch.rand(n, n)
    out, best = torch.empty(n, n), float("inf")
    for _ in range(n_repeats + 1):  # the first one starts the threads
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best / 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCost:
    """One method: a row of the table; rates, shares and ratios are medians over rounds.

    `steps_per_second` counts encoder-steps, `peak_share` is of the rate of matrix
    products in the same round, `ratio` the grid's speed over this one's, and memory
    stands above the libraries, data included.
    """

    kind: str
    setting: str
    steps_per_second: float
    gflops: float
    peak_share: float
    ratio: float
    peak_mib: float
    loss_difference: float
    peak_gflops: float

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `HEAD`."""
        return [
            f"{KINDS[self.kind]}{': ' if self.setting else ''}{self.setting}",
            f"{self.steps_per_second:.1f}",
            f"{self.gflops:.1f}",
            f"{self.peak_share:.0%}",
            f"{self.ratio:.2f}",
            f"{self.peak_mib:.0f}",
            f"{self.loss_difference:.1g}",
        ]


def _take_turns(
    methods: Sequence[Method], n_rounds: int, note: Note
) -> Iterator[tuple[dict[str, float], float]]:
    """Yield each round's seconds by method, and its rate of products in GFLOP/s."""
    for method in methods:
        note(f"{method.kind}: compiles")
        method.prepare()
    for i in range(n_rounds):
        note(f"round {i + 1} of {n_rounds}")
        peak = product_gflops()
        first = i % len(methods)  # another one begins in each round
        order = [*methods[first:], *methods[:first]]
        yield {method.kind: method.turn() for method in order}, peak


def measure(
    workload: Workload,
    *,
    n_rounds: int,
    check: CheckSize | None = None,
    search: bool = True,
    note: Note = lambda text: None,
) -> list[TrainCost]:
    """Check and time the methods; return a row of each.

    Args:
      workload: what is trained.
      n_rounds: turns of each.
      check: how losses are compared.
      search: whether PyTorch's fastest setting is looked for.
      note: told what is going on.
    """
    check = check or CheckSize()
    n_steps = workload.n_steps * len(workload.members)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        written = [m for m in workload.members if m[1] < check.n_seeds]
        Grid(workload, written, at_once=1).save_weights(folder)
        chosen = dict(FASTEST)
        if search:
            chosen = {x: fastest(x, workload, folder, note) for x in FASTEST}
        methods = []
        for kind in KINDS:
            work = workload.mixed() if kind == "mixed" else workload
            method = Method(kind, work, workload.members, folder, chosen.get(kind))
            methods.append(stack.enter_context(contextlib.closing(method)))
        note("losses")
        differences = require_same_losses({x.kind: x.losses(check) for x in methods})
        rounds = list(_take_turns(methods, n_rounds, note))
        peaks = {method.kind: method.peak_mib() for method in methods}
    flops = turn_flops(workload, workload.members)
    products = np.array([rate for _, rate in rounds])
    grid = np.array([seconds["grid"] for seconds, _ in rounds])
    rows = []
    for kind in KINDS:
        turn_seconds = np.array([seconds[kind] for seconds, _ in rounds])
        gflops = flops / turn_seconds / 1e9
        rows.append(
            TrainCost(
                kind=kind,
                setting=chosen[kind].text() if kind in chosen else "",
                steps_per_second=n_steps / float(np.median(turn_seconds)),
                gflops=float(np.median(gflops)),
                peak_share=float(np.median(gflops / products)),
                ratio=float(np.median(turn_seconds / grid)),
                peak_mib=peaks[kind],
                loss_difference=differences[kind],
                peak_gflops=float(np.median(products)),
            )
        )
    return rows


@click.command()
@click.option("--paper", "is_paper", is_flag=True, help="Paper widths, d=4096.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    help="Turns of each.",
)
@click.option(
    "--search/--no-search", default=True, help="For PyTorch's fastest setting."
)
@AS_JSON
def train(is_paper: bool, rounds: int, search: bool, as_json: bool) -> None:
    """Time the training grid beside PyTorch and beside its members one at a time.

    All must give the same losses from the same weights before they are timed; the grid
    in mixed precision, which is timed beside them, roughly the same.

    Example: beatrice bench train --paper
    """
    quiet()
    work = paper(1) if is_paper else microworld(8)
    rows = measure(work, n_rounds=rounds, search=search, note=Progress().note)
    printer = RowPrinter(as_json)
    printer.head(HEAD)
    for row in rows:
        printer.row(row)
    printer.not_measured(["GPU, all of them"], HEAD)
    printer.text(
        f"\n{machine()}; fp32 peak {rows[0].peak_gflops:.0f} GFLOP/s (products of 2048 "
        f"x 2048, the median over rounds); {len(work.members)} encoders, "
        f"{work.n_tokens} positions an example, batches of {work.batch_size}."
    )
