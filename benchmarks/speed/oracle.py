"""How far the readings of every architecture are from a brute-force oracle's.

A tiny random model of each architecture reads four examples through small odd chunks,
so that every seam between chunks is crossed. The oracle reads each alone and by other
taps: attention maps from Transformers' eager path, states as layers are handed them,
probabilities from the full vocabulary. What a layer adds is caught where it is added:
every addition that PyTorch executes is seen, and those to the residual stream count,
whatever the modules are called. The final norm is the model's own module; everything
after the model is a float64 loop over single numbers.

In float32 the reader is given one padded batch and the oracle attends eagerly. In
bfloat16 the oracle attends by the same fused kernel as the reader, and beside the
reader's error stands how far the model's own eager attention moves the same readings.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as Items

import click
import numpy as np
import torch
from transformers import PreTrainedModel

from beatrice.benchmarks.speed.commands import AS_JSON, RowPrinter
from beatrice.benchmarks.speed.exact.untouched import (
    FUSED,
    Run,
    copy_with_attention,
    layers_and_norm,
    logit_scale,
    run_model,
)
from beatrice.benchmarks.speed.tiny_models import architectures, make_batch
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.signals.batch import ReadingBudget
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import TokenSequence

Readings = dict[str, np.ndarray]  # by family of signals
SIGNALS = ("hidden", "prob", "resid", "attn")

# float32 states of size 30 carry rounding of 4e-6; the worst seen is 6e-5 (Gemma 4,
# whose six layers rescale the stream).
TOLERANCE = 1e-4
ZERO_MASS = 1e-30  # below it float32 weights have no digits, and count as none
_HEAD = ["architecture", *(f"{d} {name}" for d in ("fp32", "bf16") for name in SIGNALS)]


def prob_scalars(logits: Items[float], target: int) -> list[float]:
    """Return the five scalars of one next-token distribution."""
    peak = max(logits)
    exponentials = [math.exp(value - peak) for value in logits]
    total = sum(exponentials)
    p = [value / total for value in exponentials]
    first, second = sorted(p, reverse=True)[:2]
    entropy = -sum(value * math.log(value) for value in p if value > 0)
    return [p[target], -math.log(p[target]), entropy, first, first - second]


def entropy_and_mass(weights: Items[float]) -> tuple[float, float]:
    """Return the entropy in nats of weights made to sum to one, and their sum."""
    mass = sum(weights)
    if mass < ZERO_MASS:
        return 0.0, 0.0
    shares = [weight / mass for weight in weights if weight > 0]
    return -sum(share * math.log(share) for share in shares), mass


def attention_reading(
    attention_map: np.ndarray, spans: Items[tuple[int, int]], position: int
) -> list[tuple[float, float]]:
    """Return `[2 partners][entropy, mass]` of one token in one head."""
    own = [i for i, (a, b) in enumerate(spans) if a <= position < b]
    if not own:
        return [(0.0, 0.0), (0.0, 0.0)]
    readings = []
    for partner in [i for i in range(3) if i != own[0]]:
        tokens = range(*spans[partner])
        is_before = partner < own[0]  # it is attended to, else it attends
        seen = attention_map[position] if is_before else attention_map[:, position]
        readings.append(entropy_and_mass([seen[token] for token in tokens]))
    return readings


@torch.no_grad()
def resid_scalars(model: PreTrainedModel, run: Run, targets: np.ndarray) -> np.ndarray:
    """Return `[n_tokens, 4 * n_layers]`: norms, and pushes through the norm itself."""
    norm = copy.deepcopy(layers_and_norm(model)[1]).float()
    words = model.get_output_embeddings().weight.double()[torch.from_numpy(targets)]
    words = words * logit_scale(model)

    def lens(state: torch.Tensor) -> torch.Tensor:
        return (norm(state.float()).double() * words).sum(-1)

    columns = []
    for state, (att, ffn) in zip(run.states[:-1], run.contributions, strict=True):
        before = state.double()
        middle, after = before + att, before + att + ffn
        columns += [
            att.norm(dim=-1),
            lens(middle) - lens(before),
            ffn.norm(dim=-1),
            lens(after) - lens(middle),
        ]
    return torch.stack(columns, dim=-1).numpy()


def _attn_readings(maps: list[np.ndarray], spans: Items[tuple[int, int]]) -> np.ndarray:
    """Return `[n_tokens, 2, 2, n_attention_layers, n_heads]`."""
    n_heads, n_tokens, _ = maps[0].shape
    attn = np.zeros((n_tokens, 2, 2, len(maps), n_heads))
    for t, layer, head in np.ndindex(n_tokens, len(maps), n_heads):
        attn[t, :, :, layer, head] = attention_reading(maps[layer][head], spans, t)
    return attn


def oracle_signals(
    model: PreTrainedModel, sequence: TokenSequence
) -> dict[str, np.ndarray]:
    """Return the four families of one sequence in float64.

    Args:
      model: a copy made by `copy_with_attention`.
      sequence: one teacher-forced example.
    """
    run = run_model(model, sequence.ids)
    rows = zip(run.logits, sequence.targets, strict=True)
    return {
        "hidden": torch.stack(run.states, dim=1).double().numpy(),
        "prob": np.array([prob_scalars(row, target) for row, target in rows]),
        "resid": resid_scalars(model, run, sequence.targets),
        "attn": _attn_readings(run.maps, sequence.spans.tolist()),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exactness:
    """Largest absolute errors of one architecture, by family of signals.

    Attributes:
      name: the architecture.
      float32: reader against oracle.
      bfloat16: reader against oracle.
      gap: oracle on eager against oracle on fused attention, in bfloat16.
    """

    name: str
    float32: dict[str, float]
    bfloat16: dict[str, float]
    gap: dict[str, float]

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of the heading."""
        half = [f"{self.bfloat16[n]:.1e} ({self.gap[n]:.1e})" for n in SIGNALS]
        return [self.name, *(f"{self.float32[n]:.1e}" for n in SIGNALS), *half]


