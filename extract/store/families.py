"""One family of signals in a feature store, what is stored of it, and its rounding."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from beatrice.extract.records import check_choices

Dtype = Literal["bfloat16", "float16", "float32", "int8"]
# Attention masses can be below 6e-8, the smallest number of float16.
ScalarDtype = Literal["bfloat16", "float32"]
Spans = Literal["all", "answer"]
# As on the command line.
SHORT_NAMES: dict[str, Dtype] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "int8": "int8",
}
# A chunk of at most this size is the unit of a read. With 1 MiB writing cost more
# (250 against 325 MiB per CPU second) and reading a layer cost the same.
_CHUNK_BYTES = 1 << 18
_LARGEST_CODE = 127


def numpy_dtype(dtype: Dtype) -> np.dtype:
    """Return NumPy's type of that name; bfloat16 is that of `ml_dtypes`."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Shape of one family of signals at one token."""

    shape: tuple[int, ...]  # the axes behind the row axis
    # `bfloat16`, `float16`, `float32`, or `int8`, which needs a companion family of
    # scales beside it, see `scale_family`.
    dtype: Dtype = "float32"
    # True where the first axis is layers that are read one at a time; such a family is
    # chunked so that the others are not touched.
    by_layer: bool = False
    spans: Spans = "all"  # rows of every token, or of those of the answer span alone

    def __post_init__(self) -> None:
        """Check that there are channels."""
        if not self.shape or min(self.shape) < 1:
            raise ValueError(
                f"a family needs at least one channel per token, found shape "
                f"{self.shape}; leave an empty family out"
            )

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy's type of this family's values."""
        return numpy_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return int(np.prod(self.shape)) * self.numpy_dtype.itemsize

    def chunk_shape(self, rows_per_shard: int) -> list[int]:
        """Shape of the unit of a read; its rows divide `rows_per_shard`."""
        inner = [1, *self.shape[1:]] if self.by_layer else list(self.shape)
        row_bytes = int(np.prod(inner)) * self.numpy_dtype.itemsize
        rows = rows_per_shard
        while rows > 1 and rows * row_bytes > _CHUNK_BYTES:
            rows //= 2
        return [rows, *inner]


def scale_name(name: str) -> str:
    """Name the family that holds the scales of an int8 family."""
    return f"{name}_scale"


def scale_family(family: Family) -> Family:
    """Return the family of an int8 family's scales: one for each last axis."""
    return dataclasses.replace(family, shape=family.shape[:-1], dtype="float32")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Values as they are written."""

    # Of the values' shape, in the stored type: `out`, or the values themselves where
    # they have that type.
    codes: np.ndarray
    scales: np.ndarray | None  # float32, without the last axis; None but of int8
    n_invalid: int  # values that were not finite to begin with
    n_overflowed: int  # finite values that the type turned into infinities


def encode(values: np.ndarray, dtype: Dtype, out: np.ndarray | None = None) -> Encoded:
    """Write float32 values `[..., n_channels]` in a type; count what it cannot hold.

    Codes are written into `out`, of that type, or into an array that is made if needed.
    """
    scales = None
    if dtype == "int8":
        codes, scales = _quantise(values, out)
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # counted below
            if out is None:
                codes = values.astype(numpy_dtype(dtype), copy=False)
            else:
                out[...] = values
                codes = out
    if _n_not_finite(codes if scales is None else scales) == 0:
        return Encoded(codes=codes, scales=scales, n_invalid=0, n_overflowed=0)
    n_invalid = _n_not_finite(values)
    lost = 0 if scales is not None else _n_not_finite(codes) - n_invalid
    return Encoded(codes=codes, scales=scales, n_invalid=n_invalid, n_overflowed=lost)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return float32 values of int8 codes `[..., n_channels]` and scales `[...]`."""
    values = codes.astype(np.float32)
    values *= scales[..., None]
    return values


