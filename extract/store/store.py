"""The feature store: token signals on disk, one zarr3 array per family.

Glossary of axes (repeated in the README):

  * `n_examples`: stored sequences, in the order of `StoreSpec.keys`.
  * `n_tokens`: tokens of one example; `n_rows`: tokens of many laid end to end.
  * `n_layers_kept`: residual-stream layers in `hidden`; 0 is the embedding.
  * `d_model`: width of the residual stream.
  * `n_layers`: decoder blocks; `n_attention_layers`: blocks whose attention is read.
  * `n_heads`: attention heads.
  * span axes `[3, 2]`: (context, question, answer) × (start, stop), half-open
    positions inside the example; start equals stop if a span is empty.

Families: `hidden [n_rows, n_layers_kept, d_model]`, `prob [n_rows, 5]`,
`resid [n_rows, 4·n_layers]`, `attn [n_rows, 2, 2, n_attention_layers, n_heads]`.
`hidden` may be kept only for the answer span, and may be int8; then `hidden_scale
[n_rows, n_layers_kept]` is stored too, and reading `hidden` gives float32.

Ranges. Consecutive examples form a *range* as long as their tokens fit in
`rows_per_shard` rows; a longer example forms a range of several shards by itself.
Every range starts at a shard boundary, so workers that own different ranges never
share a file, and the bytes do not depend on who wrote them. Rows that a family does not
fill in a range's shards (more if it keeps only the answer span) are never written and
take no space. Readers never see these gaps: to them, a family's rows are those of all
examples end to end.

A range is done when its commit record exists, which is written after the data.
Absent or damaged data raises an error; it is never read as NaN or zero, or skipped.

A store consists of `index.json`, `examples.safetensors`, one folder per family, and
`commits/<store id>/<range>.json`.
"""

import dataclasses
import functools
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from beatrice.extract.run.files import from_json
from beatrice.extract.store.spec import (
    StoreSpec,
    canonical_json,
    decode,
    parse_index,
    parse_spec,
    scale_name,
)

_BYTES_IN_FLIGHT = 256 << 20
_SHORT = 16  # rows, on average, of copies that are joined


@functools.cache
def _made_context() -> tuple[ts.Context, int]:
    """Return the context that all stores share, and the process that made it."""
    return ts.Context(), os.getpid()


def _context() -> ts.Context:
    """Return the context that all stores share, since memory:// data lives in it."""
    context, process = _made_context()
    if process != os.getpid():
        raise RuntimeError(
            "signals cannot be used here: this process was forked from one that had "
            "used some, and TensorStore would abort it, as its threads do not survive "
            "a fork; start processes by 'spawn' (multiprocessing.get_context('spawn'))"
        )
    return context


def as_url(where: str | Path) -> str:
    """Return a kvstore URL with a trailing slash; a plain path becomes `file://`."""
    text = str(where)
    url = text if "://" in text else Path(text).absolute().as_uri()
    return url if url.endswith("/") else url + "/"


def open_kvstore(url: str) -> ts.KvStore:
    """Open the key-value store at `url`."""
    return ts.KvStore.open(url, context=_context()).result()


def _array_spec(url: str, spec: StoreSpec, name: str) -> dict[str, Any]:
    family, rows = spec.families[name], spec.rows_per_shard
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [little, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": family.chunk_shape(rows),
        # Without the inner crc32c, 310 of 400 flipped bits were read back unnoticed.
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
            "fill_value": 0 if family.dtype == "int8" else "NaN",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [rows, *family.shape]},
            },
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        # TensorStore defaults to neither; without them, rows equal to the fill value
        # are not written, and rows that were not written read as the fill value.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def open_arrays(url: str, spec: StoreSpec, create: bool) -> dict[str, ts.TensorStore]:
    """Open the array of every family; an error names the one that failed."""
    arrays = {}
    for name in spec.families:
        if not create:
            _check_nesting(url, name)
        try:
            how = {"open": True, "create": create, "context": _context()}
            arrays[name] = ts.open(_array_spec(url, spec, name), **how).result()
        # OverflowError: shapes of 2^63 rows.
        except (ValueError, OSError, OverflowError) as error:
            cause = _cause_of(error)
            raise ValueError(
                f"{url}{name} cannot be written ({cause}); check what is already "
                "there, or choose another place"
                if create
                else f"{url}{name} does not hold the array that the index describes "
                f"({cause}); delete {url} and extract again"
            ) from error
    return arrays