def reader_signals(model: PreTrainedModel, *, together: bool) -> list[Readings]:
    """Read the examples with the reader, in one padded batch or each alone."""
    small = ReadingBudget(  # so that every seam between chunks is crossed
        n_attention_weights=1000, n_tokens_per_chunk=7, n_words_per_block=13
    )
    reader, batch = SignalReader(Backbone.from_model(model), budget=small), make_batch()
    groups = [batch] if together else [[sequence] for sequence in batch]
    found = [item for group in groups for item in reader.read(group)]
    return [{name: getattr(item, name) for name in SIGNALS} for item in found]


def oracle_batch(model: PreTrainedModel, attention: str) -> list[Readings]:
    """Read the batch with the oracle, one example at a time, "eager" or `FUSED`."""
    twin = copy_with_attention(model, attention)
    return [oracle_signals(twin, sequence) for sequence in make_batch()]


def largest_errors(found: list[Readings], expected: list[Readings]) -> dict[str, float]:
    """Return the largest absolute error per family of signals; NaN counts as worst."""
    errors = {}
    for name in SIGNALS:
        pairs = zip(found, expected, strict=True)
        gap = np.max([np.abs(left[name] - right[name]).max() for left, right in pairs])
        errors[name] = float(np.nan_to_num(gap, nan=np.inf))
    return errors


def measure(name: str, build: Callable[[], PreTrainedModel]) -> Exactness:
    """Measure one architecture in both precisions."""
    single, half = build(), build().to(torch.bfloat16)
    read = reader_signals(single, together=True)
    fused = oracle_batch(half, FUSED)
    return Exactness(
        name=name,
        float32=largest_errors(read, oracle_batch(single, "eager")),
        # Alone: the model's products round differently in batches of other shapes.
        bfloat16=largest_errors(reader_signals(half, together=False), fused),
        gap=largest_errors(oracle_batch(half, "eager"), fused),
    )


def require(rows: list[Exactness]) -> None:
    """Check every row.

    Raises:
      ValueError: an error is too large; names the first architecture and family.
    """
    for row in rows:
        of_itself = ", the distance between the model's eager and fused attention"
        for name, dtype, found, limit, why in [
            *((n, "float32", row.float32[n], TOLERANCE, "") for n in SIGNALS),
            *((n, "bfloat16", row.bfloat16[n], row.gap[n], of_itself) for n in SIGNALS),
        ]:
            if not found <= max(limit, TOLERANCE):  # so that NaN fails
                raise ValueError(
                    f"{row.name}: {dtype} {name} is {found:.1e} from the oracle, "
                    f"expected at most {limit:.1e}{why}"
                )


@click.command()
@AS_JSON
def oracle(as_json: bool) -> None:
    """Compare every architecture with a brute-force oracle; print the table.

    Largest absolute errors of tiny random models, fp32 and bf16; behind each bf16
    error, in brackets, how far the model's own eager attention moves that reading.

    Example: beatrice bench oracle
    """
    quiet()
    rows, every, printer = [], list(architectures()), RowPrinter(as_json)
    printer.head(_HEAD)
    with Progress().stage("oracle") as update:
        for done, (name, build) in enumerate(every, start=1):
            rows.append(measure(name, build))
            printer.row(rows[-1])
            update(done, len(every))
    require(rows)