def as_written(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Return float32 values as they would be read back after being written."""
    encoded = encode(values, dtype)
    n_lost = encoded.n_invalid + encoded.n_overflowed
    if n_lost:
        raise ValueError(
            f"{n_lost} of {values.size} values are not numbers or too large for "
            f"{dtype}, in which the features were written; extract with --dtype bf16"
        )
    if encoded.scales is not None:
        return decode(encoded.codes, encoded.scales)
    return encoded.codes.astype(np.float32)


def _quantise(
    values: np.ndarray, out: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore"):  # a scale that is no number is counted
        scales = np.abs(values).max(axis=-1) / np.float32(_LARGEST_CODE)
        step = np.where(scales > 0, scales, np.float32(1))[..., None]
        codes = np.rint(values / step).astype(np.int8)
    if out is not None:
        out[...] = codes
    return codes, scales.astype(np.float32)


def _n_not_finite(values: np.ndarray) -> int:
    """Count NaN and infinities; `np.isfinite` is slow on bfloat16."""
    if values.dtype.itemsize == 2:
        exponent = 0x7C00 if values.dtype == np.float16 else 0x7F80
        magnitudes = values.view(np.uint16) & 0x7FFF
        # Usually all are finite, and a maximum is cheaper than a count.
        if magnitudes.max(initial=0) < exponent:
            return 0
        return int((magnitudes >= exponent).sum())
    return values.size - int(np.count_nonzero(np.isfinite(values)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """What a store keeps of every answer."""

    # Entries of the resid axis to keep (0 is the embedding); None keeps all. The sweep
    # needs several, training one.
    hidden_layers: tuple[int, ...] | None = None
    # Tokens whose hidden states are kept: all, or those of the answer span. The other
    # families are kept for every token.
    hidden_spans: Spans = "all"
    # how `hidden` is stored. bfloat16 keeps the range of the residual stream, float16
    # overflows at 65504 (which is an error), int8 has a scale per token and layer.
    dtype: Dtype = "bfloat16"
    scalars: ScalarDtype = "float32"  # how the other families are stored

    def __post_init__(self) -> None:
        """Check the choices; whether a model has the layers, its reader checks."""
        check_choices(self)

    def describe(self) -> str:
        """Return what is kept in a few words."""
        layers = "every layer"
        if self.hidden_layers is not None:
            plural = "s" if len(self.hidden_layers) != 1 else ""
            layers = f"layer{plural} {', '.join(map(str, self.hidden_layers))}"
        spans = "all spans" if self.hidden_spans == "all" else "the answer span"
        return (
            f"hidden states of {layers} on {spans} as {self.dtype}, the rest as "
            f"{self.scalars}"
        )


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Read layers as typed, such as `16` or `8,16,24`, ascending; None for `all`."""
    if text.strip() == "all":
        return None
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(
            f"expected all, or layer numbers from 0 (the embedding) with commas "
            f"between, such as 8,16,24; came {text!r}"
        )
    layers = sorted(map(int, numbers))
    if len(set(layers)) < len(layers):
        raise ValueError(f"a layer is there twice in {text!r}; name each once")
    return tuple(layers)


def check_layers(layers: tuple[int, ...] | None, n_entries: int) -> tuple[int, ...]:
    """Return the entries of a resid axis `[n_entries]` to keep; None is all of them."""
    if layers is None:
        return tuple(range(n_entries))
    is_inside = all(0 <= layer < n_entries for layer in layers)
    if not is_inside or len(set(layers)) < len(layers):
        raise ValueError(
            f"hidden_layers: expected entries of 0 (embedding) to {n_entries - 1}, "
            f"each once, found {list(layers)}"
        )
    return tuple(layers)


def stored_families(
    shapes: Mapping[str, Sequence[int]], config: StoreConfig
) -> dict[str, Family]:
    """Return what a store holds for each family that is read.

    Shapes are those of one token's reading; `hidden` is `[n_layers_kept, d_model]`.
    """
    families: dict[str, Family] = {}
    for name, shape in shapes.items():
        is_hidden = name == "hidden"
        families[name] = Family(
            shape=tuple(shape),
            dtype=config.dtype if is_hidden else config.scalars,
            by_layer=is_hidden,
            spans=config.hidden_spans if is_hidden else "all",
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
    config: StoreConfig,
    *,
    n_tokens: int,
    n_answer: int,
) -> dict[str, int]:
    """Return the bytes that a choice takes, per family.

    These are the values alone. Checksums, lists of chunks and ranges rounded up to
    whole chunks add less than one percent where the chunks are full.

    Args:
      shapes: as `model_shapes` gives them; layers that are not kept are left out.
      config: what is kept.
      n_tokens: tokens of all sequences, prompts included.
      n_answer: tokens of all answer spans.
    """
    n_entries, width = shapes["hidden"]
    n_stored_layers = len(check_layers(config.hidden_layers, n_entries))
    families = stored_families({**shapes, "hidden": (n_stored_layers, width)}, config)
    n_rows = {"all": n_tokens, "answer": n_answer}
    return {
        name: family.row_bytes * n_rows[family.spans]
        for name, family in families.items()
    }


def as_size(n_bytes: int) -> str:
    """Format a number of bytes in decimal units, such as 228 GB."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    power = min(4, int(math.log10(n_bytes)) // 3)
    value = n_bytes / 1000**power
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {' kMGT'[power]}B"
