"""Every causal language model of Transformers: exact, or refused in a sentence?

Of each type a narrow random twin is made from its default config. What the reader finds
is held against the oracle's brute force, which shares no tap with it: on a ragged batch
with windows as they are and with windows of eight tokens, which most rows go beyond,
and on one text longer than the 2,048 keys that sparse layers choose by default.
"""

import dataclasses
import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click
import numpy as np
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from beatrice.benchmarks.speed.commands import AS_JSON, RowPrinter
from beatrice.benchmarks.speed.exact.untouched import FUSED, copy_with_attention
from beatrice.benchmarks.speed.oracle import SIGNALS, Readings, oracle_signals
from beatrice.benchmarks.speed.tiny_models import make_batch, make_sequence
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.backbone.twin import N_POSITIONS, narrow_twin
from beatrice.extract.run.console import Progress, quiet, table_head, table_row
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import TokenSequence

Outcome = Literal["exact", "refused", "wrong", "not built"]
Lengths = Literal["short", "beyond", "long"]
# Of the largest value of a family: rounding in float32 is some 1e-6 of it.
TOLERANCE = 1e-5
WINDOW = 8
_WINDOWS = re.compile(
    r"sliding_window(_size)?|attention_chunk_size|window_size|index_topk"
)
_POSITIONS = re.compile("max_position_embeddings|n_positions|n_ctx|max_seq_len")
_N_LONG = 2300
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
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
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
      lengths: "short" texts of up to 26 tokens, the same with windows of eight tokens
        that they go "beyond", or one "long" text of 2,300, less its two worst tokens.
      outcome: exact if every error is below the tolerance.
      errors: per family of signals, of the family's largest value.
      reason: why it was refused, wrong or not built, else "".
      seconds: wall time.
    """

    name: str
    lengths: Lengths
    outcome: Outcome
    errors: dict[str, float]
    reason: str
    seconds: float

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of the heading."""
        errors = [f"{self.errors[n]:.0e}" if self.errors else "" for n in SIGNALS]
        return [self.name, self.lengths, self.outcome, *errors, self.reason]


def relative_errors(
    found: list[Readings], expected: list[Readings], n_spared: int = 0
) -> dict[str, float]:
    """Return per family the largest error over the family's largest value.

    Args:
      found: what was read of each text, `[n_tokens, …]` per family.
      expected: what should have been.
      n_spared: so many tokens of all may be further off.
    """
    errors = {}
    for name in SIGNALS:
        pairs = [(a[name], b[name]) for a, b in zip(found, expected, strict=True)]
        errors[name] = math.inf
        if all(left.shape == right.shape for left, right in pairs):
            gaps = [np.abs(a - b).reshape(len(a), -1).max(1) for a, b in pairs]
            gap = np.sort(np.nan_to_num(np.concatenate(gaps), nan=np.inf))
            scale = max(float(np.abs(right).max()) for _, right in pairs)
            errors[name] = float(gap[len(gap) - 1 - n_spared]) / (scale or 1.0)
    return errors


def _batch(lengths: Lengths) -> list[TokenSequence]:
    if lengths == "long":
        return [make_sequence(5, _N_LONG, [1, 2270], [2270, 2290], [2290, _N_LONG])]
    return make_batch()


def twin_of(name: str, lengths: Lengths = "short") -> Any:
    """Build the twin of a type; raises what Transformers raises if it cannot."""
    config = CONFIG_MAPPING[name]().get_text_config()
    entries, changes = config.to_dict(), dict(_ENTRIES.get(name, {}))
    if lengths == "beyond":
        held = [k for k, value in entries.items() if _WINDOWS.fullmatch(k) and value]
        changes |= dict.fromkeys(held, WINDOW)
    elif lengths == "long":
        known = [k for k in entries if _POSITIONS.fullmatch(k)]
        changes |= dict.fromkeys(known, N_POSITIONS)
    kind = None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    return narrow_twin(config, kind=kind, **changes)


