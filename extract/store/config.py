"""What a store keeps of every answer, and how many bytes that is."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from beatrice.extract.store.families import (
    Dtype,
    Family,
    Spans,
    scale_family,
    scale_name,
)

# Attention masses can be below 6e-8, the smallest number of float16.
ScalarDtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """What a store keeps of every answer.

    Attributes:
      hidden_layers: entries of the resid axis to keep (0 is the embedding); None
        keeps all. The sweep needs several, training one.
      hidden_spans: tokens whose hidden states are kept: all, or those of the answer
        span. The other families are kept for every token.
      dtype: how `hidden` is stored. bfloat16 keeps the range of the residual stream,
        float16 overflows at 65504 (which is refused), int8 has a scale per token and
        layer.
      scalars: how the other families are stored.
    """

    hidden_layers: tuple[int, ...] | None = None
    hidden_spans: Spans = "all"
    dtype: Dtype = "bfloat16"
    scalars: ScalarDtype = "float32"

    def __post_init__(self) -> None:
        """Check the choices; whether a model has the layers, its reader checks."""
        types = {"hidden_spans": Spans, "dtype": Dtype, "scalars": ScalarDtype}
        for name, choices in types.items():
            found = getattr(self, name)
            if found not in get_args(choices):
                raise ValueError(
                    f"{name} is one of {', '.join(get_args(choices))}, not {found!r}"
                )

    def in_words(self) -> str:
        """Say what is kept in a few words."""
        which = "every layer"
        if self.hidden_layers is not None:
            plural = "s" if len(self.hidden_layers) != 1 else ""
            which = f"layer{plural} {', '.join(map(str, self.hidden_layers))}"
        where = "all spans" if self.hidden_spans == "all" else "the answer span"
        return (
            f"hidden states of {which} on {where} as {self.dtype}, the rest as "
            f"{self.scalars}"
        )


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Read layers as typed, such as `16` or `8,16,24`, in ascending order.

    Returns:
      The layers, or None for `all`.

    Raises:
      ValueError: not such a list, or a layer is there twice.
    """
    if text.strip() == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(
            f"expected all, or layer numbers from 0 (the embedding) with commas "
            f"between, such as 8,16,24; found {text!r}"
        )
    layers = sorted(map(int, parts))
    if len(set(layers)) < len(layers):
        raise ValueError(f"a layer is there twice in {text!r}; name each once")
    return tuple(layers)


def check_layers(layers: tuple[int, ...] | None, n_entries: int) -> tuple[int, ...]:
    """Return the entries of a resid axis `[n_entries]` to keep; None is all of them.

    Raises:
      ValueError: there is no such entry, or one is there twice.
    """
    if layers is None:
        return tuple(range(n_entries))
    if any(not 0 <= layer < n_entries for layer in layers):
        raise ValueError(
            f"hidden_layers: expected entries of 0 (embedding) to {n_entries - 1}, "
            f"found {list(layers)}"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(f"hidden_layers: found one twice, {list(layers)}")
    return tuple(layers)


def stored_families(
    shapes: Mapping[str, Sequence[int]], kept: StoreConfig
) -> dict[str, Family]:
    """Return what a store holds for each family that is read.

    Args:
      shapes: shape of one token's reading, per family; `hidden` is
        `[n_layers_kept, d_model]`.
      kept: what is kept.
    """
    families: dict[str, Family] = {}
    for name, shape in shapes.items():
        is_hidden = name == "hidden"
        families[name] = Family(
            shape=tuple(shape),
            dtype=kept.dtype if is_hidden else kept.scalars,
            by_layer=is_hidden,
            spans=kept.hidden_spans if is_hidden else "all",
        )
        if families[name].dtype == "int8":
            families[scale_name(name)] = scale_family(families[name])
    return families


def model_shapes(
    *, d_model: int, n_layers: int, n_attention_layers: int, n_heads: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's readings with every layer of `hidden` kept.

    `n_attention_layers` counts the decoder blocks that have attention.
    """
    return {
        "hidden": (n_layers + 1, d_model),
        "prob": (5,),
        "resid": (4 * n_layers,),
        "attn": (2, 2, n_attention_layers, n_heads),
    }


def stored_bytes(
    shapes: Mapping[str, Sequence[int]],
    kept: StoreConfig,
    *,
    n_tokens: int,
    n_answer: int,
) -> dict[str, int]:
    """Return the bytes that a choice takes, per family.

    These are the values alone. Checksums, lists of chunks and ranges rounded up to
    whole chunks add less than one percent where the chunks are full.

    Args:
      shapes: as `model_shapes` gives them; layers that are not kept are left out.
      kept: what is kept.
      n_tokens: tokens of all sequences, prompts included.
      n_answer: tokens of all answer spans.
    """
    layers, width = shapes["hidden"]
    n_kept = len(check_layers(kept.hidden_layers, layers))
    families = stored_families({**shapes, "hidden": (n_kept, width)}, kept)
    n_rows = {"all": n_tokens, "answer": n_answer}
    return {
        name: family.row_bytes * n_rows[family.spans]
        for name, family in families.items()
    }


def as_size(n_bytes: int) -> str:
    """Say a number of bytes in decimal units, such as 228 GB."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    power = min(4, int(math.log10(n_bytes)) // 3)
    value = n_bytes / 1000**power
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {' kMGT'[power]}B"
