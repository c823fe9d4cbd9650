"""Checks for every backbone that what is read sums to what the model computes.

A layout found by names can be wrong without failing: a residual multiplier, a third
addition, a scaled stream. On a short batch these identities must hold: the logits of
the reading pass equal the untouched model's, both for the same batch and for one padded
on the left, as in generation; in every layer the contributions sum to the change of the
residual stream; the decoder's output is the norm of the last state; the pushes of all
layers sum to the difference that the model's own final norm makes; and neither padding
nor the other example of the batch changes what is read of an example.

The batch has one row of 7 tokens and one of 11, or as many as the model has positions.
If the model's smallest window or chunk of attention has at most 1024 tokens, the longer
row is three tokens longer than that, since a lost mask would otherwise go unnoticed.
Larger windows (Mistral's 4096) and a second window are not covered.

In half precision, a weak sink, or three keys too many among several hundred, would be
within the rounding that logits are allowed, and on a GPU logits come from the model's
own kernel whatever weights are read. In these cases, each attention module that uses a
registered attention function is called again by itself in float32, on the states that
it had in the model: once as it normally attends and once as it is read.

Before weights are loaded, a narrow twin is checked: the model's own config with small
sizes, and random weights. Where a family adds to its stream, and what it multiplies,
does not depend on widths, so all of Transformers' families can be surveyed in minutes.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import re
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from beatrice.extract.backbone.layout import LayerPass, evaluating, layer_values
from beatrice.extract.backbone.loading import Backbone, Outline
from beatrice.extract.signals import probability, residual
from beatrice.extract.signals.attention import (
    SpanReading,
    call_attention_module,
    run_decoder,
)
from beatrice.extract.signals.batch import budget_for
from beatrice.extract.signals.precision import exact_products
from beatrice.extract.signals.probability import Head

# Relative. In bf16, float32 sums differ from the stream's own rounding by 3e-3; in
# float32, the largest difference seen was 1e-6.
_SUM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# The same batch through the same kernels. If this were wider, a sink, a softcap or a
# temperature that only the model's own attention applies would pass in bf16.
_LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Batches of other shapes, whose products round differently.
_VALUE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_PUSH_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_LENGTHS = (11, 7)
_LEAST_POSITIONS = 4  # one token in each span of either row
_N_BEYOND = 3
# Logits compared at the end of a row; first tokens are like those of a short row.
_N_COMPARED = 16


@dataclasses.dataclass(frozen=True)
class _Pass:
    # Per layer, how far contributions miss the stream's change, relative to its norm.
    errors: list[float]
    pushes: torch.Tensor  # `[n_examples, n_tokens]`, summed over the layers
    first: torch.Tensor  # `[n_examples, n_tokens, d_model]`, the embedding
    last: torch.Tensor  # same shape, after the last layer and before its scale
    end: torch.Tensor  # same shape, after its scale, in the stream's dtype
    final: torch.Tensor  # same shape, after the final norm
    attn: torch.Tensor  # `[n_examples, n_tokens, 2, 2, n_attention_layers, n_heads]`


def _window_of(backbone: Backbone) -> int | None:
    """Return the smallest attention window in tokens, None if none can be crossed."""
    config = backbone.model.config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "index_topk")
    windows = layer_values(config, *names)
    longest = min(1024, (backbone.max_length or 2**62) - _N_BEYOND)
    return min((w for w in windows if w <= longest), default=None)


def probe_lengths(backbone: Backbone) -> tuple[int, int]:
    """Return the lengths of the two rows, within the model's positions."""
    most = 2**62 if backbone.max_length is None else backbone.max_length
    if most < _LEAST_POSITIONS:
        raise ValueError(
            f"backbone {backbone.name!r} reads at most {most} tokens, but a question "
            f"and its answer need {_LEAST_POSITIONS}; use another backbone"
        )
    window = _window_of(backbone)
    beyond = 0 if window is None else window + _N_BEYOND
    longer = min(most, max(_LENGTHS[0], beyond))
    return longer, min(_LENGTHS[1], longer - 1)


