"""Does what we read sum to what the model does? Checked for every backbone.

A layout found by names can be wrong without failing: a residual multiplier, a third
addition, a scaled stream. On a short batch these identities must hold: our path's
logits are the untouched model's of the same batch, and of one that is padded to the
left as when it generates; in every layer the contributions sum to the difference of
the residual stream; what the decoder puts out is the norm of the last state; the
pushes of all layers sum to the difference that the model's own final norm makes; and
neither padding nor the other example of the batch changes what is read of one.

The batch has one row of 7 tokens and one of 11, or as many as the model has positions.
Where the model's smallest window or chunk of attention is at most 1024 tokens, the
longer row is three tokens longer than that, since a lost mask shows nowhere else. Not
covered are larger windows (Mistral's 4096) and a second window.

In half precision a weak sink, or three keys too many of several hundred, would be
within the rounding that logits are allowed. So there each attention module that asks
for an attention function is called once more by itself in float32, on the states that
it had in the model: as it attends by itself and as it is read.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch

from beatrice.extract.backbone.layout import LayerPass
from beatrice.extract.backbone.loading import Backbone, Outline, layer_values
from beatrice.extract.signals import probability, residual
from beatrice.extract.signals.attention import SpanReading, attend_alone, run_decoder
from beatrice.extract.signals.batch import budget_for
from beatrice.extract.signals.probability import Head

# Relative. In bf16 sums in float32 differ from the stream's own rounding by 3e-3
# (reference/backbones.md, 2.1); in float32 the largest seen was 1e-6.
_SUM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# The same batch through the same kernels. Wider, and a sink, a soft cap or a
# temperature that only the model's own attention knows would pass in bf16.
_LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Batches of other shapes, whose products round differently.
_VALUE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_PUSH_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_LENGTHS = (11, 7)
_LEAST_POSITIONS = 4  # a token in each span of either row
_LONGEST_WINDOW = 1024
_N_BEYOND = 3
# Of a long row the last logits are compared: a whole row of a large vocabulary would
# be gigabytes, and its first tokens are like those of a short one.
_N_COMPARED = 16


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One forward on the reading path.

    Attributes:
      errors: per layer, how far the contributions miss the change of the stream,
        relative to its norm.
      pushes: `[n_examples, n_tokens]`, summed over the layers.
      first: `[n_examples, n_tokens, d_model]`, the embedding.
      last: likewise, after the last layer and before its scale.
      end: likewise, after its scale, in the stream's dtype.
      final: likewise, final-normed.
      attn: `[n_examples, n_tokens, 2, 2, n_attention_layers, n_heads]`.
    """

    errors: list[float]
    pushes: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    end: torch.Tensor
    final: torch.Tensor
    attn: torch.Tensor


def _window_of(backbone: Backbone) -> int | None:
    """Return the smallest window of attention in tokens, if it is to be crossed."""
    config = backbone.model.config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "index_topk")
    windows = layer_values(config, *names)
    longest = min(_LONGEST_WINDOW, (backbone.max_length or 2**62) - _N_BEYOND)
    return min((w for w in windows if w <= longest), default=None)


def probe_lengths(backbone: Backbone) -> tuple[int, int]:
    """Return the lengths of the two rows, within the model's positions."""
    most = 2**62 if backbone.max_length is None else backbone.max_length
    if most < _LEAST_POSITIONS:
        raise ValueError(
            f"backbone {backbone.name!r} reads at most {most} tokens; a question and "
            f"its answer need {_LEAST_POSITIONS}, so use another backbone"
        )
    window = _window_of(backbone)
    beyond = 0 if window is None else window + _N_BEYOND
    longer = min(most, max(_LENGTHS[0], beyond))
    return longer, min(_LENGTHS[1], longer - 1)


