"""The shape and type of one family of signals in a feature store."""

import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from extract.store.precision import DTYPES, Dtype, numpy_dtype

Spans = Literal["all", "answer"]
# A chunk of at most this size is the unit of a read. With 1 MiB writing cost more
# (250 against 325 MiB per CPU second) and reading a layer cost the same.
_CHUNK_BYTES = 1 << 18


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
        """Check the fields."""
        if self.dtype not in DTYPES:
            raise ValueError(
                f"a family's dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}"
            )
        if self.spans not in get_args(Spans):
            raise ValueError(
                f"a family's spans are one of {', '.join(get_args(Spans))}, not "
                f"{self.spans!r}"
            )
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

        A family with every token is written as it was before there was a choice, so
        that a store of then and one of now are the same store.
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
