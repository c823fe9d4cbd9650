"""How far the readings of every architecture are from the oracle's.

A tiny random model of each architecture reads four examples through small odd chunks,
so that every seam between chunks is crossed, and the brute-force oracle
(`benchmarks.speed.oracle`) reads each alone. In float32 the reader is given one
padded batch and the oracle attends eagerly. In bfloat16 the oracle attends by the same
fused kernel as the reader, and beside the reader's error stands how far the model's
own eager attention moves the same readings.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.speed import oracle
from benchmarks.speed.tiny_models import FAMILIES, N_TEXT_IDS, tiny_model
from benchmarks.speed.tiny_wrappers import WRAPPERS, multimodal_wrapper
from extract.backbone.loading import Backbone
from extract.signals.batch import ReadingBudget
from extract.signals.plan import TokenSequence
from extract.signals.reader import SignalReader

SIGNALS = ("hidden", "prob", "resid", "attn")

# float32 states of size 30 carry rounding of 4e-6; the worst seen is 6e-5 (Gemma 4,
# whose six layers rescale the stream).
TOLERANCE = 1e-4


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


def make_sequence(seed: int, n_tokens: int, *spans: list[int]) -> TokenSequence:
    """Return random tokens with the given context, question and answer span."""
    rng = np.random.default_rng(seed)
    text = rng.integers(3, N_TEXT_IDS, n_tokens + 1)
    return TokenSequence(ids=text[:-1], targets=text[1:], spans=np.array(spans))


def make_batch() -> list[TokenSequence]:
    """Uneven lengths; no template tokens; no context; no answer; one-token answer."""
    return [
        make_sequence(1, 26, [2, 15], [15, 22], [22, 26]),
        make_sequence(2, 17, [0, 9], [9, 12], [12, 17]),
        make_sequence(3, 9, [1, 1], [1, 8], [8, 9]),
        make_sequence(4, 20, [1, 12], [12, 20], [20, 20]),
    ]


def architectures() -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    """Yield every architecture's name and what builds it."""
    for family in FAMILIES:
        yield family, lambda family=family: tiny_model(family)
    for family in WRAPPERS:
        yield f"{family} (wrapper)", lambda family=family: multimodal_wrapper(family)


def chunked_reader(model: PreTrainedModel) -> SignalReader:
    """Return a reader with chunks so small that every seam is crossed."""
    return SignalReader(
        Backbone.from_model(model),
        budget=ReadingBudget(
            n_attention_weights=1000, n_tokens_per_chunk=7, n_words_per_block=13
        ),
    )


Readings = dict[str, np.ndarray]


def reader_signals(model: PreTrainedModel, *, together: bool) -> list[Readings]:
    """Read the examples with the reader, in one padded batch or each alone."""
    reader, batch = chunked_reader(model), make_batch()
    if together:
        found = reader.read(batch)
    else:
        found = [reader.read([sequence])[0] for sequence in batch]
    return [{name: getattr(item, name) for name in SIGNALS} for item in found]


def oracle_batch(
    model: PreTrainedModel, attention: Literal["eager", "oracle_fused"]
) -> list[Readings]:
    """Read the batch with the oracle, one example at a time."""
    twin = oracle.copy_with_attention(model, attention)
    return [oracle.oracle_signals(twin, sequence) for sequence in make_batch()]


def largest_errors(found: list[Readings], expected: list[Readings]) -> dict[str, float]:
    """Return the largest absolute error per family of signals; NaN counts as worst."""
    errors = {}
    for name in SIGNALS:
        pairs = zip(found, expected, strict=True)
        gaps = [np.abs(left[name] - right[name]).max() for left, right in pairs]
        errors[name] = float(np.nan_to_num(np.max(gaps), nan=np.inf))
    return errors


def measure(name: str, build: Callable[[], PreTrainedModel]) -> Exactness:
    """Measure one architecture in both precisions."""
    single, half = build(), build().to(torch.bfloat16)
    read = reader_signals(single, together=True)
    fused = oracle_batch(half, oracle.FUSED)
    return Exactness(
        name=name,
        float32=largest_errors(read, oracle_batch(single, "eager")),
        # Alone: the model's products round differently in batches of other shapes.
        bfloat16=largest_errors(reader_signals(half, together=False), fused),
        gap=largest_errors(oracle_batch(half, "eager"), fused),
    )


def table(rows: list[Exactness]) -> str:
    """Return the Markdown table."""
    heads = [f"fp32 {name}" for name in SIGNALS] + [f"bf16 {name}" for name in SIGNALS]
    lines = ["| architecture | " + " | ".join(heads) + " |", "| --- |" + " --- |" * 8]
    for row in rows:
        cells = [f"{row.float32[name]:.1e}" for name in SIGNALS]
        cells += [f"{row.bfloat16[name]:.1e} ({row.gap[name]:.1e})" for name in SIGNALS]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def require(rows: list[Exactness]) -> None:
    """Check every row.

    Raises:
      ValueError: an error is too large; names the first architecture and family.
    """
    for row in rows:
        for name in SIGNALS:
            if not row.float32[name] <= TOLERANCE:
                raise ValueError(
                    f"{row.name}: float32 {name} is {row.float32[name]:.1e} from the "
                    f"oracle, expected at most {TOLERANCE:.0e}"
                )
            if not row.bfloat16[name] <= row.gap[name]:
                raise ValueError(
                    f"{row.name}: bfloat16 {name} is {row.bfloat16[name]:.1e} from the "
                    f"oracle, expected at most {row.gap[name]:.1e}, the distance "
                    "between the model's eager and fused attention"
                )