def probe_ids(backbone: Backbone, lengths: tuple[int, int]) -> torch.Tensor:
    """Return `[2, n_tokens]` ids spread over the vocabulary, distinct if it suffices.

    The second row is padded with its last id.
    """
    vocab_size = backbone.layout.head.out_features
    n_ids, n_tokens = sum(lengths), lengths[0]
    # Embedding tables may be shorter than a padded head.
    n_used = min(vocab_size, len(backbone.model.get_input_embeddings().weight))
    step = max(1, n_used // (n_ids + 1))
    ids = torch.arange(1, n_ids + 1, device="cpu") * step % n_used
    second = torch.cat([ids[n_tokens:], ids[-1].expand(n_tokens - lengths[1])])
    return torch.stack([ids[:n_tokens], second]).to(backbone.device)


class CannotRun(ValueError):
    """A model whose own forward pass fails."""


class _Probe:
    """A backbone run on two rows of ids, with the checks of what is read of them."""

    def __init__(
        self, backbone: Backbone, final_norm: residual.FinalNorm, head: Head
    ) -> None:
        """Read both rows together, the shorter padded to the right."""
        self.backbone, self.layout = backbone, backbone.layout
        self.dtype = backbone.dtype
        self.rounding = backbone.rounding_in(backbone.dtype)
        self.final_norm, self.head = final_norm, head
        self.lengths = probe_lengths(backbone)
        self.ids = probe_ids(backbone, self.lengths)
        self.together = self.read(self.ids, self.lengths)

    def attention_reading(
        self, ids: torch.Tensor, lengths: tuple[int, ...]
    ) -> SpanReading:
        """Return a reading of the rows' attention, each in three spans of one size."""
        thirds = [[0, n // 3, 2 * n // 3, n] for n in lengths]
        spans = torch.tensor([[t[:2], t[1:3], t[2:]] for t in thirds])
        budget = budget_for(ids.device).n_attention_weights
        return SpanReading(spans, ids, self.layout.attention_layers, budget)

    def read(self, ids: torch.Tensor, lengths: tuple[int, ...]) -> _Pass:
        """Read rows as a reader does, and sum what is read over the layers."""
        lens = residual.LogitLens(self.final_norm, self.head, ids.roll(-1, dims=1))
        scales = [layer.scale() for layer in self.layout.layers]
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

        reading = self.attention_reading(ids, lengths)
        final = run_decoder(self.layout, ids, on_layer=on_layer, reading=reading)
        attn = reading.readings()
        return _Pass(errors=errors, pushes=pushes, final=final, attn=attn, **states)

    def check_sums(self) -> None:
        """Check sums of contributions against the stream, and the decoder's output."""
        for index, error in enumerate(self.together.errors):
            if math.isnan(error):
                dtype = str(self.dtype).removeprefix("torch.")
                wider = ", or load them as float32" * (dtype != "float32")
                raise ValueError(
                    f"backbone {self.backbone.name!r}: states of layer {index} are not "
                    f"finite in {dtype}, so its weights are damaged or too large for "
                    f"this dtype; check them{wider}"
                )
            if not error <= _SUM_TOLERANCE[self.dtype]:
                raise ValueError(
                    f"unknown residual layout: in layer {index} of "
                    f"{type(self.layout.decoder).__name__} attention and feed-forward "
                    "contributions miss the change of the residual stream by "
                    f"{error:.1e} of its norm"
                )
        _check_close(
            self.together.final,
            self.layout.final_norm(self.together.end),
            _SUM_TOLERANCE[self.dtype],
            "the decoder's output and the final norm of its last state",
        )

    def check_logits(self) -> None:
        """Compare our logits with the untouched model's, padded right and left.

        The last logits of both rows are compared, and those beyond the window.
        """
        ids, n_tokens = self.ids, self.ids.shape[1]
        counts = torch.tensor(self.lengths, device=ids.device)[:, None]
        columns = torch.arange(n_tokens, device=ids.device)
        is_compared = (columns < counts) & (columns >= counts - _N_COMPARED)
        rows, at = is_compared.nonzero().unbind(1)
        n_words = self.head.weight.shape[0]
        ours = self.head.logits(self.together.final[rows, at], 0, n_words)
        groups: dict[str, Any] = {"": slice(None)}
        window = _window_of(self.backbone)
        if window is not None:
            # Compared separately: if single tokens may differ, they would be outvoted.
            groups[" beyond its attention's window"] = (rows == 0) & (at >= window)
        pairs = zip(ids, self.lengths, strict=True)
        mask = (columns >= n_tokens - counts).long()
        left = {
            "input_ids": torch.stack([row.roll(n_tokens - n) for row, n in pairs]),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        }
        shifted = at + n_tokens - counts[rows, 0]
        what = "the logits of the reading pass and of the untouched model"
        for expected, about, tolerances in (
            (self.logits_at(rows, at, input_ids=ids), "", _LOGIT_TOLERANCE),
            (
                self.logits_at(rows, shifted, **left),
                ", padded to the left,",
                _VALUE_TOLERANCE,
            ),
        ):
            if expected.shape[-1] != n_words:
                raise ValueError(
                    f"unknown residual layout: the model has {expected.shape[-1]} "
                    f"logits per token, but its output embedding has {n_words} rows"
                )
            for where, group in groups.items():
                _check_close(
                    ours[group],
                    expected[group],
                    tolerances[self.rounding],
                    f"{what}{about}{where}",
                    every=self.rounding == torch.float32,
                )

    def logits_at(
        self, rows: torch.Tensor, columns: torch.Tensor, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the model's logits `[n, n_words]` at given positions of a batch.

        The output matrix is multiplied only there: all logits could take gigabytes.
        """
        model = self.backbone.model
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: (args[0][rows, columns][None],)
        )
        try:
            with hook:
                return model(**inputs, use_cache=False).logits[0]
        except (AttributeError, TypeError) as error:
            raise CannotRun(
                f"cannot read {type(model).__name__}: its own forward pass fails "
                f"({type(error).__name__}: {error}); take another version of "
                f"Transformers than {transformers.__version__}"
            ) from error

    def check_pushes(self) -> None:
        """Compare the summed pushes with the final norm applied to both ends."""
        # In float32 like the pushes; the stream's dtype would round both ends.
        norm: Any = copy.deepcopy(self.layout.final_norm).float()
        rows = self.head.rows(self.ids.roll(-1, dims=1))
        ends = (self.together.first, self.together.last)
        before, after = [(norm(state) * rows).sum(-1) for state in ends]
        _check_close(
            self.together.pushes[..., None],
            (after - before)[..., None],
            _PUSH_TOLERANCE[self.dtype],
            "the summed pushes and the final norm's own difference",
        )

    def check_alone(self) -> None:
        """Check that reading each example alone and unpadded gives the same."""
        together = self.together
        for row, length in enumerate(self.lengths):
            alone = self.read(self.ids[row : row + 1, :length], (length,))
            # The last push is left out: in one of the two, its target is a neighbour's.
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
                    _VALUE_TOLERANCE[self.rounding],
                    f"the {what} of a sequence in a padded batch and alone",
                    every=self.rounding == torch.float32,
                )

    def check_attention(self) -> None:
        """Compare attention modules with their readings in float32, see above."""
        decoder = self.layout.decoder
        if not decoder._can_set_attn_implementation():
            return  # its own call or weights are read
        try:
            self._compare_attention()
        # Flash attention's kernels support only half precision.
        except (RuntimeError, AssertionError):
            before = decoder.config._attn_implementation
            decoder.set_attn_implementation("eager")
            try:
                self._compare_attention()
            finally:
                decoder.set_attn_implementation(before)

    def _compare_attention(self) -> None:
        layout, rounding = self.layout, self.backbone.rounding_in(torch.float32)
        unread = self._attention_calls(None)
        read = self._attention_calls(self.attention_reading(self.ids, self.lengths))
        for index in layout.attention_layers:
            mixer = _widened_copy(layout.layers[index].mixer, self.dtype)
            args, kwargs = map(_widened, unread[index])
            expected = call_attention_module(mixer, args, kwargs, None)
            # Each attention function needs its own form of the mask.
            if "attention_mask" in kwargs:
                mask = _widened(read[index][1]["attention_mask"])
                kwargs = {**kwargs, "attention_mask": mask}
            reading = self.attention_reading(self.ids, self.lengths)
            reading.attends_on_gpus = True
            _check_close(
                call_attention_module(mixer, args, kwargs, reading),
                expected,
                _LOGIT_TOLERANCE[rounding],
                f"the outputs of layer {index}'s attention by itself and as it is read",
            )

    def _attention_calls(
        self, reading: SpanReading | None
    ) -> dict[int, tuple[Any, Any]]:
        """Return the arguments of each attention module in a forward pass, by layer."""
        calls: dict[int, tuple[Any, Any]] = {}

        def save(index: int, module: Any, args: Any, kwargs: Any) -> None:
            calls[index] = args, kwargs

        with contextlib.ExitStack() as handles:
            for index in self.layout.attention_layers:
                hook = functools.partial(save, index)
                mixer = self.layout.layers[index].mixer
                handle = mixer.register_forward_pre_hook(hook, with_kwargs=True)
                handles.enter_context(handle)
            run_decoder(self.layout, self.ids, reading=reading)
        return calls


def _check_close(
    values: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    what: str,
    *,
    every: bool = True,
) -> None:
    """Compare every row, or the median row, relative to the largest expected value.

    `every` is False for batches of different shape in half precision: rounding can send
    single tokens to another expert, whereas a wrong reading is wrong for all tokens.
    """
    scale = float(expected.float().abs().max()) + 1e-6
    errors = (values.float() - expected.float()).abs().flatten(1).amax(1)
    error = float(errors.max() if every else errors.median()) / scale
    # Written so that NaN, which fails every comparison, does not pass.
    if not error <= tolerance:
        raise ValueError(
            f"unknown residual layout: {what} differ by {error:.1e} of their size, "
            f"expected at most {tolerance:.0e}"
        )


def _widened(value: Any) -> Any:
    """Return a module's arguments with floating-point tensors in float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return value


def _is_packed(module: torch.nn.Module) -> bool:
    """Return whether a module without parts has weights as integers or as FP8."""
    weights = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    wide = (
        w.element_size() > 1 and (w.is_floating_point() or w.is_complex())
        for w in weights
    )
    return not all(wide) and next(module.children(), None) is None


def _widened_copy(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return a copy of a module that computes in float32 wherever it can.

    Parts with packed weights get their inputs in `dtype`, as in the model: kernels such
    as Marlin's take no float32, and FP8 weights that are widened lose their scale.
    """
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if _is_packed(part):
            part.register_forward_pre_hook(
                lambda _, args: tuple(value.to(dtype) for value in args)
            )
            part.register_forward_hook(lambda _, args, output: output.float())
        else:  # `float()` would spoil complex rotations
            part._apply(_widened, recurse=False)
    return copied


@torch.no_grad()
def check_parity(backbone: Backbone, final_norm: residual.FinalNorm, head: Head) -> int:
    """Check that what is read of a backbone sums to what it computes.

    Returns the number of heads of an attention layer as read; a config may differ.
    """
    with evaluating(backbone.model), exact_products():
        probe = _Probe(backbone, final_norm, head)
        probe.check_sums()
        if not bool(probe.together.attn.isfinite().all()):
            raise ValueError(
                "unknown residual layout: an attention reading is not finite"
            )
        probe.check_logits()
        probe.check_pushes()
        probe.check_alone()
        if probe.rounding != torch.float32 or probe.ids.is_cuda:
            probe.check_attention()
        return probe.together.attn.shape[-1]


# If a config spaces its attention layers by a period, a twin may have none.
_REFUSAL = re.compile("(unknown residual layout|cannot read)(?!.*found no attention)")


def require_readable(name: str, outline: Outline) -> None:
    """Check on a narrow twin that a checkpoint can be read, before loading it.

    If Transformers can build no twin, the check of the loaded model decides.
    """
    try:
        model = narrow_twin(outline.config)
    # Transformers raises all kinds of errors for sizes that do not fit each other.
    except Exception:
        return
    try:
        twin = Backbone.from_model(model, revision="twin")
        final_norm = residual.measure_final_norm(twin.layout)
        check_parity(twin, final_norm, probability.head_of(model))
    except ValueError as error:
        if _REFUSAL.match(str(error)):
            raise ValueError(f"backbone {name!r}: {error}") from error


N_WORDS = 61
N_POSITIONS = 4096
_D_MODEL = 32
# Number of layers of the twin, with every kind of layer that a config lists.
_N_LAYERS = 4
_LAYER_COUNT = r"(num_(hidden_)?|n_|decoder_|num_decoder_)layers?"
# Sizes by the names that families use for them; the first pattern that matches counts.
_SIZES: tuple[tuple[str, int], ...] = (
    (
        "(embedding_|attention_|(in|out)put_embedding_)?(hidden_)?size|d_model|n_embd"
        "|emb_dim|embedding_dim|word_embed_proj_dim|lru_width",
        _D_MODEL,
    ),
    (r"(unpadded_)?vocab_size(_per_layer_input)?", N_WORDS),
    (_LAYER_COUNT, _N_LAYERS),
    (r"(num_attention_|n_|num_|(decoder_)?attention_)heads?", 4),
    (r"(num_)?encoder_layers", 1),
    (r"(linear_num_|mamba_n_|n_mamba_|encoder_attention_)heads?", 4),
    (r"index_n_heads|num_query_groups|.*k(ey_)?v(alue)?_heads", 2),
    (r"(.*_)?head_dim|dim_head|d_head|kv_channels|mamba_headdim|qk_.*_dim", 8),
    (r"rotary_dim|mamba_dt_rank|time_step_rank", 4),
    (r".*intermediate_size|.*ffn_dim|ffn_hidden_size|dim_ff|dff|d_inner|d_ff", 48),
    (r".*feed_forward_size", 48),
    (
        r".*position_embeddings|n_positions|n_ctx|max_seq_len|context_length",
        N_POSITIONS,
    ),
    (r"model_max_length|max_sequence_length|max_(source|target)_pos.*", N_POSITIONS),
    (r".*(num|n)_(local_|routed_)?experts", 6),
    (r".*experts_per_tok(en)?|moe_k|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group|mamba_n_?groups", 1),
    (r".*lora_rank|adapter_rank|laurel_rank", 16),
    (r"mamba_d_state|state_size", 8),
    (r"num_kv_shared_layers", 1),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r".*_token_id", 2),
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
# Size limit of a twin; configs with towers or other names for widths exceed it.
_MOST_PARAMETERS = 20_000_000


def _shortened(values: list[Any], n_layers: int) -> list[Any]:
    """Return a list for `n_layers` layers with every kind, and the last one last."""
    if len(values) <= n_layers:
        return values
    kinds = [values[i] for i in range(len(values)) if values[i] not in values[:i]]
    return (kinds * n_layers)[: n_layers - 1] + values[-1:]


def _narrow_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config that differ in its twin; windows stay."""
    entries = {k: v for k, v in config.items() if not isinstance(v, bool)}
    counts = [v for k, v in entries.items() if re.fullmatch(_LAYER_COUNT, k)]
    changed: dict[str, Any] = {}
    for name, value in entries.items():
        size = next((n for pattern, n in _SIZES if re.fullmatch(pattern, name)), None)
        if isinstance(value, list) and len(value) > 1 and len(value) in counts:
            n_layers = min(_N_LAYERS, len(value))
            changed[name] = _shortened(value, n_layers)
            if name == "num_attention_heads_per_layer":  # Laguna: keep them different
                changed[name] = [4 if n == max(value) else 2 for n in changed[name]]
            elif size is not None:
                changed[name] = [size] * n_layers
        elif isinstance(value, int) and size is not None:
            changed[name] = min(size, value) if value > 0 else value
        elif isinstance(value, list) and size is not None:
            changed[name] = size
    return changed


@torch.no_grad()
def spread_weights(model: torch.nn.Module) -> None:
    """Randomise weights: initial ones give nearly uniform attention and logits.

    With initial values, a dropped gain, bias or scalar would go unnoticed as well.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or "inv_freq" in name:
            continue
        if name.endswith("bias"):
            tensor.normal_(0.0, 0.2)
        elif "q_norm" in name or "k_norm" in name:
            # Gemma 4 scales no logits: gains of one would make rows attend to one key.
            tensor.mul_(0.5).add_(0.15 * torch.randn_like(tensor))
        elif tensor.ndim < 2:  # gains, scalars, sinks
            tensor.add_(0.3 * torch.randn_like(tensor))
        elif re.search("embed|wte|wpe", name):
            tensor.normal_(0.0, 0.5)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5)


def narrow_twin(config: Any, *, kind: Any = None, **changes: Any) -> Any:
    """Build a narrow random model from a text model's config, the same on every call.

    `kind` is its class, by default the one that Transformers has for the config, and
    `changes` replace further entries. A twin that would not be small is a ValueError;
    Transformers raises all kinds of errors if it cannot build a model of these sizes.
    """
    entries = {**config.to_dict(), **changes}
    entries |= _narrow_sizes(entries) | changes
    entries.pop("per_layer_config", None)  # rebuilt, as it names layers by number
    names = [n for n in _KV_HEADS if n in entries and n not in changes]
    # One of these fits every model that has a separate number of key/value heads.
    counts = [2, 1, entries.get("num_attention_heads")]
    while True:
        entries |= dict.fromkeys(names, counts.pop(0))
        try:
            return _built(type(config).from_dict(entries), kind)
        except Exception:
            if not names or not counts:
                raise


def _built(config: Any, kind: Any) -> Any:
    build = AutoModelForCausalLM.from_config if kind is None else kind._from_config
    with torch.device("meta"):
        outline = build(config)
    n_parameters = sum(tensor.numel() for tensor in outline.parameters())
    if n_parameters > _MOST_PARAMETERS:
        raise ValueError(f"the twin of {type(outline).__name__} is not small")
    # Only the CPU's generator: `torch.manual_seed` also seeds every GPU's, and forking
    # those creates a context on each GPU of the machine.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        model = build(config)
        spread_weights(model)
        model.eval().requires_grad_(False)
        model(input_ids=torch.arange(3, 14)[None], use_cache=False)
    return model
