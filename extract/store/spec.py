"""The layout of a feature store: families and dtypes, examples, ranges, the index.

`extract/store/store.py` explains axes and ranges. No file is opened here.
"""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from beatrice.extract.records import AnswerSpan, check_choices
from beatrice.extract.run.files import from_json

Dtype = Literal["bfloat16", "float16", "float32", "int8"]
# Attention masses can be below 6e-8, the smallest positive float16.
ScalarDtype = Literal["bfloat16", "float32"]
Spans = Literal["all", "answer"]
# Largest size of a chunk, the unit of a read. With 1 MiB writing cost more (250
# against 325 MiB per CPU second) and reading a layer cost the same.
_CHUNK_BYTES = 1 << 18
_LARGEST_CODE = 127


def numpy_dtype(dtype: Dtype) -> np.dtype:
    """Return the NumPy dtype of this name; bfloat16 comes from `ml_dtypes`."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Shape, dtype and rows of one family of signals."""

    shape: tuple[int, ...]  # the axes after the row axis
    dtype: Dtype = "float32"  # `int8` needs a family of scales, see `scale_name`
    by_layer: bool = False  # whether the first axis is layers, read one at a time
    spans: Spans = "all"  # whether every token has a row, or only the answer span

    def __post_init__(self) -> None:
        """Check that the family has channels."""
        if not self.shape or min(self.shape) < 1:
            raise ValueError(
                f"a family needs at least one channel per token, found shape "
                f"{self.shape}; leave out an empty family"
            )

    @property
    def numpy_dtype(self) -> np.dtype:
        """The NumPy dtype of this family's values."""
        return numpy_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes per token."""
        return int(np.prod(self.shape)) * self.numpy_dtype.itemsize

    def chunk_shape(self, rows_per_shard: int) -> list[int]:
        """Return the shape of a chunk; its rows divide `rows_per_shard`."""
        inner = [1, *self.shape[1:]] if self.by_layer else list(self.shape)
        row_bytes = int(np.prod(inner)) * self.numpy_dtype.itemsize
        rows = rows_per_shard
        while rows > 1 and rows * row_bytes > _CHUNK_BYTES:
            rows //= 2
        return [rows, *inner]


def scale_name(name: str) -> str:
    """Return the name of the family that holds the scales of an int8 family."""
    return f"{name}_scale"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Values converted to a stored dtype."""

    codes: np.ndarray  # shape of the values, stored dtype; may be the values themselves
    scales: np.ndarray | None  # float32, without the last axis; None unless int8
    n_invalid: int  # values that were not finite to begin with
    n_overflowed: int  # finite values that became infinite in the stored dtype


def encode(values: np.ndarray, dtype: Dtype, out: np.ndarray | None = None) -> Encoded:
    """Convert float32 values `[..., n_channels]` to a dtype, counting what is lost.

    Codes are written into `out`, of that dtype, or else into a new array if needed.
    """
    scales, exact = None, values
    with np.errstate(over="ignore", invalid="ignore"):  # counted below
        if dtype == "int8":
            scales = np.abs(values).max(axis=-1) / np.float32(_LARGEST_CODE)
            exact = np.rint(values / np.where(scales > 0, scales, 1)[..., None])
        if out is None:
            out = exact.astype(numpy_dtype(dtype), copy=False)
        else:
            out[...] = exact
    codes = out
    if _n_not_finite(codes if scales is None else scales) == 0:
        return Encoded(codes=codes, scales=scales, n_invalid=0, n_overflowed=0)
    n_invalid = _n_not_finite(values)
    lost = 0 if scales is not None else _n_not_finite(codes) - n_invalid
    return Encoded(codes=codes, scales=scales, n_invalid=n_invalid, n_overflowed=lost)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 values of int8 codes `[..., n_channels]`, scales `[...]`."""
    values = codes.astype(np.float32)
    values *= scales[..., None]
    return values


def as_written(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Return float32 values as they would be read back after being stored.

    All become NaN if a store would refuse any: networks may turn infinity into numbers.
    """
    encoded = encode(values, dtype)
    if encoded.n_invalid or encoded.n_overflowed:
        return np.full_like(values, np.nan)
    if encoded.scales is not None:
        return decode(encoded.codes, encoded.scales)
    return encoded.codes.astype(np.float32, copy=False)