def _check_nesting(url: str, name: str) -> None:
    """Refuse metadata nested so deeply that TensorStore would crash the process."""
    key = f"{name}/zarr.json"
    stored = open_kvstore(url).read(key).result()
    if stored.state == "value":
        what_to_do = f"delete {url} and extract again"
        from_json(dict[str, Any], stored.value, f"{url}{key}", what_to_do)


def _cause_of(error: Exception) -> str:
    """Shorten TensorStore's message to its innermost part."""
    causes = str(error).split(" [")[0].rstrip(".").split(": ")
    text = causes[-1] if len(causes[-1]) > 12 else ": ".join(causes[-2:])
    return "it or a part of it is missing" if text.endswith("is missing") else text


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FeatureStore:
    """An open feature store."""

    url: str  # of the store, with a trailing slash
    id: str  # first 16 hex digits of the index's SHA-256; names the commit folder
    spec: StoreSpec
    arrays: Mapping[str, ts.TensorStore]  # one open TensorStore per family
    # Ranges known to be committed; no other writer withdraws a commit.
    seen: set[int] = dataclasses.field(default_factory=set, repr=False)

    def commit_key(self, range_id: int) -> str:
        """Return the key of a range's commit record, below `url`."""
        return f"commits/{self.id}/{range_id:06d}.json"

    def shard_keys(self, range_id: int, name: str) -> list[str]:
        """Return the keys of a range's files in one family, below `url`."""
        first, last = self.spec.range_shards[range_id : range_id + 2].tolist()
        zeros = "/0" * len(self.spec.families[name].shape)
        return [f"{name}/c/{shard}{zeros}" for shard in range(first, last)]

    def source_of(self, range_id: int) -> str:
        """Return what to delete so that a range is read again.

        If any answers were read while being written, that is the whole store: its index
        marks those answers, and they cannot be read in that way again.
        """
        return self.url if self.spec.is_written.any() else self.commit_key(range_id)

    def describe(self, range_id: int) -> str:
        """Name a range for use in messages."""
        first, last = self.spec.range_examples[range_id : range_id + 2].tolist()
        return f"range {range_id} (examples {first} to {last - 1}) of {self.url}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """One family of several examples, whose rows lie end to end."""

    values: np.ndarray  # `[n_rows, …]`, see `example`
    starts: np.ndarray  # `[n_examples]` int64, first row of each example
    lengths: np.ndarray  # `[n_examples]` int64, rows of each example
    # `[n_examples]` int64, the token of each example that has its first row; 0 if every
    # token has one. Token t of example i is in row `starts[i] + t - first_tokens[i]`.
    first_tokens: np.ndarray

    def example(self, i: int) -> np.ndarray:
        """Return the rows of example i, without a copy."""
        return self.values[self.starts[i] : self.starts[i] + self.lengths[i]]


def open_store(url: str | Path) -> FeatureStore:
    """Open an existing store, which may be incomplete; see `done_ranges`."""
    url = as_url(url)
    kvstore = open_kvstore(url)
    stored = kvstore.read("index.json").result()
    if stored.state != "value":
        raise ValueError(f"no feature store at {url} (no index.json); extract first")
    index, sha = parse_index(stored.value, url)
    examples = kvstore.read("examples.safetensors").result().value
    spec = parse_spec(index, examples, url)
    arrays = open_arrays(url, spec, create=False)
    return FeatureStore(url=url, id=sha[:16], spec=spec, arrays=arrays)


def end_to_end(
    first: FeatureStore, second: FeatureStore, keys: Sequence[tuple[str, ...]]
) -> FeatureStore:
    """Return the examples of two finished stores as one readable store, without a copy.

    It has the fingerprint of the first; `keys` names the examples of both.
    """
    specs = first.spec, second.spec
    here, there = ((dict(x.families), x.hidden_layers) for x in specs)
    if here != there:
        raise ValueError(
            f"{second.url} does not match {first.url}: expected the same families, "
            "layers and dtypes; extract it again like the first"
        )
    # A store of more answers may have larger shards: all are counted in the smaller.
    rows = min(spec.rows_per_shard for spec in specs)
    examples = [spec.range_examples for spec in specs]
    shards = [x.range_shards * (x.rows_per_shard // rows) for x in specs]
    edges = (np.concatenate([x[:-1], x[-1] + y]) for x, y in (examples, shards))
    fields: dict[str, Any] = {
        name: np.concatenate([getattr(spec, name) for spec in specs])
        for name in ("lengths", "spans", "first_rows", "is_written")
    }
    spec = dataclasses.replace(
        first.spec,
        keys=tuple(keys),
        rows_per_shard=rows,
        ranges=tuple(edges),
        **fields,
    )
    arrays = {
        name: ts.concat([array, second.arrays[name]], axis=0)
        for name, array in first.arrays.items()
    }
    seen = set(range(spec.n_ranges))  # reading a missing range still fails: no file
    url = f"{first.url} and {second.url}"
    return FeatureStore(url=url, id="", spec=spec, arrays=arrays, seen=seen)


def done_ranges(store: FeatureStore) -> frozenset[int]:
    """Return the ranges that are committed by the time of the call."""
    folder = f"commits/{store.id}/"
    span = ts.KvStore.KeyRange(folder, folder + "\x7f")
    keys = open_kvstore(store.url).list(span).result()
    present = frozenset(_range_of(store.url, key.decode()) for key in keys)
    store.seen.intersection_update(present)  # a record may have been deleted since
    store.seen.update(present)
    return present


def _range_of(url: str, key: str) -> int:
    match = re.fullmatch(r".*/([0-9]+)\.json", key)
    if match is None:
        raise ValueError(
            f"{url}{key} is not a commit record, and its folder must hold nothing else "
            "(a stage is repeated if the folder changes); delete that file"
        )
    return int(match[1])


def _family_array(store: FeatureStore, name: str, layer: int | None) -> ts.TensorStore:
    if name not in store.spec.families:
        raise ValueError(
            f"{store.url} has no family {name!r}; it has "
            f"{', '.join(store.spec.families)}"
        )
    array = store.arrays[name]
    return array if layer is None else array[:, store.spec.layer_index(name, layer)]


def read_blocks(
    store: FeatureStore, name: str, layer: int | None, blocks: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Read blocks of rows `[start, stop)` as stored, that is, int8 as codes."""
    _context()  # raises in a forked process
    array = _family_array(store, name, layer)
    n_rows = sum(stop - start for start, stop in blocks)
    values = np.empty((n_rows, *array.shape[1:]), array.dtype.numpy_dtype)
    target = ts.array(values, copy=False)
    parts: dict[int, list[tuple[int, int, int]]] = {}  # by range
    row = in_flight = 0
    for start, stop in blocks:
        for range_id, stored, n in store.spec.segments(start, stop, name):
            parts.setdefault(range_id, []).append((row, stored, n))
            row += n
    pending: list[tuple[int, ts.WriteFutures]] = []
    for range_id, copies in parts.items():
        if range_id not in store.seen and range_id not in done_ranges(store):
            raise ValueError(
                f"{store.describe(range_id)} is not extracted yet (no "
                f"{store.commit_key(range_id)}); run extract again to continue"
            )
        for rows, stored_rows, n in _selections(np.array(copies)):
            pending.append((range_id, target[rows].write(array[stored_rows])))
            in_flight += n * values[:1].nbytes
            if in_flight > _BYTES_IN_FLIGHT:
                _finish(store, name, pending)
                in_flight = 0
    _finish(store, name, pending)
    return values


