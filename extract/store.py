"""The feature store: token signals on disk, one zarr3 array per family.

Glossary of axes (repeated in the README):

  * `n_examples`: one stored sequence each, in the order of `StoreSpec.keys`.
  * `n_tokens`: tokens of one example; `n_rows`: tokens of many laid end to end.
  * `n_layers_kept`: residual-stream layers in `hidden`; 0 is the embedding.
  * `d_model`: width of the residual stream.
  * `n_layers`: decoder blocks; `n_attention_layers`: those whose attention is read.
  * `n_heads`: attention heads.
  * span axes `[3, 2]`: (context, question, answer) × (start, stop), half-open
    positions inside the example; equal numbers where a span is empty.

Families: `hidden [n_rows, n_layers_kept, d_model]`, `prob [n_rows, 5]`,
`resid [n_rows, 4·n_layers]`, `attn [n_rows, 2, 2, n_attention_layers, n_heads]`.

Ranges. Consecutive examples form a *range* as long as their tokens fit in
`rows_per_shard` rows, and every range starts at a shard boundary; an example that
is longer has a range of several shards to itself. So workers that own different
ranges never share a file, and the bytes do not depend on who wrote them. The rest
of a range's last shard is never written and takes no room. Readers never see this:
`read_rows` counts tokens of all examples end to end, without gaps.

A range is done when its commit record exists, which is written after the data.
What is absent or damaged raises; it is never NaN, zero, or left out.

A store is `index.json`, `examples.safetensors`, one folder per family, and
`commits/<store id>/<range>.json`.
"""

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tensorstore as ts

