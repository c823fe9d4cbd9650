"""How numbers are written: rounded to a narrower type, or 8 bits with a scale.

`int8` keeps, for each token and layer, the largest magnitude divided by 127 as a
float32 scale and every channel as a whole multiple of it (absolute-maximum
quantisation, as in LLM.int8(), Dettmers et al. 2022, section 2, with one scale per
token). The error of a channel is at most half a scale, so a token whose stream has
one huge channel keeps less of the others.

Nothing turns into an infinity in silence: what a type cannot hold is counted.
"""

import dataclasses
from typing import Literal, get_args

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
_LARGEST_CODE = 127


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Values as they are written.

    Attributes:
      codes: of the shape that was given, in the type that was asked: where they were
        to be written, or the given array itself where it has that type.
      scales: float32, without the last axis; None unless the type is int8.
      n_invalid: values that were no finite numbers to begin with.
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
    if dtype == "int8":
        codes, scales = _quantised(values, out)
    else:
        codes, scales = _rounded(values, dtype, out), None
    if _n_not_finite(codes if scales is None else scales) == 0:
        return Encoded(codes=codes, scales=scales, n_invalid=0, n_overflowed=0)
    n_invalid = _n_not_finite(values)
    lost = 0 if scales is not None else _n_not_finite(codes) - n_invalid
    return Encoded(codes=codes, scales=scales, n_invalid=n_invalid, n_overflowed=lost)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 values of int8 codes `[..., n_channels]`.

    Args:
      codes: int8.
      scales: float32, without the last axis.
    """
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


def _rounded(values: np.ndarray, dtype: Dtype, out: np.ndarray | None) -> np.ndarray:
    """Round to a type of fewer bits."""
    with np.errstate(over="ignore", invalid="ignore"):  # counted by the caller
        if out is None:
            return values.astype(numpy_dtype(dtype), copy=False)
        out[...] = values
        return out


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
    """Count NaN and infinities (`np.isfinite` is slow on bfloat16)."""
    if values.dtype.itemsize == 2:
        exponent = 0x7C00 if values.dtype == np.float16 else 0x7F80
        magnitudes = values.view(np.uint16) & 0x7FFF
        # As a rule there are none, and a maximum is cheaper than a count.
        if magnitudes.max(initial=0) < exponent:
            return 0
        return int((magnitudes >= exponent).sum())
    return values.size - int(np.count_nonzero(np.isfinite(values)))
