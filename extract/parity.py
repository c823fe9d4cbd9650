"""Does what we read sum to what the model does? Asked of every backbone on loading.

A layout found by names can be wrong without failing: a residual multiplier, a third
addition, a scaled stream. On a short batch three identities must hold: our path's
logits are the untouched model's; in every layer the contributions sum to the
difference of the residual stream; the pushes of all layers sum to the difference
that the model's own final norm makes.
"""

import copy
import dataclasses

import torch

from extract import residual
from extract.attention import SpanReading, read_spans
from extract.backbone import Backbone
from extract.layout import LayerPass, watch_layers
from extract.probability import Head

# Relative. In bf16 sums in float32 differ from the stream's own rounding by 3e-3
# (reference/backbones.md, 2.1); in float32 the largest seen was 1e-6.
_SUM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_VALUE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_PUSH_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_LENGTHS = (11, 7)


@dataclasses.dataclass
class _Sums:
    """What the check gathers while the layers run."""

    scores: residual.Scores
    layout_scales: list[torch.Tensor | float]
    errors: list[float] = dataclasses.field(default_factory=list)
    pushes: torch.Tensor | float = 0.0
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Add one layer."""
        if self.first is None:
            self.first = layer_pass.h_in.float().clone()
        out = layer_pass.h_out.float() / self.layout_scales[layer_pass.index]
        total = layer_pass.h_in.float() + layer_pass.att.float()
        error = (total + layer_pass.ffn.float() - out).norm(dim=-1)
        self.errors.append(float((error / out.norm(dim=-1)).max()))
        scalars = residual.contribution_scalars(layer_pass, self.scores)
        self.pushes = self.pushes + scalars[..., 1] + scalars[..., 3]
        self.last = out.clone()


def _probe_ids(backbone: Backbone) -> torch.Tensor:
    """Return `[2, 11]` distinct ids spread over the vocabulary."""
    vocab_size = backbone.layout.head.out_features
    n_ids = sum(_LENGTHS)
    n_tokens = max(_LENGTHS)
    # Embedding tables may be shorter than a padded head.
    n_words = min(vocab_size, backbone.model.get_input_embeddings().num_embeddings)
    ids = torch.arange(1, n_ids + 1) * max(1, n_words // (n_ids + 1)) % n_words
    second = torch.cat([ids[n_tokens:], ids[-1].expand(n_tokens - _LENGTHS[1])])
    return torch.stack([ids[:n_tokens], second]).to(backbone.device)


def _check_close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str
) -> None:
    """Compare relative to the largest expected value."""
    scale = float(expected.abs().max()) + 1e-6
    error = float((found - expected).abs().max()) / scale
    if not error <= tolerance:
        raise ValueError(
            f"unknown residual layout: {what} differ by {error:.1e} of their size, "
            f"expected at most {tolerance:.0e}"
        )


def _check_logits(
    backbone: Backbone, ids: torch.Tensor, final: torch.Tensor, head: Head
) -> None:
    """Compare our logits with the untouched model on unpadded sequences."""
    tolerance = _VALUE_TOLERANCE[backbone.dtype]
    for row, length in enumerate(_LENGTHS):
        own = backbone.model(input_ids=ids[row : row + 1, :length], use_cache=False)
        n_words = own.logits.shape[-1]
        _check_close(
            head.logits(final[row, :length], 0, n_words),
            own.logits[0].float(),
            tolerance,
            "the logits of the reading pass and of the untouched model",
        )


def _check_pushes(
    backbone: Backbone,
    sums: _Sums,
    targets: torch.Tensor,
) -> None:
    """Compare summed pushes with the final norm applied to both ends."""
    # In float32, as the pushes are: the stream's dtype would round both ends.
    norm = copy.deepcopy(backbone.layout.final_norm).float()
    words = backbone.layout.head.weight[targets].float()
    before, after = [(norm(end) * words).sum(-1) for end in (sums.first, sums.last)]
    _check_close(
        sums.pushes,
        after - before,
        _PUSH_TOLERANCE[backbone.dtype],
        "the summed pushes and the final norm's own difference",
    )


@torch.no_grad()
def check_parity(
    backbone: Backbone, final_norm: residual.FinalNorm, head: Head
) -> None:
    """Run the checks.

    Raises:
      ValueError: "unknown residual layout", naming the identity that failed.
    """
    layout = backbone.layout
    ids = _probe_ids(backbone)
    targets = ids.roll(-1, dims=1)
    scales = [layer.scale() for layer in layout.layers]
    sums = _Sums(residual.Scores(final_norm, layout.head, targets), scales)
    spans = torch.tensor([[[0, 3], [3, 5], [5, 7]]] * 2, device=ids.device)
    reading = SpanReading(spans, ids.shape[1], backbone.attention_layers, 2**20)
    with (
        read_spans(layout.decoder, reading),
        watch_layers(layout, sums.on_layer),
    ):
        final = layout.decoder(input_ids=ids, use_cache=False).last_hidden_state
    for index, error in enumerate(sums.errors):
        # Written so that a NaN, which loses every comparison, does not pass.
        if not error <= _SUM_TOLERANCE[backbone.dtype]:
            raise ValueError(
                f"unknown residual layout: in layer {index} of "
                f"{type(layout.decoder).__name__} attention and feed-forward "
                f"contributions miss the change of the residual stream by {error:.1e} "
                "of its norm"
            )
    if not bool(reading.readings().isfinite().all()):
        raise ValueError("unknown residual layout: an attention reading is not finite")
    _check_logits(backbone, ids, final, head)
    _check_pushes(backbone, sums, targets)
