"""Every causal language model of Transformers: read exactly, or refused in a sentence?

Of each type a narrow random twin is made from its default config. What the reader finds
on ragged batches is held against the oracle's brute force, which shares no tap with it:
with windows as they are and with windows of eight tokens, which most rows cross; and on
one long text, which the default windows of sparse layers end within.
"""

import dataclasses
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from benchmarks.speed.exact.untouched import FUSED, copy_with_attention
from benchmarks.speed.oracle import SIGNALS, oracle_signals
from benchmarks.speed.tiny_models import make_batch, make_sequence
from extract.backbone.loading import Backbone
from extract.backbone.twin import narrow_twin
from extract.signals.plan import TokenSequence
from extract.signals.reader import SignalReader

Outcome = Literal["exact", "refused", "wrong", "not built"]
# Of the largest value of a family: rounding in float32 is some 1e-6 of it.
TOLERANCE = 1e-5
WINDOW = 8
_WINDOWS = re.compile(
    r"sliding_window(_size)?|attention_chunk_size|window_size|index_topk"
)
_OURS = Path(__file__).parents[3] / "extract"
# What a twin needs beyond its small sizes: constraints between entries of a config.
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}
_SLIDING = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
_SLIDING |= {"q_lora_rank": 16, "kv_lora_rank": 16}
_SLIDING |= {"qk_nope_head_dim": 8, "v_head_dim": 8}
_DOTS = {f"swa_{name}": size for name, size in _SLIDING.items()}
_EXPERTS = {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2}
_ONE_HEAD_SIZE = {"head_dim": 8}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_TOWER |= {"num_attention_heads": 2}
_ENTRIES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"),
            {"rope_type": "default", "rope_theta": 1e4},
        ),
    },
    # Eight heads of an indexer: fewer, and its ReLU leaves ties among the scores.
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), {"index_n_heads": 8}),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": _EXPERTS,
    "dots3_note": {"num_key_value_heads": 4, **_DOTS},
    "dots3_note_text": {"num_key_value_heads": 4, **_DOTS},
    "falcon_h1": _MAMBA,
    "git": {"vision_config": {**_TOWER, "image_size": 16, "patch_size": 8}},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": _ONE_HEAD_SIZE,
    "hunyuan_v1_moe": _ONE_HEAD_SIZE,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "qk_head_dim": 16,
    },
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "num_key_value_heads": 2,
    },
    "ministral": _ONE_HEAD_SIZE,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surveyed:
    """What became of one type of model.

    Attributes:
      name: the model type.
      windows: "default", "small" or "long".
      outcome: exact if every error is below the tolerance.
      errors: per family of signals, of the family's largest value.
      reason: why it was refused, wrong or not built, else "".
      seconds: wall time.
    """

    name: str
    windows: str
    outcome: Outcome
    errors: dict[str, float]
    reason: str
    seconds: float

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of the heading."""
        errors = [f"{self.errors[n]:.0e}" if self.errors else "" for n in SIGNALS]
        return [self.name, self.windows, self.outcome, *errors, self.reason]


def relative_errors(
    found: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]
) -> dict[str, float]:
    """Return per family the largest error over the family's largest value."""
    errors = {}
    for name in SIGNALS:
        pairs = [(a[name], b[name]) for a, b in zip(found, expected, strict=True)]
        scale = max(float(np.abs(right).max()) for _, right in pairs)
        same = all(left.shape == right.shape for left, right in pairs)
        gap = max(float(np.abs(a - b).max()) for a, b in pairs) if same else np.inf
        errors[name] = float(np.nan_to_num(gap / (scale or 1.0), nan=np.inf))
    return errors


def _long_batch() -> list[TokenSequence]:
    return [make_sequence(5, 2300, [1, 2270], [2270, 2290], [2290, 2300])]


def twin_of(name: str, windows: str = "default") -> Any:
    """Build the twin of a type; raises what Transformers raises if it cannot."""
    config = CONFIG_MAPPING[name]().get_text_config()
    entries = config.to_dict()
    changes = {}
    if windows == "small":
        held = [k for k, value in entries.items() if _WINDOWS.fullmatch(k) and value]
        changes |= dict.fromkeys(held, WINDOW)
    changes |= _ENTRIES.get(name, {})
    kind = None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    return narrow_twin(config, kind=kind, **changes)


def _own_sentence(error: Exception) -> bool:
    """Return whether an error is a sentence of ours, not a library's."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and Path(last).is_relative_to(_OURS)


def _expected(model: Any, batch: list[TokenSequence]) -> list[dict[str, np.ndarray]]:
    """Return the oracle's readings, by the model's own eager attention."""
    eager = copy_with_attention(model, "eager")
    expected = [oracle_signals(eager, one) for one in batch]
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        # Granite returns its weights before the sink has taken its share.
        fused = copy_with_attention(model, FUSED)
        for item, one in zip(expected, batch, strict=True):
            item["attn"] = oracle_signals(fused, one)["attn"]
    return expected


def survey_one(name: str, windows: str) -> Surveyed:
    """Build, read and compare one type."""
    began, errors = time.monotonic(), {}
    outcome: Outcome = "not built"
    try:
        model = twin_of(name, windows)
        outcome = "wrong"
        batch = _long_batch() if windows == "long" else make_batch()
        read = SignalReader(Backbone.from_model(model)).read(batch)
        found = [{key: getattr(item, key) for key in SIGNALS} for item in read]
        errors = relative_errors(found, _expected(model, batch))
        is_exact = max(errors.values()) < TOLERANCE
        outcome, reason = ("exact", "") if is_exact else ("wrong", "errors too large")
    except Exception as error:
        if outcome == "wrong" and _own_sentence(error):
            outcome = "refused"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if outcome == "wrong":
            reason = f"{reason[:150]} {traceback.format_exc(limit=-2)[-300:]}"
    return Surveyed(
        name=name,
        windows=windows,
        outcome=outcome,
        errors=errors,
        reason=reason,
        seconds=time.monotonic() - began,
    )


def survey(names: list[str], windows: tuple[str, ...]) -> Iterator[Surveyed]:
    """Survey types; a type that is refused or not built is not asked again."""
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for kind in windows:
            row = survey_one(name, kind)
            yield row
            if row.outcome in ("not built",):
                break
