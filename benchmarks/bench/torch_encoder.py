"""The combination encoder in PyTorch: what the training grid is timed against.

The function of `jaxprobe.encoder` at an encoder's own widths: only the families that it
reads are projected. Weights are a flat dictionary.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn.functional import dropout, gelu, layer_norm, pad

from beatrice.benchmarks.bench.grid import made_up_features
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.families import N_FAMILIES
from beatrice.jaxprobe.memory import Workload

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
