"""One family of signals in a feature store: its shape, its type, its rounding."""

import dataclasses
from typing import Any, Literal, get_args

import numpy as np
import tensorstore as ts

Dtype = Literal["bfloat16", "float16", "float32", "int8"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
# As on the command line.
SHORT_NAMES: dict[str, Dtype] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "int8": "int8",
}
Spans = Literal["all", "answer"]
# A chunk of at most this size is the unit of a read. With 1 MiB writing cost more
# (250 against 325 MiB per CPU second) and reading a layer cost the same.
_CHUNK_BYTES = 1 << 18
_LARGEST_CODE = 127


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Values as they are written.

    Attributes:
      codes: of the given shape, in the stored type: `out`, or the given array itself
        where it has that type.
      scales: float32, without the last axis; None unless the type is int8.
      n_invalid: values that were not finite to begin with.
      n_overflowed: finite values that the type turned into infinities.
    """

    codes: np.ndarray
    scales: np.ndarray | None
    n_invalid: int
    n_overflowed: int


def numpy_dtype(dtype: Dtype) -> np.dtype:
    """Return NumPy's type of that name; bfloat16 is TensorStore's (ml_dtypes)."""
    return np.dtype(getattr(ts, dtype).numpy_dtype)


def encode(values: np.ndarray, dtype: Dtype, out: np.ndarray | None = None) -> Encoded:
    """Write values in a type, and count what it cannot hold.

    Args:
      values: `[..., n_channels]` float32.
      dtype: the type.
      out: where the codes are written, of that type; None makes an array if needed.
    """
    scales = None
    if dtype == "int8":
        codes, scales = _quantised(values, out)
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
    """Return float32 values as they would be read back after being written.

    Raises:
      ValueError: the type cannot hold them.
    """
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


def _quantised(
    values: np.ndarray, out: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes and float32 scales."""
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
        # Usually there are none, and a maximum is cheaper than a count.
        if magnitudes.max(initial=0) < exponent:
            return 0
        return int((magnitudes >= exponent).sum())
    return values.size - int(np.count_nonzero(np.isfinite(values)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Shape of one family of signals at one token.

    Attributes:
      shape: the axes behind the row axis.
      dtype: `bfloat16`, `float16`, `float32`, or `int8`, which needs a companion
        family of scales beside it, see `scale_family`.
      by_layer: True where the first axis is kept layers that are read one at a
        time; such a family is chunked so that the others are not touched.
      spans: `all` has a row for every token, `answer` for those of the answer span
        alone.
    """

    shape: tuple[int, ...]
    dtype: Dtype = "float32"
    by_layer: bool = False
    spans: Spans = "all"

    def __post_init__(self) -> None:
        """Refuse a family without channels."""
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

    def as_json(self) -> dict[str, Any]:
        """Return the fields for the index.

        The default `spans` is left out, as in stores written before there was a choice.
        """
        fields = dataclasses.asdict(self)
        if self.spans == "all":
            del fields["spans"]
        return fields


def scale_name(name: str) -> str:
    """Name the family that holds the scales of an int8 family."""
    return f"{name}_scale"


def scale_family(family: Family) -> Family:
    """Return the family of an int8 family's scales: one for each last axis."""
    return dataclasses.replace(family, shape=family.shape[:-1], dtype="float32")
