"""The forward pass of a detector in Torch, on the backbone's device.

It is a second implementation of the modules trained in JAX and scores all answers,
since it needs no compilation and takes any length. The encoders of a pass, `n_members =
n_seeds * n_kept` in number, run stacked as batched products. It loads no Transformers,
which would take longer than all else that `Probe.predict` does.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, pad

from beatrice.extract.records import Setting
from beatrice.extract.run.console import is_of_machine
from beatrice.extract.signals.precision import exact_products
from beatrice.jaxprobe.config import MatmulDtype
from beatrice.jaxprobe.detector import (
    Detector,
    EncoderBank,
    HeadName,
    Scores,
    SettingHead,
    leaves,
)
from beatrice.jaxprobe.families import Features

_LAYER_NORM_EPSILON = 1e-6  # as in Flax
_GROUP_NORM_EPSILON = 1e-5
_SUREST = 1e-6  # probabilities are clipped to [1e-6, 1 - 1e-6] before a logit
Weights = dict[str, torch.Tensor]


class TorchForward:
    """Scores features with a detector's weights on one device."""

    def __init__(self, detector: Detector, device: torch.device | str = "cpu") -> None:
        """Stack the weights, as float32 even if the backbone uses another type.

        Raises ValueError if the arrays do not fit the detector's settings.
        """
        self.detector = detector
        try:
            self._stack(detector, device)
            for branch in detector.heads:
                passes = detector.passes_of(branch)
                self.score(branch, {w: _blank(detector.banks[w]) for w in passes})
        except (RuntimeError, LookupError, TypeError) as error:
            if is_of_machine(error):  # such as a full GPU
                raise
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"the probe's arrays do not fit its settings ({what}); fit the probe "
                "again"
            ) from error

    def _stack(self, detector: Detector, device: torch.device | str) -> None:
        needs_pooled = any(
            np.any(head.params["params"][name])
            for head in detector.heads.values()
            for name in ("out_kernel", "out_bias")
        )
        self._banks = {
            where: _StackedEncoders(bank, device, needs_pooled)
            for where, bank in detector.banks.items()
        }
        self._heads = {
            id(head): _tensors(head.params["params"], device)
            for head in detector.heads.values()
        }

    @exact_products()
    @torch.inference_mode()
    def score(self, branch: HeadName, passes: Mapping[Setting, Features]) -> Scores:
        """Return a head's scores from the signals of the same answers in each pass."""
        return self.detector.score(
            branch, passes, lambda where, x: self._banks[where](x), self._fuse
        )

    def _fuse(
        self, head: SettingHead, logits: list[torch.Tensor], pooled: list[torch.Tensor]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fuse encoders, see `jaxprobe.fusion.FusionHead`.

        Args:
          head: a head with `n_slots` slots, of which the first `n_selected` are filled.
          logits: for each encoder, `[n_seeds, n_examples]`.
          pooled: for each encoder, `[n_seeds, n_examples, d_pooled]`.
        """
        weights, n = self._heads[id(head)], len(logits)
        p_correct = torch.sigmoid(torch.stack(logits, dim=1))
        inputs = torch.cat([torch.stack(pooled, dim=1), p_correct[..., None]], dim=-1)
        kernel = weights["kernel"].unflatten(1, (head.config.n_slots, -1))[:, :n]
        x = torch.einsum("snbd,sndh->sbh", inputs, kernel)
        first, second = np.triu_indices(head.config.n_slots, 1)
        is_filled = second < n
        gaps = p_correct[:, first[is_filled]] - p_correct[:, second[is_filled]]
        gap_kernel = weights["gaps"][:, np.flatnonzero(is_filled)]
        x = x + torch.einsum("sgb,sgh->sbh", gaps.abs(), gap_kernel)
        x = x + weights["bias"][:, None]
        x = layer_norm(x, x.shape[-1:], eps=_LAYER_NORM_EPSILON)
        x = x * weights["norm/scale"][:, None] + weights["norm/bias"][:, None]
        x = gelu(x, approximate="tanh") @ weights["out_kernel"][..., None]
        mean_logit = torch.logit(p_correct, eps=_SUREST).mean(dim=1)
        fused = torch.sigmoid(x[..., 0] + weights["out_bias"][:, None] + mean_logit)
        return _mean_over_seeds(fused), _mean_over_seeds(p_correct).T


class _StackedEncoders:
    """The encoders of one pass; see `jaxprobe.encoder.Encoder`."""

    def __init__(
        self, bank: EncoderBank, device: torch.device | str, needs_pooled: bool
    ) -> None:
        """Stack the encoders of a bank.

        Args:
          bank: encoders with parameter leaves `[n_seeds, n_kept, …]`.
          device: device for the weights.
          needs_pooled: whether a head reads the pooled vectors. If none does, a network
            that adds nothing to its linear part is not run.
        """
        self.bank, self.device = bank, device
        _, first = next(leaves(bank.params))
        self.shape = tuple(first.shape[:2])
        weights = {
            path: x.flatten(0, 1) for path, x in _tensors(bank.params, device).items()
        }
        self.linear = _weights_below("linear/", weights)
        network = _weights_below("params/", weights)
        self.is_silent = not needs_pooled and not any(
            bool(network[f"mlp_out/{name}"].any()) for name in ("kernel", "bias")
        )
        self.network = {
            path: x.flatten(2).mT if path.endswith("kernel") else x
            for path, x in network.items()
        }
        self.spans = [
            _weights_below(f"span_{s}/", self.network) for s in range(len(bank.spans))
        ]
        subsets = [bank.dims.subset_index(name) for name in bank.names]
        masks = np.tile(bank.dims.subset_masks[subsets], (self.shape[0], 1))
        self.readers = [np.flatnonzero(reads) for reads in masks.T]
        self.is_read = torch.as_tensor(masks, device=device)
        mean, std = bank.standardizer
        self.mean = torch.as_tensor(np.asarray(mean), device=device)
        self.inverse = 1.0 / torch.as_tensor(np.asarray(std), device=device)

    def __call__(self, features: Features) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[n_seeds, n_kept, n_examples]` and pooled `[…, 2 * hidden]`.

        Args:
          features: signals of `n_examples` answers, not yet standardised.
        """
        masks = [torch.as_tensor(m, device=self.device) for m in features.masks]
        spans = [
            self._standardized(torch.as_tensor(x, device=self.device), mask, span)
            for span, (x, mask) in enumerate(zip(features.tokens, masks, strict=True))
        ]
        n_members, n_examples = len(self.is_read), features.n_examples
        logits = torch.zeros(n_members, n_examples, device=self.device)
        pooled = torch.zeros(
            n_members, n_examples, self.bank.config.d_pooled, device=self.device
        )
        if not self.is_silent:
            logits, pooled = self._network(spans, masks)
        if self.linear:
            logits = logits + self._linear(spans, masks)
        return logits.unflatten(0, self.shape), pooled.unflatten(0, self.shape)

    def _standardized(
        self, x: torch.Tensor, mask: torch.Tensor, span: int
    ) -> torch.Tensor:
        """Standardise one span; padding and families not read there become zero."""
        x = torch.where(mask[..., None], (x - self.mean) * self.inverse, 0.0)
        is_answer = span == len(self.bank.spans) - 1
        for family in () if is_answer else self.bank.dims.of_answers:
            x[..., self.bank.dims.slices[family]] = 0.0
        return x

    def _network(
        self, spans: list[torch.Tensor], masks: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[n_members, n_examples]` and pooled `[…, 2 * hidden]`."""
        weights, config = self.network, self.bank.config
        vectors = []
        for x, mask, of_span in zip(spans, masks, self.spans, strict=True):
            vectors.append(self._span(self._projected(x), mask.float(), of_span))
        pairs = itertools.combinations(vectors, 2)
        x = torch.cat([*vectors, *(a - b for a, b in pairs)], dim=-1)
        x = self._product(x, weights["mlp_in/kernel"]) + weights["mlp_in/bias"][:, None]
        x = layer_norm(x, (config.hidden,), eps=_LAYER_NORM_EPSILON)
        x = x * weights["mlp_norm/scale"][:, None] + weights["mlp_norm/bias"][:, None]
        x = self._product(gelu(x, approximate="tanh"), weights["mlp_out/kernel"])
        return (x + weights["mlp_out/bias"][:, None])[..., 0], vectors[-1]

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        """Project to `[n_members, n_examples, n_tokens, n_families * d]`."""
        weights, d = self.network, self.bank.config.projection
        biases = weights["projection_bias"] * self.is_read[..., None]
        shape = (len(self.is_read), *x.shape[:2], biases[0].numel())
        projected = torch.zeros(shape, device=x.device)
        for family, at in enumerate(self.bank.dims.slices):
            members = self.readers[family]
            if not len(members):
                continue
            kernels = weights[f"projection_{family}"][members].flatten(0, 1).T
            y = self._product(x[..., at], kernels).unflatten(-1, (len(members), d))
            projected[members, ..., family * d : (family + 1) * d] = y.movedim(2, 0)
        return projected + biases.flatten(1)[:, None, None]

    def _span(
        self, projected: torch.Tensor, real: torch.Tensor, weights: Weights
    ) -> torch.Tensor:
        """Run the residual blocks of a span and pool, `[n_members, n_examples, 2 * d]`.

        Args:
          projected: `[n_members, n_examples, n_tokens, n_families * projection]`.
          real: `[n_examples, n_tokens]`, 1 on real tokens and 0 on padding.
          weights: the weights of this span.
        """
        config, mask = self.bank.config, real[..., None]

        def layer(x: torch.Tensor, name: str) -> torch.Tensor:
            wide = pad(x, (0, 0, 1, 1))
            beside = torch.cat([wide[:, :, :-2], x, wide[:, :, 2:]], dim=-1)
            y = self._product(beside, weights[f"conv_{name}/kernel"])
            y = (y + weights[f"conv_{name}/bias"][:, None, None]) * mask
            scale, bias = weights[f"norm_{name}/scale"], weights[f"norm_{name}/bias"]
            return _group_norm(y, real, config.n_groups, scale, bias)

        x = self._product(projected, weights["entry_kernel"])
        x = (x + weights["entry_bias"][:, None, None]) * mask
        for block in range(config.n_blocks):
            y = gelu(layer(x, f"{block}_0"), approximate="tanh")
            x = gelu(x + layer(y, f"{block}_1"), approximate="tanh")
        count = real.sum(dim=1)[:, None]
        highest = x.masked_fill(mask == 0, -1e30).amax(dim=2)
        highest = torch.where(count > 0, highest, 0.0)
        return torch.cat([highest, x.sum(dim=2) / count.clamp(min=1.0)], dim=-1)

    def _product(self, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Multiply `[…, n, d_in]` by `[n_members, d_in, d_out]` or `[d_in, d_out]`."""
        dtype: MatmulDtype = self.bank.config.matmul_dtype
        if dtype == "bfloat16":  # rounded operands, sums in float32
            x, kernels = x.bfloat16().float(), kernels.bfloat16().float()
        if kernels.ndim == 2:
            return x @ kernels
        return torch.bmm(x.flatten(1, -2), kernels).unflatten(1, x.shape[1:-1])

    def _linear(
        self, spans: list[torch.Tensor], masks: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the linear parts' logits, see `jaxprobe.encoder.pooled_signals`."""
        means = [
            x.sum(dim=1) / mask.sum(dim=1).clamp(min=1)[:, None]
            for x, mask in zip(spans, masks, strict=True)
        ]
        answer, mask = spans[-1], masks[-1][..., None]
        is_empty = ~masks[-1].any(dim=1)[:, None]
        low, high = (
            torch.where(is_empty, 0.0, pick(answer.masked_fill(~mask, end), dim=1))
            for end, pick in ((torch.inf, torch.amin), (-torch.inf, torch.amax))
        )
        parts = [means[-1], low, high, *means[:-1]]
        logits = self.linear["bias"][:, None]
        for family, at in enumerate(self.bank.dims.slices):
            pooled = torch.cat([part[:, at] for part in parts], dim=1)
            logits = logits + self.linear[f"kernel_{family}"] @ pooled.T
        return logits


def _group_norm(
    x: torch.Tensor,
    real: torch.Tensor,
    n_groups: int,
    scale: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Normalise groups of channels over the real tokens.

    Args:
      x: `[n_members, n_examples, n_tokens, d]`, zero on padding; so is the result.
      real: `[n_examples, n_tokens]`.
      n_groups: divides `d`.
      scale: `[n_members, d]`.
      bias: `[n_members, d]`.
    """
    size = x.shape[-1] // n_groups
    count = real.sum(dim=1).clamp(min=1.0)[:, None] * size
    mean = x.sum(dim=2).unflatten(-1, (n_groups, size)).sum(-1) / count
    square = (x * x).sum(dim=2).unflatten(-1, (n_groups, size)).sum(-1) / count
    variance = (square - mean * mean).clamp(min=0.0)
    inverse = torch.rsqrt(variance + _GROUP_NORM_EPSILON)
    gain = inverse.repeat_interleave(size, -1) * scale[:, None]
    shift = bias[:, None] - mean.repeat_interleave(size, -1) * gain
    return (x * gain[:, :, None] + shift[:, :, None]) * real[..., None]


def _blank(bank: EncoderBank) -> Features:
    """Return the features of an answer with one token per span, all zero."""
    tokens = np.zeros((1, 1, bank.dims.total), np.float32)
    n_spans = len(bank.spans)
    return Features((tokens,) * n_spans, (np.ones((1, 1), bool),) * n_spans)


def _mean_over_seeds(p_correct: torch.Tensor) -> np.ndarray:
    """Average over the first axis in float32, as JAX does; return float64."""
    return p_correct.mean(dim=0).cpu().numpy().astype(np.float64)


def _tensors(tree: Mapping[str, Any], device: torch.device | str) -> Weights:
    return {
        path: torch.as_tensor(np.array(x), device=device) for path, x in leaves(tree)
    }


def _weights_below(prefix: str, weights: Weights) -> Weights:
    """Return the weights whose paths begin with a prefix, by the rest of the path."""
    n = len(prefix)
    return {path[n:]: x for path, x in weights.items() if path.startswith(prefix)}
