"""Fusion heads trained per second: one round of the search beside a PyTorch loop.

Outputs are made up, of the sizes of a run. Both sides train the same sets by the same
protocol in one process, in turns, so that a busy machine slows both. Before anything is
timed, PyTorch must give the logits of heads that JAX has trained.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.speed.torch_heads import apply_head, fit_head, rows_of_set
from jaxprobe.config import FusionConfig, TrainConfig
from jaxprobe.model import fusion
from jaxprobe.model.fusion import PoolOutputs, head_inputs
from selection.greedy import Heads, fit_sets

TOLERANCE = 1e-4  # of logits, fp32, sums in another order


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectCost:
    """Sizes of the benchmark; defaults are the microworld's."""

    n_pool: int = 30
    n_seeds: int = 3
    n_train: int = 6000
    n_valid: int = 1200
    d_pooled: int = 32
    hidden: int = 16
    n_members: int = 3
    n_epochs: int = 8
    n_torch: int = 24  # heads the loop trains per turn; its rate does not need more
    n_turns: int = 3


def made_up_codes(config: SelectCost, n_examples: int, seed: int) -> PoolOutputs:
    """Return codes in which every encoder knows something of the answer."""
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
    )


def _rows(codes: PoolOutputs, members: tuple[int, ...], seed: int) -> torch.Tensor:
    return rows_of_set(np.asarray(codes.outputs[seed])[np.asarray(members)])


def _torch_weights(params: Any, n_members: int, n_slots: int) -> dict:
    """Return a head's weights without those of the empty slots."""
    tree = params["params"]
    d_output = tree["kernel"].shape[0] // n_slots
    _, second = np.triu_indices(n_slots, 1)
    kernel = np.concatenate(
        [tree["kernel"][: n_members * d_output], tree["gaps"][second < n_members]]
    )
    arrays = {
        "kernel": kernel,
        "bias": tree["bias"],
        "norm_scale": tree["norm"]["scale"],
        "norm_bias": tree["norm"]["bias"],
        "out_kernel": tree["out"]["kernel"].T,
        "out_bias": tree["out"]["bias"],
    }
    return {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}


def largest_difference(
    heads: Heads, sets: list[tuple[int, ...]], codes: PoolOutputs, shape: FusionConfig
) -> float:
    """Return the largest difference of validation logits between JAX and PyTorch."""
    gaps = []
    for i, members in enumerate(sets[:3]):
        params = jax.tree.map(lambda x, i=i: x[i, 0], heads.params)
        slots, mask = fusion.slots_of(members, shape.n_slots)
        head = fusion.FusionHead(shape)
        ours = fusion.apply_head(params, slots, mask, codes, np.int32(0), head=head)
        weights = _torch_weights(params, len(members), shape.n_slots)
        theirs = apply_head(weights, _rows(codes, members, 0)).numpy()
        gaps.append(np.abs(np.asarray(ours) - theirs).max())
    return float(np.max(gaps))  # NaN if one is


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(config: SelectCost) -> dict[str, float]:
    """Time one round of the search and the loop over some of its heads, in turns.

    Returns:
      Heads per second of both, their ratio (median over turns), the mean validation
      AUROC of both, and the largest difference of logits from the same weights.

    Raises:
      ValueError: the two sides do not compute the same head.
    """
    train = made_up_codes(config, config.n_train, 1)
    valid = made_up_codes(config, config.n_valid, 2)
    shape = FusionConfig(hidden=config.hidden)
    protocol = TrainConfig(
        learning_rate=3e-3, max_epochs=config.n_epochs, patience=config.n_epochs,
        n_microbatches=1,
    )  # fmt: skip
    first = tuple(range(config.n_members - 1))
    sets = [(*first, c) for c in range(len(first), config.n_pool)]

    def ours() -> Heads:
        return fit_sets(
            sets, train, valid, config=shape, train_config=protocol,
            n_calls=config.n_pool,
        )  # fmt: skip

    heads = ours()  # compiles
    difference = largest_difference(heads, sets, valid, shape)
    if not difference <= TOLERANCE:  # so that NaN fails
        raise ValueError(
            f"PyTorch's head differs from JAX's by {difference:.2g} with the same "
            f"weights, more than {TOLERANCE:g}: the timing would compare two things"
        )
    labels = torch.from_numpy(np.array(train.labels))
    truth = np.asarray(valid.labels)
    found: list[float] = []

    def loop() -> None:
        for members in sets[: config.n_torch]:
            rows = [_rows(codes, members, 0) for codes in (train, valid)]
            auroc, _ = fit_head(
                (rows[0], labels), (rows[1], truth), len(members), shape, protocol
            )
            found.append(auroc)

    n_ours, n_loop = len(sets) * config.n_seeds, min(config.n_torch, len(sets))
    loop_threads = _best_threads(loop, n_loop)
    torch.set_num_threads(loop_threads)
    turns = [
        (n_ours / _seconds(ours), n_loop / _seconds(loop))
        for _ in range(config.n_turns)
    ]
    return {
        "heads_per_second": statistics.median(a for a, _ in turns),
        "torch_heads_per_second": statistics.median(b for _, b in turns),
        "ratio": statistics.median(a / b for a, b in turns),
        "torch_threads": loop_threads,
        "auroc": float(heads.info.best_auroc[: config.n_torch, 0].mean()),
        "torch_auroc": float(np.mean(found)),
        "largest_difference": difference,
    }


def _best_threads(loop: Callable[[], None], n_heads: int) -> int:
    """Return the number of threads with which the loop is fastest."""
    seconds = {}
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        seconds[n_threads] = _seconds(loop)
    return min(seconds, key=seconds.__getitem__)
