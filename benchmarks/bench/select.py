"""`beatrice bench select`: fusion heads per second in a search round, against PyTorch.

Outputs are random, with the sizes of a run. First, PyTorch must reproduce the logits of
heads trained by JAX; then both sides take turns training the same sets with the same
protocol. PyTorch trains one head after another, with the function, protocol and
stopping rule of `jaxprobe.fusion` and `jaxprobe.loop`, at each set's own width, without
empty slots. Both use equally many CPU threads: the search trains that many parts in
parallel, and PyTorch that many heads, in single-threaded processes.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from beatrice.benchmarks.bench.commands import (
    N_THREADS,
    Row,
    RowPrinter,
    fresh_process,
    preset_of,
    take_turns,
    widths_of,
)
from beatrice.extract.run.verbs import AS_JSON
from beatrice.jaxprobe import fusion
from beatrice.jaxprobe.config import FusionConfig, TrainConfig, set_compiler
from beatrice.jaxprobe.fusion import PoolOutputs, head_inputs
from beatrice.selection.greedy import Heads, fit_sets

TOLERANCE = 1e-4  # for fp32 logits, whose sums differ in order


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectSizes:
    """Sizes of the benchmark; defaults are those of the microworld."""

    n_pool: int = 30
    n_seeds: int = 3
    n_train: int = 6000
    n_valid: int = 1200
    d_pooled: int = 32
    hidden: int = 16
    n_members: int = 3
    n_epochs: int = 8
    n_torch: int = 24  # heads that the loop trains per turn, enough for its rate
    n_turns: int = 3

    @property
    def protocol(self) -> TrainConfig:
        """The training protocol, without early stopping."""
        return TrainConfig(
            learning_rate=3e-3,
            max_epochs=self.n_epochs,
            patience=self.n_epochs,
            n_microbatches=1,
        )


WIDTHS = {
    "microworld": SelectSizes(),
    "paper": SelectSizes(
        d_pooled=256, hidden=128, n_pool=15, n_torch=6, n_epochs=4, n_turns=2
    ),
}


def rows_of_set(outputs: np.ndarray) -> torch.Tensor:
    """Return a set's member outputs as rows, with differences of each two scores.

    Maps `[n_members, d_output, n_examples]`, see `head_inputs`, to
    `[n_examples, n_members * d_output + n_pairs]`.
    """
    slots = torch.from_numpy(np.ascontiguousarray(outputs.swapaxes(1, 2)))
    scores = slots[..., -1]
    pairs = itertools.combinations(range(len(scores)), 2)
    differences = [(scores[a] - scores[b]).abs()[:, None] for a, b in pairs]
    return torch.cat([*slots, *differences], dim=1).contiguous()


class TorchHead(torch.nn.Module):
    """A head on rows `[n_examples, d_row]`: mean logit plus a correction, initially 0.

    For rows see `rows_of_set`; a score of zero means that the encoder is masked.
    """

    @torch.no_grad()
    def __init__(self, d_row: int, n_members: int, hidden: int) -> None:
        """Draw the first layer's weights, and set those of the last to zero."""
        super().__init__()
        n_pairs = n_members * (n_members - 1) // 2
        width = (d_row - n_pairs) // n_members
        self.scores = slice(width - 1, d_row - n_pairs, width)
        first, last = torch.nn.Linear(d_row, hidden), torch.nn.Linear(hidden, 1)
        first.weight.normal_(0.0, d_row**-0.5)
        first.weight[:, d_row - n_pairs :] = 0.0
        for zero in (first.bias, last.weight, last.bias):
            zero.zero_()
        norm = torch.nn.LayerNorm(hidden, eps=1e-6)  # Flax's
        self.mlp = torch.nn.Sequential(first, norm, torch.nn.GELU("tanh"), last)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits `[n_examples]`."""
        scores = rows[:, self.scores]
        seen = (scores > 0).float()  # a masked encoder has score zero
        logits = torch.logit(scores, eps=1e-6) * seen
        mean = logits.sum(dim=1) / seen.sum(dim=1).clamp_min(1.0)
        return mean + self.mlp(rows)[:, 0]


def _hidden_rows(rows: torch.Tensor, n_members: int, rate: float) -> torch.Tensor:
    """Mask whole encoders at random, but never all of a row."""
    n_pairs = n_members * (n_members - 1) // 2
    draws = torch.rand(rows.shape[0], n_members)
    last = one_hot(draws.argmax(dim=1), n_members).bool()
    keep = draws >= rate
    keep = torch.where(keep.any(dim=1, keepdim=True), keep, last).float()
    width = (rows.shape[1] - n_pairs) // n_members
    pairs = itertools.combinations(range(n_members), 2)
    both = [(keep[:, a] * keep[:, b])[:, None] for a, b in pairs]
    return rows * torch.cat([keep.repeat_interleave(width, dim=1), *both], dim=1)


def fit_head(
    train: tuple[torch.Tensor, torch.Tensor],
    valid: tuple[torch.Tensor, np.ndarray],
    n_members: int,
    shape: FusionConfig,
    config: TrainConfig,
) -> float:
    """Train one head as `jaxprobe.loop.fit` does; return its best validation AUROC."""
    rows, labels = train
    head = TorchHead(rows.shape[1], n_members, shape.hidden)
    optimizer = torch.optim.AdamW(
        head.parameters(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        fused=True,
    )
    best, epochs_since_best = -1.0, 0
    for _ in range(config.max_epochs):
        for where in torch.randperm(len(rows)).split(config.batch_size):
            batch = _hidden_rows(rows[where], n_members, shape.encoder_dropout)
            loss = binary_cross_entropy_with_logits(head(batch), labels[where])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            logits = head(valid[0]).numpy()
        auroc = float(roc_auc_score(valid[1], logits))
        epochs_since_best = 0 if auroc > best else epochs_since_best + 1
        best = max(best, auroc)
        if epochs_since_best >= config.patience:
            break
        lr_patience = config.lr_patience or config.max_epochs + 1
        if epochs_since_best and epochs_since_best % lr_patience == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
    return best


def made_up_outputs(config: SelectSizes, n_examples: int, seed: int) -> PoolOutputs:
    """Return random outputs in which every encoder has some information on labels."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n_examples) < 0.5
    shape = (config.n_seeds, config.n_pool, n_examples)
    skill = np.random.default_rng(0).uniform(0, 1, (*shape[:2], 1))
    logits = rng.standard_normal(shape) + skill * (2 * labels - 1)
    pooled = rng.standard_normal((*shape, config.d_pooled))
    pooled[..., 0] += logits
    return PoolOutputs(
        head_inputs(jnp.asarray(pooled, jnp.float32), jnp.asarray(logits, jnp.float32)),
        jnp.asarray(labels, jnp.float32),
        jnp.ones(n_examples, jnp.float32),
        jnp.arange(n_examples, dtype=jnp.int32),
    )