def _is_sentence(error: Exception) -> bool:
    """Return whether an error is a sentence of ours, not a library's."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and Path(last).is_relative_to(_OURS)


def _expected(model: Any, batch: list[TokenSequence]) -> list[Readings]:
    """Return the oracle's readings, by the model's own eager attention."""
    eager = copy_with_attention(model, "eager")
    expected = [oracle_signals(eager, one) for one in batch]
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        # Granite returns its weights before the sink has taken its share.
        fused = copy_with_attention(model, FUSED)
        for item, one in zip(expected, batch, strict=True):
            item["attn"] = oracle_signals(fused, one)["attn"]
    return expected


def survey_one(name: str, lengths: Lengths = "short") -> Surveyed:
    """Build one type, read it, and compare."""
    began, errors = time.monotonic(), {}
    outcome: Outcome = "not built"
    try:
        model = twin_of(name, lengths)
        outcome, batch = "wrong", _batch(lengths)
        read = SignalReader(Backbone.from_model(model)).read(batch)
        found = [{key: getattr(item, key) for key in SIGNALS} for item in read]
        # A token on the edge between two experts, or between the last key that a
        # sparse layer chooses and the next, may go either way by rounding; a wrong
        # mask moves hundreds.
        n_spared = 2 if lengths == "long" else 0
        errors = relative_errors(found, _expected(model, batch), n_spared)
        if max(errors.values()) < TOLERANCE:
            outcome = "exact"
        reason = "" if outcome == "exact" else "the errors are too large"
    except Exception as error:
        reason = " ".join(str(error).split())
        if outcome == "wrong" and _is_sentence(error):
            outcome = "refused"
        else:
            reason = f"{type(error).__name__}: {reason[:200]}"
    seconds = time.monotonic() - began
    return Surveyed(
        name=name,
        lengths=lengths,
        outcome=outcome,
        errors=errors,
        reason=reason,
        seconds=seconds,
    )


def survey_types(names: Sequence[str], printer: RowPrinter) -> list[Surveyed]:
    """Survey types at all lengths, and print each row as it is there.

    Args:
      names: model types; none is all of Transformers' causal language models.
      printer: of the rows.
    """
    names, rows = names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), []
    printer.head(["type", "lengths", "outcome", *SIGNALS, "reason"])
    with Progress().stage("survey") as update:
        for done, name in enumerate(names, start=1):
            for lengths in get_args(Lengths):
                rows.append(survey_one(name, lengths))
                printer.row(rows[-1])
                # What is refused for its layout is so at any length.
                if lengths == "beyond" and rows[-1].outcome != "exact":
                    break
            update(done, len(names))
    return rows


def _kind_of(reason: str) -> str:
    """Return a reason without the names and numbers of one type."""
    start = re.split(r", found|; use|, its parts", reason)[0]
    return re.sub(r"\b[A-Z]\w*[A-Z]\w*\b|\b\d[\w.-]*|\[[\d, ]+\]", "…", start)


def summary(rows: Sequence[Surveyed]) -> Iterator[str]:
    """Yield Markdown lines: counts by lengths, then types by what became of them."""
    yield ""
    yield table_head(["lengths", *get_args(Outcome), "seconds"])
    for lengths in get_args(Lengths):
        there = [row for row in rows if row.lengths == lengths]
        counts = Counter(row.outcome for row in there)
        cells = [str(counts[outcome]) for outcome in get_args(Outcome)]
        yield table_row([lengths, *cells, f"{sum(row.seconds for row in there):.0f}"])
    kinds: dict[str, list[str]] = {}
    for row in rows:
        if row.lengths == "short" or row.outcome == "wrong":
            why = _kind_of(row.reason) if row.outcome == "refused" else row.reason
            kind = ": ".join(filter(None, (row.outcome, why)))
            kinds.setdefault(kind, []).append(row.name)
    for kind, names in sorted(kinds.items()):
        yield f"* {kind} ({len(names)}): {', '.join(dict.fromkeys(names))}"


def require(rows: Sequence[Surveyed]) -> None:
    """Check that every type is exact or refused.

    Raises:
      ValueError: types are read wrong, or end in a traceback; names them.
    """
    wrong = [f"{row.name} ({row.lengths})" for row in rows if row.outcome == "wrong"]
    if wrong:
        raise ValueError(
            "expected every type read exactly or refused in a sentence, found wrong: "
            + ", ".join(wrong)
        )


@click.command()
@click.argument("types", nargs=-1)
@AS_JSON
def survey(types: tuple[str, ...], as_json: bool) -> None:
    """Read every causal language model of Transformers, or refuse it in a sentence.

    Narrow random twins of all of them, or of model TYPES (llama gpt2), are held against
    a brute-force oracle: a row each for short texts, for texts beyond small windows and
    for one of 2,300 tokens, then the counts, and why types are refused.

    Example: beatrice bench survey llama gpt_oss
    """
    quiet()
    printer = RowPrinter(as_json)
    rows = survey_types(types, printer)
    for line in summary(rows):
        printer.text(line)
    require(rows)
