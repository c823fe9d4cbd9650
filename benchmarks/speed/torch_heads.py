"""The fusion head in PyTorch, one head after another: what selection is timed against.

The same function, protocol and stopping rule as `model.fusion` and `fit.loop`,
at a set's own width: no empty slots.
"""

import itertools

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, layer_norm

from jaxprobe.config import FusionConfig, TrainConfig

EPSILON = 1e-6  # Flax's LayerNorm


def rows_of_set(outputs: np.ndarray) -> torch.Tensor:
    """Return what a set's encoders say as rows, and how far each two are apart.

    Args:
      outputs: `[n_members, d_output, n_examples]`, see `head_inputs`.

    Returns:
      `[n_examples, n_members * d_output + n_pairs]`.
    """
    slots = torch.from_numpy(np.ascontiguousarray(outputs.swapaxes(1, 2)))
    scores = slots[..., -1]
    pairs = itertools.combinations(range(len(scores)), 2)
    differences = [(scores[a] - scores[b]).abs()[:, None] for a, b in pairs]
    return torch.cat([*slots, *differences], dim=1).contiguous()


def apply_head(weights: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return `[n_examples]` logits."""
    x = rows @ weights["kernel"] + weights["bias"]
    width = (weights["bias"].shape[0],)
    x = layer_norm(x, width, weights["norm_scale"], weights["norm_bias"], EPSILON)
    x = gelu(x, approximate="tanh")
    return (x @ weights["out_kernel"] + weights["out_bias"])[:, 0]


def _initial(d_row: int, n_pairs: int, hidden: int) -> dict[str, torch.Tensor]:
    kernel = torch.randn(d_row, hidden) * d_row**-0.5
    kernel[d_row - n_pairs :] = 0.0
    weights = {
        "kernel": kernel,
        "bias": torch.zeros(hidden),
        "norm_scale": torch.ones(hidden),
        "norm_bias": torch.zeros(hidden),
        "out_kernel": torch.randn(hidden, 1) * hidden**-0.5,
        "out_bias": torch.zeros(1),
    }
    return {name: w.requires_grad_() for name, w in weights.items()}


def _hidden_rows(rows: torch.Tensor, n_members: int, rate: float) -> torch.Tensor:
    """Hide whole encoders at random, never all of them."""
    n_pairs = n_members * (n_members - 1) // 2
    draws = torch.rand(rows.shape[0], n_members)
    keep = draws >= rate
    last = torch.nn.functional.one_hot(draws.argmax(dim=1), n_members).bool()
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
) -> tuple[float, int]:
    """Train one head; see `jaxprobe.fit.loop.fit` for the protocol.

    Returns:
      The best validation AUROC, and the number of epochs run.
    """
    rows, labels = train
    n_pairs = n_members * (n_members - 1) // 2
    weights = _initial(rows.shape[1], n_pairs, shape.hidden)
    optimizer = torch.optim.AdamW(
        weights.values(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        fused=True,
    )
    best, epochs_since_best, epoch = -1.0, 0, 0
    while epoch < config.max_epochs and epochs_since_best < config.patience:
        for where in torch.randperm(len(rows)).split(config.batch_size):
            batch = _hidden_rows(rows[where], n_members, shape.encoder_dropout)
            loss = binary_cross_entropy_with_logits(
                apply_head(weights, batch), labels[where]
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            logits = apply_head(weights, valid[0]).numpy()
        auroc = float(roc_auc_score(valid[1], logits))
        epochs_since_best = 0 if auroc > best else epochs_since_best + 1
        best, epoch = max(best, auroc), epoch + 1
        if epochs_since_best and epochs_since_best % config.lr_patience == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
    return best, epoch