def probe_ids(backbone: Backbone, lengths: tuple[int, int]) -> torch.Tensor:
    """Return `[2, n_tokens]` ids spread over the vocabulary, distinct if it is large.

    The second row is padded with its last id.
    """
    vocab_size = backbone.layout.head.out_features
    n_ids, n_tokens = sum(lengths), lengths[0]
    # Embedding tables may be shorter than a padded head.
    n_used = min(vocab_size, backbone.model.get_input_embeddings().num_embeddings)
    ids = torch.arange(1, n_ids + 1) * max(1, n_used // (n_ids + 1)) % n_used
    second = torch.cat([ids[n_tokens:], ids[-1].expand(n_tokens - lengths[1])])
    return torch.stack([ids[:n_tokens], second]).to(backbone.device)


def _spans_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return `[n_examples, 3, 2]` spans, each a third of its example."""
    thirds = [[0, n // 3, 2 * n // 3, n] for n in lengths]
    return torch.tensor([[t[:2], t[1:3], t[2:]] for t in thirds])


def _read(
    backbone: Backbone,
    final_norm: residual.FinalNorm,
    head: Head,
    ids: torch.Tensor,
    lengths: tuple[int, ...],
) -> _Pass:
    """Run the reading path on `[n_examples, n_tokens]` ids."""
    layout = backbone.layout
    lens = residual.LogitLens(final_norm, head, ids.roll(-1, dims=1))
    scales = [layer.scale() for layer in layout.layers]
    errors: list[float] = []
    pushes = torch.zeros(ids.shape, device=ids.device)
    states: dict[str, torch.Tensor] = {}

    def on_layer(layer_pass: LayerPass) -> None:
        if layer_pass.index == 0:
            states["first"] = layer_pass.h_in.float().clone()
        out = layer_pass.h_out.float() / scales[layer_pass.index]
        total = layer_pass.h_in.float() + layer_pass.att.float()
        error = (total + layer_pass.ffn.float() - out).norm(dim=-1)
        errors.append(float((error / out.norm(dim=-1)).max()))
        scalars = residual.contribution_scalars(layer_pass, lens)
        pushes.add_(scalars[..., 1]).add_(scalars[..., 3])
        states["last"], states["end"] = out.clone(), layer_pass.h_out.clone()

    budget = budget_for(ids.device).n_attention_weights
    final, attn = run_decoder(layout, ids, _spans_of(lengths), budget, on_layer)
    return _Pass(errors=errors, pushes=pushes, final=final, attn=attn, **states)


def _check_close(
    values: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    what: str,
    *,
    every: bool = True,
) -> None:
    """Compare every row, or the median row, relative to the largest expected value.

    `every` is False between batches of different shape in half precision: products
    round differently there, which can send single tokens to another expert; a wrong
    reading is wrong for all.
    """
    scale = float(expected.float().abs().max()) + 1e-6
    errors = (values.float() - expected.float()).abs().flatten(1).amax(1)
    error = float(errors.max() if every else errors.median()) / scale
    # Written so that a NaN, which loses every comparison, does not pass.
    if not error <= tolerance:
        raise ValueError(
            f"unknown residual layout: {what} differ by {error:.1e} of their size, "
            f"expected at most {tolerance:.0e}"
        )


def _check_sums(backbone: Backbone, errors: list[float]) -> None:
    """Check that contributions sum to the change of the stream in every layer."""
    for index, error in enumerate(errors):
        if math.isnan(error):
            raise ValueError(
                f"{backbone.name}: states of layer {index} are not finite in "
                f"{str(backbone.dtype).removeprefix('torch.')}: its weights are "
                "damaged, or too large for this type; check them, or load them as "
                "float32"
            )
        if not error <= _SUM_TOLERANCE[backbone.dtype]:
            raise ValueError(
                f"unknown residual layout: in layer {index} of "
                f"{type(backbone.layout.decoder).__name__} attention and feed-forward "
                f"contributions miss the change of the residual stream by {error:.1e} "
                "of its norm"
            )


def _check_norm(backbone: Backbone, together: _Pass) -> None:
    """Check that the decoder puts out the norm of the last state."""
    _check_close(
        together.final,
        backbone.layout.final_norm(together.end),
        _SUM_TOLERANCE[backbone.dtype],
        "what the decoder puts out and the final norm of its last state",
    )


def _check_logits(
    backbone: Backbone,
    ids: torch.Tensor,
    lengths: tuple[int, int],
    final: torch.Tensor,
    head: Head,
) -> None:
    """Compare our logits with the untouched model's, padded right and left."""
    n_tokens = ids.shape[1]
    counts = torch.tensor(lengths, device=ids.device)[:, None]
    mask = (torch.arange(n_tokens, device=ids.device) >= n_tokens - counts).long()
    shifted = [row.roll(n_tokens - n) for row, n in zip(ids, lengths, strict=True)]
    left = {
        "input_ids": torch.stack(shifted),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
    }
    logits = backbone.model(input_ids=ids, use_cache=False).logits
    n_words = head.weight.shape[0]
    if logits.shape[-1] != n_words:
        raise ValueError(
            f"unknown residual layout: the model's logits are of {logits.shape[-1]} "
            f"words, but its output embedding has {n_words} rows"
        )
    what = "the logits of the reading pass and of the untouched model"
    rows = list(logits)
    _compare_logits(backbone, final, rows, head, lengths, what, _LOGIT_TOLERANCE)
    logits = backbone.model(**left, use_cache=False).logits
    rows = [row.roll(n - n_tokens, 0) for row, n in zip(logits, lengths, strict=True)]
    what += ", padded to the left,"
    _compare_logits(backbone, final, rows, head, lengths, what, _VALUE_TOLERANCE)


def _compare_logits(
    backbone: Backbone,
    final: torch.Tensor,
    logits: list[torch.Tensor],
    head: Head,
    lengths: tuple[int, int],
    what: str,
    tolerances: dict[torch.dtype, float],
) -> None:
    """Compare the last logits of both rows, and those beyond the window."""
    firsts = [max(0, n - _N_COMPARED) for n in lengths]
    compared = {"": [slice(*edges) for edges in zip(firsts, lengths, strict=True)]}
    window = _window_of(backbone)
    if window is not None:
        # By themselves: where single tokens may differ they would be outvoted.
        compared[" beyond its attention's window"] = [slice(window, lengths[0])]
    for where, slices in compared.items():
        states = [row[at] for row, at in zip(final, slices, strict=False)]
        expected = [row[at] for row, at in zip(logits, slices, strict=False)]
        _check_close(
            head.logits(torch.cat(states), 0, logits[0].shape[-1]),
            torch.cat(expected),
            tolerances[backbone.dtype],
            f"{what}{where}",
            every=backbone.dtype == torch.float32,
        )


def _check_alone(
    backbone: Backbone,
    final_norm: residual.FinalNorm,
    head: Head,
    ids: torch.Tensor,
    lengths: tuple[int, int],
    together: _Pass,
) -> None:
    """Read each example alone and unpadded; nothing may change."""
    for row, length in enumerate(lengths):
        example = ids[row : row + 1, :length]
        alone = _read(backbone, final_norm, head, example, (length,))
        # The last token's own target is the neighbour's in one of the two.
        pairs = {
            "states": (together.final[row, :length], alone.final[0]),
            "attention readings": (together.attn[row, :length], alone.attn[0]),
            "pushes": (
                together.pushes[row, : length - 1, None],
                alone.pushes[0, :-1, None],
            ),
        }
        for what, (padded, expected) in pairs.items():
            _check_close(
                padded,
                expected,
                _VALUE_TOLERANCE[backbone.dtype],
                f"the {what} of a sequence in a padded batch and alone",
                every=backbone.dtype == torch.float32,
            )


def _attention_calls(
    backbone: Backbone, run: Callable[[], Any]
) -> dict[int, tuple[Any, Any]]:
    """Return what each attention module is called with during a forward, by layer."""
    calls: dict[int, tuple[Any, Any]] = {}

    def save(index: int, module: Any, args: Any, kwargs: Any) -> None:
        calls[index] = args, kwargs

    with contextlib.ExitStack() as handles:
        for index in backbone.layout.attention_layers:
            hook = functools.partial(save, index)
            mixer = backbone.layout.layers[index].mixer
            handle = mixer.register_forward_pre_hook(hook, with_kwargs=True)
            handles.callback(handle.remove)
        run()
    return calls


def _widened(value: Any) -> Any:
    """Return tensors of a module's arguments in float32, those of numbers alone."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return value


def _check_attention(
    backbone: Backbone, ids: torch.Tensor, lengths: tuple[int, int]
) -> None:
    """Compare each attention module with its reading in float32, see above."""
    layout = backbone.layout
    if not layout.decoder._can_set_attn_implementation():
        return  # its own weights are read
    spans, budget = _spans_of(lengths), budget_for(ids.device).n_attention_weights
    unread = _attention_calls(
        backbone, lambda: layout.decoder(input_ids=ids, use_cache=False)
    )
    read = _attention_calls(
        backbone, lambda: run_decoder(layout, ids, spans, budget, lambda _: None)
    )
    for index in layout.attention_layers:
        mixer = copy.deepcopy(layout.layers[index].mixer)
        mixer._apply(_widened)  # `float()` would spoil complex rotations
        args, kwargs = map(_widened, unread[index])
        expected = attend_alone(mixer, args, kwargs, None)
        # The mask is in the form that each attention function takes.
        if "attention_mask" in kwargs:
            mask = _widened(read[index][1]["attention_mask"])
            kwargs = {**kwargs, "attention_mask": mask}
        reading = SpanReading(spans, ids, layout.attention_layers, budget)
        _check_close(
            attend_alone(mixer, args, kwargs, reading),
            expected,
            _LOGIT_TOLERANCE[torch.float32],
            f"what the attention of layer {index} puts out by itself and as it is read",
        )


def _check_pushes(
    backbone: Backbone, head: Head, together: _Pass, targets: torch.Tensor
) -> None:
    """Compare summed pushes with the final norm applied to both ends."""
    # In float32, as the pushes are: the stream's dtype would round both ends.
    norm: Any = copy.deepcopy(backbone.layout.final_norm).float()
    rows = head.rows(targets)
    ends = (together.first, together.last)
    before, after = [(norm(state) * rows).sum(-1) for state in ends]
    _check_close(
        together.pushes[..., None],
        (after - before)[..., None],
        _PUSH_TOLERANCE[backbone.dtype],
        "the summed pushes and the final norm's own difference",
    )


@torch.no_grad()
def check_parity(backbone: Backbone, final_norm: residual.FinalNorm, head: Head) -> int:
    """Check that what is read of a backbone sums to what it does.

    Returns:
      The heads of an attention layer, as they were read; a config can say otherwise.
    """
    lengths = probe_lengths(backbone)
    ids = probe_ids(backbone, lengths)
    together = _read(backbone, final_norm, head, ids, lengths)
    _check_sums(backbone, together.errors)
    if not bool(together.attn.isfinite().all()):
        raise ValueError("unknown residual layout: an attention reading is not finite")
    _check_norm(backbone, together)
    _check_logits(backbone, ids, lengths, together.final, head)
    _check_pushes(backbone, head, together, ids.roll(-1, dims=1))
    _check_alone(backbone, final_norm, head, ids, lengths, together)
    if backbone.dtype != torch.float32:
        _check_attention(backbone, ids, lengths)
    return together.attn.shape[-1]


# Where a config spaces its attention layers by a period, a twin can have none.
_REFUSAL = re.compile("(unknown residual layout|cannot read)(?!.*found no attention)")


def require_readable(name: str, outline: Outline) -> None:
    """Check on a narrow twin that a checkpoint can be read, before it is loaded.

    Where Transformers can build no twin, the check of the loaded model decides.

    Args:
      name: of the checkpoint, as messages call it.
      outline: its config.
    """
    from beatrice.extract.backbone.twin import narrow_twin  # scoring has no need of it

    try:
        model = narrow_twin(outline.config)
    # Transformers raises whatever comes first for sizes that do not fit each other.
    except Exception:
        return
    try:
        twin = Backbone.from_model(model, revision="twin")
        final_norm = residual.measure_final_norm(twin.layout)
        check_parity(twin, final_norm, probability.head_of(model))
    except ValueError as error:
        if _REFUSAL.match(str(error)):
            raise ValueError(f"backbone {name!r}: {error}") from error
