"""`beatrice bench written`: which architectures are read while they write.

What is read in the passes that write an answer is held against what is read of the same
ids again, and beside it stands how far the model's own logits lie apart with its cache
and without, both of their norm.
"""

import dataclasses
from typing import Any

import click
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from beatrice.benchmarks.bench.commands import AS_JSON, RowPrinter
from beatrice.benchmarks.bench.oracle import twin_of
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.run.console import quiet
from beatrice.extract.signals.decode import check_decoding, decoding_differences
from beatrice.extract.signals.parity import probe_ids
from beatrice.extract.signals.reader import SignalReader

DTYPES = (torch.float32, torch.bfloat16)
_N_TOKENS, _N_STEPS = 20, 4


class Numbers:
    """A tokenizer whose words are ids."""

    chat_template = None

    def decode(self, ids: Any, **_: Any) -> str:
        """Return ids as numbers."""
        return " ".join(map(str, ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What became of one architecture, in float32 and bfloat16."""

    name: str  # the model type
    reasons: tuple[str | None, ...]  # why its answers are read again, or None
    # largest of a family, None where nothing was read
    differences: tuple[float | None, ...]
    # likewise of the model's logits; None where it takes no cache
    own: tuple[float | None, ...]

    def cells(self) -> dict[str, str]:
        """Return the row by its columns."""
        reason = next(filter(None, self.reasons), "")
        pairs = zip(self.differences, self.own, strict=True)
        names = ("fp32", "fp32 of its own", "bf16", "bf16 of its own")
        numbers = [f"{x:.1e}" if x is not None else "" for pair in pairs for x in pair]
        return {
            "type": self.name,
            "read": "again" if reason else "while writing",
            **dict(zip(names, numbers, strict=True)),
            "reason": reason.partition(": ")[2] or reason,
        }


@torch.no_grad()
def own_difference(backbone: Backbone) -> float | None:
    """Return how far the last logits lie apart with a cache and without."""
    ids = probe_ids(backbone, (_N_TOKENS, 2))[:1]
    expected = backbone.model(ids, use_cache=False).logits[:, -_N_STEPS:].float()
    stops, cache, logits = range(_N_TOKENS - _N_STEPS + 1, _N_TOKENS + 1), None, []
    for start, stop in zip((0, *stops), stops, strict=False):
        output = backbone.model(
            ids[:, start:stop], past_key_values=cache, use_cache=True
        )
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return None
        logits.append(output.logits[:, -1].float())
    gap = torch.stack(logits, dim=1) - expected
    return float(gap.norm() / expected.norm())


def measure(name: str) -> Written | None:
    """Measure one type; None where no twin of it can be read at all."""
    rows = []
    for dtype in DTYPES:
        try:
            model = twin_of(name).to(dtype)
            model.generation_config.eos_token_id = 1
            backbone = Backbone.from_model(model, Numbers())
            reader = SignalReader(backbone)
        except Exception:  # what the survey says of the type
            return None
        reason, largest = check_decoding(reader), None
        try:
            largest = max(decoding_differences(reader).values())
        except ValueError:
            pass  # the reason says it
        rows.append((reason, largest, own_difference(backbone)))
    reasons, differences, own = zip(*rows, strict=True)
    return Written(name=name, reasons=reasons, differences=differences, own=own)


@click.command()
@click.argument("types", nargs=-1)
@AS_JSON
def written(types: tuple[str, ...], as_json: bool) -> None:
    """Say which model types of Transformers are read while they write an answer.

    Narrow random twins of all that can be read, or of TYPES (llama gpt2): a row each.

    Example: beatrice bench written llama gpt_oss
    """
    quiet()
    printer = RowPrinter(as_json)
    for name in types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if (row := measure(name)) is not None:
            printer.row(row)