def _selections(copies: np.ndarray) -> Iterator[tuple[Any, Any, int]]:
    """Yield where to put rows, where they are stored, and their number.

    `copies` are `[n, 3]`: each one's first row, first stored row and number of rows.
    Short ones, such as answers, are joined into one request, since a request takes as
    long as dozens of rows that are listed by number.
    """
    lengths = copies[:, 2]
    if (n_rows := lengths.sum()) < _SHORT * len(copies):
        at = np.arange(n_rows) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        to, where = (np.repeat(first, lengths) + at for first in copies[:, :2].T)
        yield to, where, int(n_rows)
    else:
        for row, stored, n in copies.tolist():
            yield slice(row, row + n), slice(stored, stored + n), n


def _finish(
    store: FeatureStore, name: str, pending: list[tuple[int, ts.WriteFutures]]
) -> None:
    """Wait for pending reads; an error names the range and files of one that failed."""
    for range_id, future in pending:
        try:
            future.result()
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{store.describe(range_id)} is damaged in "
                f"{', '.join(store.shard_keys(range_id, name))} ({_cause_of(error)}); "
                f"delete {store.source_of(range_id)} and run extract again"
            ) from error
    pending.clear()


def _joined(starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return blocks of rows, joining adjacent ones to be read in one go."""
    blocks: list[tuple[int, int]] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if blocks and blocks[-1][1] == start:
            blocks[-1] = (blocks[-1][0], start + length)
        else:
            blocks.append((start, start + length))
    return blocks


def read_family(
    store: FeatureStore,
    family: str,
    examples: Sequence[int] | np.ndarray | slice | None = None,
    layer: int | None = None,
    span: int | None = None,
    is_decoded: bool = True,
) -> Ragged:
    """Read one family of several examples into one contiguous array.

    Args:
      store: the store.
      family: name of the family.
      examples: indices in any order, a slice, or None for all.
      layer: number of the one layer to read, dropping the layer axis; None for all.
      span: 0, 1 or 2 for only rows of the context, question or answer; None for all.
      is_decoded: whether int8 becomes float32; otherwise codes are returned, whose
        scales are a separate family. Other dtypes are returned as they are.
    """
    _family_array(store, family, layer)
    spec = store.spec
    chosen = np.arange(len(spec.keys))[slice(None) if examples is None else examples]
    offsets, first_tokens = spec.family_offsets(family), spec.first_tokens(family)
    starts, lengths = offsets[chosen], (offsets[1:] - offsets[:-1])[chosen]
    first = first_tokens[chosen]
    if span is not None:
        if span != 2 and spec.families[family].spans == "answer":
            raise ValueError(
                f"{store.url} keeps {family!r} only for the answer span; extract again "
                "with hidden_spans=all"
            )
        bounds = spec.spans[chosen, span]
        starts, lengths = starts + bounds[:, 0] - first, bounds[:, 1] - bounds[:, 0]
        first = bounds[:, 0]
    blocks = _joined(starts, lengths)
    values = read_blocks(store, family, layer, blocks)
    if is_decoded and spec.families[family].dtype == "int8":
        values = decode(values, read_blocks(store, scale_name(family), layer, blocks))
    starts = np.cumsum(lengths) - lengths
    return Ragged(values=values, starts=starts, lengths=lengths, first_tokens=first)


# TensorStore's documentation warns that its S3 driver cannot write atomically.
_WRITABLE = ("file://", "memory://", "gs://")


def create_store(url: str | Path, spec: StoreSpec) -> FeatureStore:
    """Create a store, or open it if exactly this one already exists.

    Several processes may do so at once: all write the same bytes, `index.json` last.
    """
    url = as_url(url)
    if not url.startswith(_WRITABLE):
        raise ValueError(
            f"a feature store cannot be written to {url}: files are replaced in one "
            f"step only under {', '.join(_WRITABLE)}; extract to one of these and copy "
            "the finished store"
        )
    kvstore = open_kvstore(url)
    index = spec.index_bytes()
    stored = kvstore.read("index.json").result()
    if stored.state != "value":
        open_arrays(url, spec, create=True)
        kvstore.write("examples.safetensors", spec.examples_bytes()).result()
        kvstore.write("index.json", index).result()
    elif stored.value != index:
        raise ValueError(
            f"{url} holds another store: {_index_difference(url, stored.value, index)};"
            " choose another place, or delete it to extract again"
        )
    return open_store(url)


def _index_difference(url: str, stored: bytes, wanted: bytes) -> str:
    old, new = (parse_index(content, url)[0] for content in (stored, wanted))
    for index in (old, new):
        fingerprint = index.pop("fingerprint").items()
        index.update({f"fingerprint.{name}": value for name, value in fingerprint})
    differences = []
    for field in old | new:
        there, wants = json.dumps(old.get(field)), json.dumps(new.get(field))
        if there != wants:
            is_short = len(there) + len(wants) < 200
            differences.append(
                f"{field} {there} instead of {wants}" if is_short else f"other {field}"
            )
    return "; ".join(differences) or "its index.json was written by another version"


def write_range(
    store: FeatureStore, range_id: int, signals: Mapping[str, np.ndarray]
) -> None:
    """Write every family of one range, then its commit record.

    Several processes may write different ranges at once. `signals` holds `[n_rows, …]`
    per family, the range's examples end to end, and replaces any earlier data.
    """
    kvstore = open_kvstore(store.url)
    _check_signals(store, range_id, signals)
    store.seen.discard(range_id)
    stale = [store.commit_key(range_id)]
    for name in store.spec.families:
        stale += store.shard_keys(range_id, name)
    # TensorStore merges a write into an existing shard. What an interrupted run left is
    # deleted first, so that the bytes cannot depend on it.
    for key in stale:
        kvstore.write(key, None).result()
    first = int(store.spec.range_shards[range_id]) * store.spec.rows_per_shard
    futures = [
        store.arrays[name][first : first + len(values)].write(values)
        for name, values in signals.items()
        if len(values)  # a range may store no answer token at all
    ]
    record = {"range": range_id, "crc32": _checksums(signals)}
    for future in futures:
        future.result()
    kvstore.write(store.commit_key(range_id), canonical_json(record)).result()
    store.seen.add(range_id)


def _check_signals(
    store: FeatureStore, range_id: int, signals: Mapping[str, np.ndarray]
) -> None:
    wanted = {}
    for name, family in store.spec.families.items():
        start, stop = store.spec.range_rows(range_id, name)
        wanted[name] = ((stop - start, *family.shape), family.numpy_dtype)
    came = {name: (value.shape, value.dtype) for name, value in signals.items()}
    if came != wanted:
        raise ValueError(f"{store.describe(range_id)}: expected {wanted}, found {came}")


def _checksums(signals: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return a CRC-32 per family, in C order; SHA-256 would halve the write rate."""
    return {
        name: f"{zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data):08x}"
        for name, values in signals.items()
    }


def verify(store: FeatureStore) -> list[str]:
    """Read everything again; return a sentence per missing or damaged part."""
    problems = []
    done = done_ranges(store)
    for range_id in range(store.spec.n_ranges):
        try:
            if range_id not in done:
                raise ValueError(f"{store.describe(range_id)} is not extracted yet")
            problems += _verify_range(store, range_id)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _verify_range(store: FeatureStore, range_id: int) -> Iterator[str]:
    key = store.commit_key(range_id)
    again = f"; delete {store.source_of(range_id)} and run extract again"
    content = open_kvstore(store.url).read(key).result().value
    try:
        wanted = json.loads(content)["crc32"].get
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield f"{store.describe(range_id)} has an unreadable commit record {key}{again}"
        return
    for name in store.spec.families:
        values = read_blocks(store, name, None, [store.spec.range_rows(range_id, name)])
        if _checksums({name: values})[name] != wanted(name):
            files = ", ".join(store.shard_keys(range_id, name))
            yield (
                f"{store.describe(range_id)}: what is in {files} is not what was "
                f"written (its CRC-32 differs from {key}){again}"
            )
