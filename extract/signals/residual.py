"""The residual stream: its states, and each contribution's norm and logit-lens push.

The push of a contribution g to a state h is `<W_U[v], N(h + g) - N(h)>` (section 3.2),
with N the final norm and v the next token. It needs no unembedding product and no
second call of N: with `u = gain * W_U[v]`, the lens's logit of a state is
`<h, u> / rms(h)` (RMSNorm) or `(<h, u> - mean(h) sum(u)) / std(h)` (LayerNorm, whose
bias cancels in the difference), and a push is the difference of two such logits.
"""

import copy
import dataclasses

import torch

from beatrice.extract.backbone.layout import LayerPass, Layout
from beatrice.extract.signals.batch import HostCopies, TokenRows
from beatrice.extract.signals.precision import exact_products
from beatrice.extract.signals.probability import Head


@dataclasses.dataclass(frozen=True)
class FinalNorm:
    """The numbers of the final norm N; its bias cancels in every push."""

    gain: torch.Tensor  # `[d_model]` float32, multiplies the normalised state
    eps: float  # added to the mean square
    is_centred: bool  # True for a LayerNorm


def _eps_of(norm: torch.nn.Module) -> float:
    """Return the norm's epsilon, under whichever name its family uses."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    if type(norm).__name__ == "OlmoLayerNorm":
        return 1e-5  # hard-coded in its forward
    raise ValueError(
        f"unknown residual layout: {type(norm).__name__} has no epsilon under "
        "variance_epsilon or eps"
    )


@exact_products()
@torch.no_grad()
def measure_final_norm(layout: Layout) -> FinalNorm:
    """Measure the final norm by calling it on known states.

    Families store the gain as w or 1 + w, so it is measured: with a vector of plus and
    minus one, zero, and a shifted vector, which shows whether the mean is subtracted.
    """
    # A float32 copy: in bf16 the module would round 1 + w in its output.
    norm = copy.deepcopy(layout.final_norm).float()
    d_model = layout.head.in_features
    device = layout.head.weight.device
    probe = 1.0 - 2.0 * (torch.arange(d_model, device=device) % 2).float()
    bias = norm(torch.zeros(1, d_model, device=device))[0]
    plain, shifted = norm(torch.stack([probe, probe + 1.0]))
    is_centred = bool(torch.allclose(plain, shifted, atol=1e-4))
    eps = _eps_of(norm)
    centred = probe - probe.mean(-1, keepdim=True) if is_centred else probe
    mean_square = centred.square().mean(-1, keepdim=True)
    gain = (plain - bias) / (centred * torch.rsqrt(mean_square + eps))
    return FinalNorm(gain, eps, is_centred)


class LogitLens:
    """Computes next tokens' logits `<W_U[v_t], N(h)>`, up to a constant per token."""

    def __init__(
        self, final_norm: FinalNorm, head: Head, targets: torch.Tensor
    ) -> None:
        """Fix v_t, `[n_examples, n_read]` int64, of the last tokens, the ones read."""
        self.final_norm = final_norm
        self.n_read = targets.shape[1]
        self.directions = final_norm.gain * head.rows(targets)
        # Centring the direction replaces centring every state.
        if final_norm.is_centred:
            self.directions -= self.directions.mean(-1, keepdim=True)
        # Reused by every layer: on a CPU, fresh pages cost more than the products.
        self._products = torch.empty_like(self.directions)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits `[n_examples, n_read]` of float32 states `[…, d_model]`."""
        if self.final_norm.is_centred:
            # In two passes: one pass loses digits if single activations are massive.
            variance = states.var(-1, correction=0)
        else:
            norm = torch.linalg.vector_norm(states, dim=-1)
            variance = norm.square() / states.shape[-1]
        dots = torch.mul(states, self.directions, out=self._products).sum(-1)
        return dots * torch.rsqrt(variance + self.final_norm.eps)


def contribution_scalars(layer_pass: LayerPass, lens: LogitLens) -> torch.Tensor:
    """Read one layer: (attention norm, attention push, FFN norm, FFN push).

    Sums are taken in float32 from the layer's own input, so neither rounding of the
    stream nor a layer scale (Gemma 4) enters; norms are those of contributions before
    such a scale. Returns `[n_examples, n_read, 4]` float32 for the tokens that the lens
    reads; norms are in the stream's units, pushes in logits before any softcap.
    """
    states = layer_pass.h_in, layer_pass.att, layer_pass.ffn
    before, att, ffn = (values[:, -lens.n_read :].float() for values in states)
    logit_before = lens(before)
    state = before + att
    logit_between = lens(state)
    logit_after = lens(state.add_(ffn))
    return torch.stack(
        [
            torch.linalg.vector_norm(att, dim=-1),
            logit_between - logit_before,
            torch.linalg.vector_norm(ffn, dim=-1),
            logit_after - logit_between,
        ],
        dim=-1,
    )


@dataclasses.dataclass(eq=False)
class StreamReading:
    """Hidden states and contribution scalars, collected as the layers run."""

    hidden_layers: tuple[int, ...]  # entries of the resid axis that are kept
    rows: TokenRows  # the tokens whose hidden states are kept
    lens: LogitLens
    copies: HostCopies
    resid: list[torch.Tensor] = dataclasses.field(default_factory=list)  # by layer
    _hidden: torch.Tensor | None = None
    _seen: set[int] = dataclasses.field(default_factory=set)  # of `hidden_layers`

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Read one layer."""
        if layer_pass.index == 0:
            self._copy(0, layer_pass.h_in)
        self._copy(layer_pass.index + 1, layer_pass.h_out)
        self.resid.append(contribution_scalars(layer_pass, self.lens))

    def _copy(self, entry: int, states: torch.Tensor) -> None:
        if entry not in self.hidden_layers:
            return
        if self._hidden is None:
            # In the stream's dtype: lossless, and in bf16 half the bytes of float32.
            shape = (len(self.hidden_layers), self.rows.stops[-1], states.shape[-1])
            self._hidden = self.copies.host_buffer(shape, states.dtype)
        out = self._hidden[self.hidden_layers.index(entry)]
        self.copies.copy_rows(states.flatten(0, 1), self.rows.index, out)
        self._seen.add(entry)

    def states(self) -> torch.Tensor:
        """Return the kept entries, `[n_entries, n_rows, d_model]`."""
        missing = sorted({*self.hidden_layers} - self._seen)
        if missing or self._hidden is None:
            raise ValueError(
                f"unknown residual layout: entries {missing} of the stream were not "
                "seen"
            )
        return self._hidden