def _n_not_finite(values: np.ndarray) -> int:
    """Count NaN and infinities; `np.isfinite` is slow on bfloat16."""
    if values.dtype.itemsize == 2:
        exponent = 0x7C00 if values.dtype == np.float16 else 0x7F80
        magnitudes = values.view(np.uint16) & 0x7FFF
        # Usually all are finite, and finding the maximum is cheaper than counting.
        if magnitudes.max(initial=0) < exponent:
            return 0
        return int((magnitudes >= exponent).sum())
    return values.size - int(np.count_nonzero(np.isfinite(values)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Which signals of every answer a store keeps."""

    # Entries of the resid axis to keep (0 is the embedding); None keeps all.
    hidden_layers: tuple[int, ...] | None = None
    hidden_spans: Spans = "all"  # tokens whose hidden states are kept
    # dtype of `hidden`: bfloat16 has the range of the residual stream, float16
    # overflows at 65504 (which is an error), int8 has a scale per token and layer.
    dtype: Dtype = "bfloat16"
    scalars: ScalarDtype = "float32"  # dtype of the other families
    # Which positions form the answer span, see `signals.sequence.sequence_of`.
    answer_span: AnswerSpan = "emitting"

    def __post_init__(self) -> None:
        """Check the choices; the reader checks that the model has the layers."""
        check_choices(self)
        layers = self.hidden_layers
        if layers is not None and not (
            isinstance(layers, tuple | list)
            and all(isinstance(layer, int | np.integer) for layer in layers)
        ):
            raise ValueError(
                "hidden_layers: expected numbers, such as (8, 16), or None for all, "
                f"found {layers!r:.80}"
            )

    def describe(self) -> str:
        """Describe in a few words what is kept."""
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
    """Parse layers such as `16` or `8,16,24` into ascending order; `all` gives None."""
    if text.strip() == "all":
        return None
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(
            "expected all, or layer numbers from 0 (the embedding) separated by "
            f"commas, such as 8,16,24; found {text!r}"
        )
    layers = sorted(map(int, numbers))
    if len(set(layers)) < len(layers):
        raise ValueError(f"a layer is named twice in {text!r}; name each once")
    return tuple(layers)


def check_layers(layers: tuple[int, ...] | None, n_entries: int) -> tuple[int, ...]:
    """Return which entries of a resid axis `[n_entries]` to keep; None keeps all."""
    if layers is None:
        return tuple(range(n_entries))
    if len({*layers} & {*range(n_entries)}) < len(layers):
        raise ValueError(
            f"hidden layers: expected entries from 0 (embedding) to {n_entries - 1}, "
            f"each once, found {list(layers)}"
        )
    return tuple(layers)


def stored_families(
    shapes: Mapping[str, Sequence[int]], config: StoreConfig
) -> dict[str, Family]:
    """Return how a store holds families; `shapes` are per token, of kept layers."""
    families: dict[str, Family] = {}
    for name, shape in shapes.items():
        is_hidden = name == "hidden"
        families[name] = family = Family(
            shape=tuple(shape),
            dtype=config.dtype if is_hidden else config.scalars,
            by_layer=is_hidden,
            spans=config.hidden_spans if is_hidden else "all",
        )
        if family.dtype == "int8":  # one scale per vector along the last axis
            scales = dataclasses.replace(family, shape=family.shape[:-1])
            families[scale_name(name)] = dataclasses.replace(scales, dtype="float32")
    return families


def model_shapes(
    *, d_model: int, n_layers: int, n_attention_layers: int, n_heads: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's readings with every layer of `hidden` kept."""
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
    """Return how many bytes each family takes under a storage choice.

    Counts only the values; everything else adds less than one percent when chunks are
    full. `shapes` are those of `model_shapes`, with every layer. `n_tokens` includes
    prompts, `n_answer` counts only answer spans.
    """
    n_entries, width = shapes["hidden"]
    n_stored_layers = len(check_layers(config.hidden_layers, n_entries))
    families = stored_families({**shapes, "hidden": (n_stored_layers, width)}, config)
    return family_bytes(families, n_tokens=n_tokens, n_answer=n_answer)


def family_bytes(
    families: Mapping[str, Family], *, n_tokens: int, n_answer: int
) -> dict[str, int]:
    """Return how many bytes each family's values take; see `stored_bytes`."""
    n_rows = {"all": n_tokens, "answer": n_answer}
    return {
        n: family.row_bytes * n_rows[family.spans] for n, family in families.items()
    }


FORMAT_VERSION = 3
# Signals are read in the passes that write the answer, or in one pass over it later.
ReadingPath = Literal["decode", "teacher_forced"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoreSpec:
    """Everything that fixes a store before the first signal is read."""

    families: Mapping[str, Family]  # by name, in the order they are stored
    keys: tuple[tuple[str, ...], ...]  # the unique names of the `n_examples` examples
    lengths: np.ndarray  # `[n_examples]` int64, tokens of each example, at least 1
    spans: np.ndarray  # `[n_examples, 3, 2]` int64, see the glossary
    rows_per_shard: int  # rows of one file, a power of two
    hidden_layers: tuple[int, ...]  # layer numbers along the layer axis of `hidden`
    # What else the values depend on (model, revision, precision, …); JSON values.
    fingerprint: Mapping[str, Any]
    # `[n_examples]` int64, the first token of each example that has a row, after the
    # worked examples of its prompt; like the next, a single value counts for all.
    first_rows: np.ndarray = dataclasses.field(default_factory=lambda: np.array(0))
    # `[n_examples]` bool, which answers were read while being written.
    is_written: np.ndarray = dataclasses.field(default_factory=lambda: np.array(False))
    # `range_examples` and `range_shards` of stores end to end; else by the lengths.
    ranges: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        """Check that the fields agree with each other."""
        n_examples, rows = len(self.keys), self.rows_per_shard
        for name in ("first_rows", "is_written"):
            values = np.broadcast_to(getattr(self, name), n_examples)
            object.__setattr__(self, name, values)
        if rows < 1 or rows & (rows - 1):
            raise ValueError(f"rows_per_shard must be a power of two, found {rows}")
        repeated = [key for key, n in Counter(self.keys).items() if n > 1]
        if n_examples == 0:
            raise ValueError("a store needs at least one example, got none")
        if repeated:
            raise ValueError(f"keys must be unique, got {repeated[0]} twice or more")
        self._check_spans()
        for name, family in self.families.items():
            if family.by_layer and family.shape[0] != len(self.hidden_layers):
                raise ValueError(
                    f"family {name!r} has {family.shape[0]} layers, but hidden_layers "
                    f"names {len(self.hidden_layers)}"
                )

    def _check_spans(self) -> None:
        inside = (self.spans >= 0) & (self.spans <= self.lengths[:, None, None])
        ordered = self.spans[..., 0] <= self.spans[..., 1]
        bad = (self.n_read < 1) | ~inside.all((1, 2)) | ~ordered.all(1)
        bad |= (self.first_rows < 0) | (self.first_rows > self.spans[:, 0, 0])
        if bad.any():
            first = int(np.argmax(bad))
            raise ValueError(
                f"example {self.keys[first]} has {self.lengths[first]} tokens and the "
                f"spans {self.spans[first].tolist()}, with rows from token "
                f"{self.first_rows[first]} on; expected spans [start, stop) inside the "
                "example, and rows that begin no later than the context span"
            )

    @property
    def path(self) -> ReadingPath:
        """Return how most of the answers were read."""
        is_decoded = 2 * self.is_written.sum() > len(self.keys)
        return "decode" if is_decoded else "teacher_forced"

    @functools.cached_property
    def n_read(self) -> np.ndarray:
        """`[n_examples]` int64: the number of tokens that have rows."""
        return self.lengths - self.first_rows

    @functools.cached_property
    def range_examples(self) -> np.ndarray:
        """`[n_ranges + 1]` int64: range r holds the examples from entry r to r + 1."""
        if self.ranges:
            return self.ranges[0]
        edges, used = [0], 0
        for example, length in enumerate(self.n_read.tolist()):
            if example > edges[-1] and used + length > self.rows_per_shard:
                edges.append(example)
                used = 0
            used += length
        return np.asarray([*edges, len(self.keys)], dtype=np.int64)

    @functools.cached_property
    def range_shards(self) -> np.ndarray:
        """`[n_ranges + 1]` int64: range r owns the shards from entry r to r + 1."""
        if self.ranges:
            return self.ranges[1]
        rows = np.add.reduceat(self.n_read, self.range_examples[:-1])
        return np.concatenate([[0], np.cumsum(-(-rows // self.rows_per_shard))])

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """`[n_examples + 1]` int64: example i owns token rows from entry i to i + 1."""
        return np.concatenate([[0], np.cumsum(self.n_read)])

    @functools.cached_property
    def _answer_offsets(self) -> np.ndarray:
        lengths = self.spans[:, 2, 1] - self.spans[:, 2, 0]
        return np.concatenate([[0], np.cumsum(lengths)])

    def family_offsets(self, name: str) -> np.ndarray:
        """`[n_examples + 1]` int64: example i has family rows from entry i to i + 1."""
        is_all = self.families[name].spans == "all"
        return self.offsets if is_all else self._answer_offsets

    def first_tokens(self, name: str) -> np.ndarray:
        """`[n_examples]` int64: the first token of each example that has a row."""
        is_all = self.families[name].spans == "all"
        return self.first_rows if is_all else self.spans[:, 2, 0]

    @property
    def n_ranges(self) -> int:
        """The number of ranges."""
        return len(self.range_examples) - 1

    def range_rows(self, range_id: int, name: str | None = None) -> tuple[int, int]:
        """Return a range's rows `[start, stop)` in a family; None counts all tokens."""
        offsets = self.offsets if name is None else self.family_offsets(name)
        first, last = self.range_examples[range_id : range_id + 2]
        return int(offsets[first]), int(offsets[last])

    def segments(
        self, start: int, stop: int, name: str
    ) -> Iterator[tuple[int, int, int]]:
        """Split a family's rows at range edges: (range, stored row, number of rows)."""
        edges = self.family_offsets(name)[self.range_examples]
        range_id = int(np.searchsorted(edges, start, side="right")) - 1
        while start < stop:
            shard_row = int(self.range_shards[range_id]) * self.rows_per_shard
            n_rows = min(stop, int(edges[range_id + 1])) - start
            if n_rows:  # a range may store no answer token at all
                yield range_id, shard_row + start - int(edges[range_id]), n_rows
            start, range_id = start + n_rows, range_id + 1

    def layer_index(self, name: str, layer: int) -> int:
        """Return the position of a model layer on the layer axis."""
        if not self.families[name].by_layer:
            raise ValueError(f"family {name!r} is not stored by layer; omit layer")
        if layer not in self.hidden_layers:
            raise ValueError(
                f"layer {layer} is not in the store, which keeps only "
                f"{', '.join(map(str, self.hidden_layers))}; extract again with it"
            )
        return self.hidden_layers.index(layer)

    def examples_bytes(self) -> bytes:
        """Return the content of `examples.safetensors`."""
        tensors = {"lengths": self.lengths, "spans": self.spans}
        tensors |= {"firsts": self.first_rows, "written": self.is_written}
        # safetensors would write a strided array's memory in its physical order.
        contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        return safetensors.numpy.save(contiguous)

    def index_bytes(self) -> bytes:
        """Return the content of `index.json`; equal specs give equal bytes."""
        index = {
            "format": "beatrice-features",
            "version": FORMAT_VERSION,
            "families": {n: dataclasses.asdict(f) for n, f in self.families.items()},
            "keys": self.keys,
            "rows_per_shard": self.rows_per_shard,
            "hidden_layers": self.hidden_layers,
            "fingerprint": self.fingerprint,
            "examples_sha256": hashlib.sha256(self.examples_bytes()).hexdigest(),
        }
        index["sha256"] = hashlib.sha256(canonical_json(index)).hexdigest()
        lines = [f'"{field}": {json.dumps(value)}' for field, value in index.items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def canonical_json(value: Any) -> bytes:
    """Return JSON bytes that depend only on the content."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse_index(content: bytes, url: str) -> tuple[dict[str, Any], str]:
    """Parse and check `index.json` of the store at `url`; also return its SHA-256."""
    try:
        index = from_json(dict[str, Any], content, url)
    except ValueError:
        index = {}
    sha, version = index.pop("sha256", ""), index.get("version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{url}index.json has version {version}, but this program reads version "
            f"{FORMAT_VERSION}; use the program that wrote it, or extract again"
        )
    if sha != hashlib.sha256(canonical_json(index)).hexdigest():
        raise ValueError(
            f"{url}index.json is damaged: it does not match its own SHA-256; "
            "restore it from a copy, or delete the store and extract again"
        )
    return index, sha


class _Index(msgspec.Struct):
    """The fields of an index that are read after its checksum and version."""

    families: dict[str, Family]
    keys: tuple[tuple[str, ...], ...]
    rows_per_shard: int
    hidden_layers: tuple[int, ...]
    fingerprint: dict[str, Any]


def parse_spec(index: Mapping[str, Any], examples: bytes, url: str) -> StoreSpec:
    """Check `examples.safetensors` against a parsed index, and combine the two."""
    again = "delete the store and extract again"
    if hashlib.sha256(examples).hexdigest() != index["examples_sha256"]:
        raise ValueError(
            f"{url}examples.safetensors is missing or damaged: it does not match the "
            f"SHA-256 in index.json; {again}"
        )
    try:
        fields = msgspec.convert(index, _Index)
        tensors = safetensors.numpy.load(examples)
    except (msgspec.ValidationError, SafetensorError) as error:
        raise ValueError(f"{url} does not hold a store ({error}); {again}") from error
    n = len(fields.keys)
    expected = {name: ((n,), "i") for name in ("lengths", "firsts")}
    expected |= {"spans": ((n, 3, 2), "i"), "written": ((n,), "b")}
    stored = {name: (x.shape, x.dtype.kind) for name, x in tensors.items()}
    if stored != expected:
        raise ValueError(
            f"{url}examples.safetensors: expected {expected}, found {stored}; {again}"
        )
    return StoreSpec(
        lengths=tensors["lengths"],
        spans=tensors["spans"],
        first_rows=tensors["firsts"],
        is_written=tensors["written"],
        **msgspec.structs.asdict(fields),
    )
