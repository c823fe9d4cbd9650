"""The bytes of everything that may be kept of a model's signals, as a small table."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import get_args

from extract.backbone.checkpoint import Outline
from extract.backbone.layout import find_layout
from extract.run.directory import RunDir
from extract.run.files import JsonLines
from extract.store.config import StoreConfig, as_size, model_shapes, stored_bytes
from extract.store.families import SHORT_NAMES, Spans

Shapes = Mapping[str, Sequence[int]]

_WHERE = {"all": "all spans", "answer": "answer span"}
# What stands for a run where none is named: the sizes of the reference's estimates.
_N_ANSWERS, _N_TOKENS, _N_ANSWER_TOKENS = 10_000, 400, 60


def outline_shapes(outline: Outline) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's readings, every hidden layer kept.

    Raises:
      ValueError: its residual layout is unknown.
    """
    layout = find_layout(outline.model)
    return model_shapes(
        d_model=layout.head.in_features,
        n_layers=len(layout.layers),
        n_attention_layers=len(layout.attention_layers),
        n_heads=outline.config.num_attention_heads,
    )


def sizes_of_choices(
    shapes: Shapes, kept: StoreConfig, *, n_tokens: int, n_answer: int
) -> str:
    """Return a table of bytes: a line per type of the hidden states.

    Args:
      shapes: as `outline_shapes` gives them.
      kept: says how the other families are written.
      n_tokens: of all sequences, prompts included.
      n_answer: of all answer spans.
    """
    columns = list(itertools.product((None, (0,)), get_args(Spans)))
    heads = [
        f"{'every layer' if layers is None else 'one layer'}, {_WHERE[spans]}"
        for layers, spans in columns
    ]
    lines = ["      " + "".join(f"{head:>26}" for head in heads)]
    for short, dtype in SHORT_NAMES.items():
        cells = []
        for layers, spans in columns:
            choice = dataclasses.replace(
                kept, hidden_layers=layers, hidden_spans=spans, dtype=dtype
            )
            sizes = stored_bytes(shapes, choice, n_tokens=n_tokens, n_answer=n_answer)
            cells.append(as_size(sum(sizes.values())))
        lines.append(f"  {short:<4}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def typical_sizes(shapes: Shapes) -> str:
    """Return the table for a number of answers that stands for a run."""
    table = sizes_of_choices(
        shapes,
        StoreConfig(),
        n_tokens=_N_ANSWERS * _N_TOKENS,
        n_answer=_N_ANSWERS * _N_ANSWER_TOKENS,
    )
    return (
        f"{_N_ANSWERS:,} answers of {_N_TOKENS} tokens, {_N_ANSWER_TOKENS} of them in "
        "the answer span, take in the feature store, by what is kept of the hidden "
        f"states (--dtype, --hidden-layers, --hidden-spans):\n{table}"
    )


def count_tokens(run: RunDir, answer_span: str) -> dict[str, int] | None:
    """Count the tokens of a run's answers, and of their answer spans.

    Returns:
      `n_tokens` and `n_answer` as `stored_bytes` takes them, or None without answers.
    """
    n_tokens = n_answer = 0
    for row in JsonLines(run.answers / "answers.jsonl").whole_rows():
        n_tokens += len(row["prompt_ids"]) + len(row["token_ids"])
        n_answer += len(row["token_ids"]) + (answer_span == "emitting")
        n_answer -= row["stop_id"] is None  # the last token emitted nothing we know
    return {"n_tokens": n_tokens, "n_answer": n_answer} if n_tokens else None