def made_up_splits(config: SelectSizes) -> list[PoolOutputs]:
    """Return random outputs for training and validation."""
    sizes = (config.n_train, 1), (config.n_valid, 2)
    return [made_up_outputs(config, n, seed) for n, seed in sizes]


@functools.cache
def loop_splits(config: SelectSizes) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the first seed's outputs and labels for training and validation.

    They are NumPy arrays, cached per process: JAX would copy the pool for every head.
    """
    splits = made_up_splits(config)
    return [(np.array(x.outputs[0]), np.array(x.labels)) for x in splits]


def fit_in_loop(config: SelectSizes, sets: Sequence[tuple[int, ...]]) -> list[float]:
    """Train the heads of sets one after another on one thread; return their AUROC."""
    torch.set_num_threads(1)
    shape, (train, valid) = FusionConfig(hidden=config.hidden), loop_splits(config)
    labels, aurocs = torch.from_numpy(train[1]), []
    for members in sets:
        ours, theirs = (rows_of_set(x[list(members)]) for x, _ in (train, valid))
        pairs = (ours, labels), (theirs, valid[1])
        aurocs.append(fit_head(*pairs, len(members), shape, config.protocol))
    return aurocs


def _as_torch(params: Any, n_members: int, n_slots: int) -> TorchHead:
    """Return a trained head in PyTorch, without the weights of empty slots."""
    tree = params["params"]
    d_output = tree["kernel"].shape[0] // n_slots
    _, second = np.triu_indices(n_slots, 1)
    kernel = np.concatenate(
        [tree["kernel"][: n_members * d_output], tree["gaps"][second < n_members]]
    )
    arrays = {
        "0.weight": kernel.T,
        "0.bias": tree["bias"],
        "1.weight": tree["norm"]["scale"],
        "1.bias": tree["norm"]["bias"],
        "3.weight": tree["out_kernel"][None],
        "3.bias": tree["out_bias"][None],
    }
    head = TorchHead(len(kernel), n_members, len(tree["bias"]))
    head.mlp.load_state_dict({name: torch.tensor(x) for name, x in arrays.items()})
    return head


def largest_difference(
    heads: Heads, sets: list[tuple[int, ...]], outputs: PoolOutputs, shape: FusionConfig
) -> float:
    """Return the largest difference of validation logits between JAX and PyTorch."""
    gaps, pool = [], np.asarray(outputs.outputs[0])
    head = fusion.FusionHead(shape)
    for i, members in enumerate(sets[:3]):
        params = jax.tree.map(lambda x, i=i: x[i, 0], heads.params)
        slots, mask = fusion.slots_of(members, shape.n_slots)
        ours = fusion.apply_head(params, slots, mask, outputs, np.int32(0), head=head)
        twin = _as_torch(params, len(members), shape.n_slots)
        with torch.no_grad():
            theirs = twin(rows_of_set(pool[list(members)])).numpy()
        gaps.append(np.abs(np.asarray(ours) - theirs).max())
    return float(np.max(gaps))  # NaN if one is


def measure(widths: str, config: SelectSizes) -> Row:
    """Time a round of the search and a loop over some of its heads, in turns.

    Rates and their ratio are medians over turns; AUROC is the heads' mean on validation
    rows.
    """
    train, valid = made_up_splits(config)
    shape = FusionConfig(hidden=config.hidden)
    first = tuple(range(config.n_members - 1))
    sets = [(*first, c) for c in range(len(first), config.n_pool)]

    def search() -> Heads:
        return fit_sets(
            sets,
            train,
            valid,
            config=shape,
            train_config=config.protocol,
            n_calls=config.n_pool,
            n_at_once=N_THREADS,
        )

    heads = search()  # compiles
    difference = largest_difference(heads, sets, valid, shape)
    if not difference <= TOLERANCE:  # so that NaN fails
        raise ValueError(
            f"PyTorch's head differs from JAX's by {difference:.2g} with the same "
            f"weights, more than {TOLERANCE:g}, so their times cannot be compared"
        )
    looped, aurocs = sets[: config.n_torch], []
    shares = [looped[i::N_THREADS] for i in range(N_THREADS)]
    environment = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(fresh_process(environment)) for _ in shares]

        def loop() -> None:
            pairs = zip(processes, shares, strict=True)
            waited = [process.submit(fit_in_loop, config, x) for process, x in pairs]
            aurocs.extend(itertools.chain(*(future.result() for future in waited)))

        turns = take_turns([search, loop], config.n_turns)[..., 0]
    n_search, n_loop = len(sets) * config.n_seeds, len(looped)
    rates = np.array([n_search, n_loop]) / turns
    ours, theirs = np.median(rates, axis=0).tolist()
    first_seed = slice(config.n_torch), 0
    return {
        "widths": widths,
        "device": jax.default_backend(),
        "threads of each": N_THREADS,
        "heads/s": ours,
        "PyTorch loop, heads/s": theirs,
        "ratio": float(np.median(rates[:, 0] / rates[:, 1])),
        "AUROC of heads": float(heads.info.best_auroc[first_seed].mean()),
        "of the loop": float(np.mean(aurocs)),
        "largest difference": difference,
    }


@click.command()
@widths_of(WIDTHS)
@AS_JSON
def select(widths: str, as_json: bool) -> None:
    """Time training the heads of one search round against a loop in PyTorch.

    Before they are timed, both sides must give the same logits from the same weights.

    Example: beatrice bench select --widths paper
    """
    os.environ.setdefault("NPROC", str(N_THREADS))  # threads of XLA
    jax.config.update("jax_platforms", "cpu")  # like the loop
    set_compiler(preset_of(widths))
    printer = RowPrinter(as_json)
    printer.row(measure(widths, WIDTHS[widths]))