FORMAT_VERSION = 1
# A chunk of at most this size is the unit of a read. With 1 MiB writing cost more
# (250 against 325 MiB per CPU second) and reading a layer cost the same.
_CHUNK_BYTES = 1 << 18
_BYTES_IN_FLIGHT = 256 << 20
_DTYPES = ("bfloat16", "float16", "float32")
# TensorStore's documentation warns that its S3 driver cannot write atomically.
_WRITABLE = ("file://", "memory://", "gs://")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Shape of one family of signals at one token.

    Attributes:
      shape: the axes behind the row axis.
      dtype: `bfloat16`, `float16` or `float32`.
      by_layer: True where the first axis is kept layers that are read one at a
        time; such a family is chunked so that the others are not touched.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    by_layer: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"a family's dtype is one of {', '.join(_DTYPES)}, not {self.dtype!r}"
            )
        if not self.shape or min(self.shape) < 1:
            raise ValueError(
                f"a family needs at least one channel per token, found shape "
                f"{self.shape}; leave an empty family out"
            )

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy's type of this family's values."""
        return np.dtype(getattr(ts, self.dtype).numpy_dtype)

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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoreSpec:
    """Everything that fixes a store before the first signal is read.

    Attributes:
      families: by name, in the order they are stored.
      keys: `n_examples` rows that name the examples, unique.
      lengths: `[n_examples]` int64, tokens of each example, at least 1.
      spans: `[n_examples, 3, 2]` int64, see the glossary.
      rows_per_shard: rows of one file, a power of two.
      hidden_layers: the layer numbers behind the layer axis of `hidden`.
      fingerprint: what else the values depend on (model, revision, precision, …);
        JSON values. A store with another fingerprint is another store.
    """

    families: Mapping[str, Family]
    keys: tuple[tuple[str, ...], ...]
    lengths: np.ndarray
    spans: np.ndarray
    rows_per_shard: int
    hidden_layers: tuple[int, ...]
    fingerprint: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Check that the fields agree with each other."""
        n_examples = len(self.keys)
        rows = self.rows_per_shard
        if rows < 1 or rows & (rows - 1):
            raise ValueError(f"rows_per_shard is a power of two, not {rows}")
        if n_examples == 0 or len(set(self.keys)) != n_examples:
            twice = [key for key in self.keys if self.keys.count(key) > 1][:1]
            raise ValueError(
                f"a store needs at least one example and no key twice; found "
                f"{n_examples} examples, repeated: {twice}"
            )
        for name, array, shape in (
            ("lengths", self.lengths, (n_examples,)),
            ("spans", self.spans, (n_examples, 3, 2)),
        ):
            if array.shape != shape or array.dtype != np.int64:
                raise ValueError(
                    f"{name} must be int64 {shape} for {n_examples} keys, found "
                    f"{array.dtype} {array.shape}"
                )
        self._check_spans()
        for name, family in self.families.items():
            if family.by_layer and family.shape[0] != len(self.hidden_layers):
                raise ValueError(
                    f"family {name!r} has {family.shape[0]} layers, hidden_layers "
                    f"names {len(self.hidden_layers)}"
                )

    def _check_spans(self) -> None:
        """Check that spans are inside their examples."""
        inside = (self.spans >= 0) & (self.spans <= self.lengths[:, None, None])
        ordered = self.spans[..., 0] <= self.spans[..., 1]
        bad = (self.lengths < 1) | ~inside.all((1, 2)) | ~ordered.all(1)
        if bad.any():
            first = int(np.argmax(bad))
            raise ValueError(
                f"example {self.keys[first]} has {self.lengths[first]} tokens and the "
                f"spans {self.spans[first].tolist()}; spans are [start, stop) inside "
                "the example"
            )

    @functools.cached_property
    def range_examples(self) -> np.ndarray:
        """`[n_ranges + 1]` int64: range r holds the examples from r to r + 1."""
        edges, used = [0], 0
        for example, length in enumerate(self.lengths.tolist()):
            if example > edges[-1] and used + length > self.rows_per_shard:
                edges.append(example)
                used = 0
            used += length
        return np.asarray([*edges, len(self.keys)], dtype=np.int64)

    @functools.cached_property
    def range_shards(self) -> np.ndarray:
        """`[n_ranges + 1]` int64: range r owns the shards from r to r + 1."""
        rows = np.add.reduceat(self.lengths, self.range_examples[:-1])
        return np.concatenate([[0], np.cumsum(-(-rows // self.rows_per_shard))])

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """`[n_examples + 1]` int64: example i owns the token rows from i to i + 1."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def n_ranges(self) -> int:
        """Number of ranges."""
        return len(self.range_examples) - 1

    def range_rows(self, range_id: int) -> tuple[int, int]:
        """Token rows `[start, stop)` of one range, counted over all examples."""
        first, last = self.range_examples[range_id : range_id + 2]
        return int(self.offsets[first]), int(self.offsets[last])

    def _examples_bytes(self) -> bytes:
        """Return the content of `examples.safetensors`."""
        return safetensors.numpy.save({"lengths": self.lengths, "spans": self.spans})

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
            "examples_sha256": hashlib.sha256(self._examples_bytes()).hexdigest(),
        }
        index["sha256"] = hashlib.sha256(_canonical(index)).hexdigest()
        lines = [f'"{field}": {json.dumps(value)}' for field, value in index.items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FeatureStore:
    """An opened store.

    Attributes:
      url: where it lies, with a trailing slash.
      id: first 16 hex digits of the index's SHA-256; names the commit folder.
      arrays: one open TensorStore per family.
    """

    url: str
    id: str
    spec: StoreSpec
    arrays: Mapping[str, ts.TensorStore]
    # Commit records are never taken back by a writer, so what was seen stays true.
    _seen: set[int] = dataclasses.field(default_factory=set, repr=False)

    def commit_key(self, range_id: int) -> str:
        """Key of the commit record of one range, below `url`."""
        return f"commits/{self.id}/{range_id:06d}.json"

    def shard_keys(self, range_id: int, name: str) -> list[str]:
        """Keys of one range's files in one family, below `url`."""
        first, last = self.spec.range_shards[range_id : range_id + 2].tolist()
        zeros = "/0" * len(self.spec.families[name].shape)
        return [f"{name}/c/{shard}{zeros}" for shard in range(first, last)]

    def describe(self, range_id: int) -> str:
        """Name one range for a message."""
        first, last = self.spec.range_examples[range_id : range_id + 2].tolist()
        return f"range {range_id} (examples {first} to {last - 1}) of {self.url}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """One family of several examples, end to end.

    Attributes:
      values: `[n_rows, …]`; example i is `values[starts[i]:starts[i] + lengths[i]]`.
      starts: `[n_examples]` int64.
      lengths: `[n_examples]` int64.
    """

    values: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def example(self, i: int) -> np.ndarray:
        """Return example i as `[n_tokens, …]`, without a copy."""
        return self.values[self.starts[i] : self.starts[i] + self.lengths[i]]


def _canonical(value: Any) -> bytes:
    """Return JSON bytes that depend on the content alone."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@functools.cache
def _context() -> ts.Context:
    """Return the context all stores share: a memory:// store lives in its context."""
    return ts.Context()


def as_url(where: str | Path) -> str:
    """Return a kvstore URL with a trailing slash; a plain path becomes `file://`."""
    text = str(where)
    url = text if "://" in text else Path(text).absolute().as_uri()
    return url if url.endswith("/") else url + "/"


def _kvstore(url: str) -> ts.KvStore:
    """Open the key-value store below `url`."""
    return ts.KvStore.open(url, context=_context()).result()


def _array_spec(url: str, spec: StoreSpec, name: str) -> dict[str, Any]:
    """Return the TensorStore spec of one family."""
    family, rows = spec.families[name], spec.rows_per_shard
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [little, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": family.chunk_shape(rows),
        # Without the inner crc32c 310 of 400 flipped bits read back unnoticed.
        "codecs": codecs,
        "index_codecs": codecs,
        "index_location": "end",
    }
    return {
        "driver": "zarr3",
        "kvstore": f"{url}{name}/",
        "metadata": {
            "shape": [int(spec.range_shards[-1]) * rows, *family.shape],
            "data_type": family.dtype,
            "fill_value": "NaN",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [rows, *family.shape]},
            },
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        # Neither is TensorStore's default; without them a row that equals the fill
        # value is not written, and a row that is not written reads as the fill value.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _open_arrays(url: str, spec: StoreSpec, create: bool) -> dict[str, ts.TensorStore]:
    """Open every family, or say what is wrong with it."""
    arrays = {}
    for name in spec.families:
        try:
            arrays[name] = ts.open(
                _array_spec(url, spec, name),
                open=True,
                create=create,
                context=_context(),
            ).result()
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{url}{name} does not hold the array its index describes "
                f"({_cause(error)}); delete {url} and extract again"
            ) from error
    return arrays


def _cause(error: Exception) -> str:
    """Shorten TensorStore's message to its innermost part."""
    text = str(error).rsplit(": ", 1)[-1].rstrip(".")
    return "it or a part of it is missing" if text.endswith("is missing") else text


def _refuse_unwritable(url: str) -> None:
    """Raise for stores that cannot be written safely."""
    if not url.startswith(_WRITABLE):
        raise ValueError(
            f"a feature store cannot be written to {url}: only "
            f"{', '.join(_WRITABLE)} replace a file in one step; extract to one of "
            "these and copy the finished store"
        )


def create_store(url: str | Path, spec: StoreSpec) -> FeatureStore:
    """Create a store, or open it if exactly this one is there already.

    Several processes may do this at once: each writes the same bytes, and
    `index.json` comes last.

    Raises:
      ValueError: another store is there; the message names what differs.
    """
    url = as_url(url)
    _refuse_unwritable(url)
    kvstore = _kvstore(url)
    index = spec.index_bytes()
    found = kvstore.read("index.json").result()
    if found.state == "value":
        if found.value != index:
            raise ValueError(
                f"{url} holds another store: {_index_difference(found.value, index)}; "
                "choose another place, or delete it to extract again"
            )
        return open_store(url)
    _open_arrays(url, spec, create=True)
    kvstore.write("examples.safetensors", spec._examples_bytes()).result()
    kvstore.write("index.json", index).result()
    return open_store(url)


def _index_difference(found: bytes, wanted: bytes) -> str:
    """Say in which fields two indexes differ."""
    try:
        old, new = (
            index | {f"fingerprint.{k}": v for k, v in index["fingerprint"].items()}
            for index in (json.loads(found), json.loads(wanted))
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its index.json is not readable"
    words = []
    for field in dict.fromkeys([*old, *new]):
        here, asked = json.dumps(old.get(field)), json.dumps(new.get(field))
        if here == asked or field in ("sha256", "fingerprint"):
            continue
        is_short = len(here) + len(asked) < 200
        words.append(
            f"its {field} is {here}, not {asked}" if is_short else f"other {field}"
        )
    return "; ".join(words) or "its index.json was written by another version"


def _read_spec(url: str) -> tuple[StoreSpec, str]:
    """Read and check `index.json` and `examples.safetensors`."""
    kvstore = _kvstore(url)
    found = kvstore.read("index.json").result()
    if found.state != "value":
        raise ValueError(f"no feature store at {url} (no index.json); extract first")
    try:
        index = json.loads(found.value)
        sha = index.pop("sha256")
        intact = sha == hashlib.sha256(_canonical(index)).hexdigest()
        version = index["version"]
    except (ValueError, KeyError, TypeError, AttributeError):
        intact, sha, version = False, "", FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{url}index.json is of version {version}, this program reads version "
            f"{FORMAT_VERSION}; use the program that wrote it, or extract again"
        )
    if not intact:
        raise ValueError(
            f"{url}index.json is damaged: it does not match its own SHA-256; "
            "restore it from a copy, or delete the store and extract again"
        )
    content = kvstore.read("examples.safetensors").result().value
    if hashlib.sha256(content).hexdigest() != index["examples_sha256"]:
        raise ValueError(
            f"{url}examples.safetensors is missing or damaged: it does not match the "
            "SHA-256 in index.json; delete the store and extract again"
        )
    tensors = safetensors.numpy.load(content)
    families = {
        name: Family(**{**fields, "shape": tuple(fields["shape"])})
        for name, fields in index["families"].items()
    }
    spec = StoreSpec(
        families=families,
        keys=tuple(map(tuple, index["keys"])),
        lengths=tensors["lengths"],
        spans=tensors["spans"],
        rows_per_shard=index["rows_per_shard"],
        hidden_layers=tuple(index["hidden_layers"]),
        fingerprint=index["fingerprint"],
    )
    return spec, sha


def open_store(url: str | Path) -> FeatureStore:
    """Open an existing store; it may still be incomplete, see `done_ranges`.

    Raises:
      ValueError: there is none, or its index or an array's metadata is damaged.
    """
    url = as_url(url)
    spec, sha = _read_spec(url)
    arrays = _open_arrays(url, spec, create=False)
    return FeatureStore(url=url, id=sha[:16], spec=spec, arrays=arrays)


def done_ranges(store: FeatureStore) -> frozenset[int]:
    """Return the ranges that are committed now."""
    folder = f"commits/{store.id}/"
    span = ts.KvStore.KeyRange(folder, folder + "\x7f")
    keys = _kvstore(store.url).list(span).result()
    store._seen.update(int(Path(key.decode()).stem) for key in keys)
    return frozenset(store._seen)


@dataclasses.dataclass(frozen=True)
class StoreWriter:
    """Writes whole ranges; several processes may write different ranges at once."""

    store: FeatureStore

    def __post_init__(self) -> None:
        """Refuse stores that cannot be written safely."""
        _refuse_unwritable(self.store.url)

    def write_range(self, range_id: int, signals: Mapping[str, np.ndarray]) -> None:
        """Write every family of one range, then its commit record.

        Args:
          range_id: which range; what is there of it is replaced.
          signals: by family `[n_rows, …]`, the range's examples end to end.
        """
        store, kvstore = self.store, _kvstore(self.store.url)
        _check_signals(store, range_id, signals)
        store._seen.discard(range_id)
        stale = [store.commit_key(range_id)]
        for name in store.spec.families:
            stale += store.shard_keys(range_id, name)
        # TensorStore merges a write into the shard it finds. What an interrupted
        # run left there is taken away first, so that the bytes cannot depend on it.
        for key in stale:
            kvstore.write(key, None).result()
        first = int(store.spec.range_shards[range_id]) * store.spec.rows_per_shard
        futures = [
            store.arrays[name][first : first + len(values)].write(values)
            for name, values in signals.items()
        ]
        record = {"range": range_id, "crc32": _checksums(signals)}
        for future in futures:
            future.result()
        kvstore.write(store.commit_key(range_id), _canonical(record)).result()
        store._seen.add(range_id)


def _check_signals(
    store: FeatureStore, range_id: int, signals: Mapping[str, np.ndarray]
) -> None:
    """Check names, shapes and types against the spec."""
    start, stop = store.spec.range_rows(range_id)
    wanted = {
        name: ((stop - start, *family.shape), family.numpy_dtype)
        for name, family in store.spec.families.items()
    }
    found = {name: (value.shape, value.dtype) for name, value in signals.items()}
    if found != wanted:
        raise ValueError(f"{store.describe(range_id)} needs {wanted}, found {found}")


def _checksums(signals: Mapping[str, np.ndarray]) -> dict[str, str]:
    """CRC-32 of each family's values, C order; SHA-256 would halve the write rate."""
    return {
        name: f"{zlib.crc32(np.ascontiguousarray(values).view(np.uint8)):08x}"
        for name, values in signals.items()
    }


def _segments(spec: StoreSpec, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut token rows `[start, stop)` at range edges: (range, stored row, n_rows)."""
    edges = spec.offsets[spec.range_examples]
    range_id = int(np.searchsorted(edges, start, side="right")) - 1
    while start < stop:
        shard_row = int(spec.range_shards[range_id]) * spec.rows_per_shard
        n_rows = min(stop, int(edges[range_id + 1])) - start
        yield range_id, shard_row + start - int(edges[range_id]), n_rows
        start, range_id = start + n_rows, range_id + 1


def _layer_index(spec: StoreSpec, name: str, layer: int) -> int:
    """Position of a model layer on the layer axis."""
    if not spec.families[name].by_layer:
        raise ValueError(f"family {name!r} is not stored by layer; leave layer out")
    if layer not in spec.hidden_layers:
        raise ValueError(
            f"layer {layer} is not in the store, which keeps "
            f"{', '.join(map(str, spec.hidden_layers))}; extract again with it"
        )
    return spec.hidden_layers.index(layer)


def _family_array(
    store: FeatureStore, name: str, layer: int | None
) -> tuple[ts.TensorStore, tuple[int, ...]]:
    """Return the array to read rows from, and the shape behind the row axis."""
    if name not in store.spec.families:
        raise ValueError(
            f"{store.url} has no family {name!r}; it has "
            f"{', '.join(store.spec.families)}"
        )
    array, shape = store.arrays[name], store.spec.families[name].shape
    if layer is None:
        return array, shape
    return array[:, _layer_index(store.spec, name, layer)], shape[1:]


def _read_blocks(
    store: FeatureStore, name: str, layer: int | None, blocks: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Read token-row blocks `[start, stop)` into one array, in the order given."""
    array, shape = _family_array(store, name, layer)
    n_rows = sum(stop - start for start, stop in blocks)
    values = np.empty((n_rows, *shape), store.spec.families[name].numpy_dtype)
    target = ts.array(values, copy=False)
    pending: list[tuple[int, ts.WriteFutures]] = []
    row = in_flight = 0
    for start, stop in blocks:
        for range_id, stored, n in _segments(store.spec, start, stop):
            _require_committed(store, range_id)
            copy = target[row : row + n].write(array[stored : stored + n])
            pending.append((range_id, copy))
            row, in_flight = row + n, in_flight + n * (values[:1].nbytes)
            if in_flight > _BYTES_IN_FLIGHT:
                _finish(store, name, pending)
                in_flight = 0
    _finish(store, name, pending)
    return values


def _require_committed(store: FeatureStore, range_id: int) -> None:
    """Raise if a range is not there yet."""
    if range_id not in store._seen and range_id not in done_ranges(store):
        raise ValueError(
            f"{store.describe(range_id)} is not extracted yet (no "
            f"{store.commit_key(range_id)}); run extract again, it continues"
        )


def _finish(
    store: FeatureStore, name: str, pending: list[tuple[int, ts.WriteFutures]]
) -> None:
    """Wait for copies; name range and file of one that failed."""
    for range_id, future in pending:
        try:
            future.result()
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{store.describe(range_id)} is damaged in "
                f"{', '.join(store.shard_keys(range_id, name))} ({_cause(error)}); "
                f"delete {store.commit_key(range_id)} and run extract again"
            ) from error
    pending.clear()


def read_rows(
    store: FeatureStore, start: int, stop: int, family: str, layer: int | None = None
) -> np.ndarray:
    """Read token rows `[start, stop)`, counted over all examples end to end.

    Args:
      store: the store.
      start: first row.
      stop: row behind the last.
      family: name of the family.
      layer: number of one model layer of a family stored by layer, or None for all.

    Returns:
      `[stop - start, …]` in the family's type; the layer axis is gone if `layer` is
      given.

    Raises:
      ValueError: a range is not extracted or damaged; the message names its files.
    """
    n_rows = int(store.spec.offsets[-1])
    if not 0 <= start <= stop <= n_rows:
        raise ValueError(f"rows [{start}, {stop}) are outside [0, {n_rows})")
    return _read_blocks(store, family, layer, [(start, stop)])


def read_family(
    store: FeatureStore,
    family: str,
    examples: Sequence[int] | np.ndarray | slice | None = None,
    layer: int | None = None,
) -> Ragged:
    """Read one family of several examples into one contiguous array.

    Args:
      store: the store.
      family: name of the family.
      examples: indices in any order, a slice, or None for all.
      layer: as in `read_rows`.

    Raises:
      ValueError: a range is not extracted or damaged; the message names its files.
    """
    spec = store.spec
    every = np.arange(len(spec.keys))
    chosen = every if examples is None else every[examples]
    lengths = spec.lengths[chosen]
    blocks: list[tuple[int, int]] = []
    for start, length in zip(
        spec.offsets[chosen].tolist(), lengths.tolist(), strict=True
    ):
        if blocks and blocks[-1][1] == start:  # neighbours are read in one go
            blocks[-1] = (blocks[-1][0], start + length)
        else:
            blocks.append((start, start + length))
    values = _read_blocks(store, family, layer, blocks)
    return Ragged(values=values, starts=np.cumsum(lengths) - lengths, lengths=lengths)


def verify(store: FeatureStore) -> list[str]:
    """Read everything again and compare it with the commit records.

    Returns:
      One sentence per problem; empty if every range is committed and intact.
    """
    problems = []
    done = done_ranges(store)
    for range_id in range(store.spec.n_ranges):
        if range_id not in done:
            problems.append(f"{store.describe(range_id)} is not extracted yet")
            continue
        try:
            problems += _verify_range(store, range_id)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _verify_range(store: FeatureStore, range_id: int) -> list[str]:
    """Compare one committed range with its record."""
    key = store.commit_key(range_id)
    content = _kvstore(store.url).read(key).result().value
    try:
        wanted = json.loads(content)["crc32"]
    except (ValueError, KeyError, TypeError):
        return [f"{store.describe(range_id)} has an unreadable commit record {key}"]
    problems = []
    for name in store.spec.families:
        values = read_rows(store, *store.spec.range_rows(range_id), name)
        if _checksums({name: values})[name] != wanted.get(name):
            files = ", ".join(store.shard_keys(range_id, name))
            problems.append(
                f"{store.describe(range_id)}: {files} does not hold what was written "
                f"(CRC-32 differs from {key})"
            )
    return problems
