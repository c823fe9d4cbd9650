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
`hidden` may keep the answer span alone, and may be int8: then `hidden_scale
[n_rows, n_layers_kept]` lies beside it, and reading `hidden` gives float32.

Ranges. Consecutive examples form a *range* as long as their tokens fit in
`rows_per_shard` rows, and every range starts at a shard boundary; an example that
is longer has a range of several shards to itself. So workers that own different
ranges never share a file, and the bytes do not depend on who wrote them. The rest
of a range's last shard is never written and takes no room, and so is what a family
of the answer span alone does not fill. Readers never see this: to them a family's
rows are all examples end to end, without gaps.

A range is done when its commit record exists, which is written after the data.
What is absent or damaged raises; it is never NaN, zero, or left out.

A store is `index.json`, `examples.safetensors`, one folder per family, and
`commits/<store id>/<range>.json`.
"""

import dataclasses
import functools
import json
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


@functools.cache
def _context() -> ts.Context:
    """Return the context all stores share; a memory:// store lives in its context."""
    return ts.Context()


def as_url(where: str | Path) -> str:
    """Return a kvstore URL with a trailing slash; a plain path becomes `file://`."""
    text = str(where)
    url = text if "://" in text else Path(text).absolute().as_uri()
    return url if url.endswith("/") else url + "/"


def open_kvstore(url: str) -> ts.KvStore:
    """Open the key-value store below `url`."""
    return ts.KvStore.open(url, context=_context()).result()


def _array_spec(url: str, spec: StoreSpec, name: str) -> dict[str, Any]:
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
            "fill_value": 0 if family.dtype == "int8" else "NaN",
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


def open_arrays(url: str, spec: StoreSpec, create: bool) -> dict[str, ts.TensorStore]:
    """Open every family; an error names the one that fails."""
    arrays = {}
    for name in spec.families:
        if not create:
            _check_nesting(url, name)
        try:
            how = {"open": True, "create": create, "context": _context()}
            arrays[name] = ts.open(_array_spec(url, spec, name), **how).result()
        except (ValueError, OSError) as error:
            cause = _cause_of(error)
            raise ValueError(
                f"{url}{name} cannot be written ({cause}); look what is there, or "
                "choose another place"
                if create
                else f"{url}{name} does not hold the array its index describes "
                f"({cause}); delete {url} and extract again"
            ) from error
    return arrays


def _check_nesting(url: str, name: str) -> None:
    """Refuse metadata nested so deeply that TensorStore would end the process."""
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
    """An opened store."""

    url: str  # where it lies, with a trailing slash
    id: str  # first 16 hex digits of the index's SHA-256; names the commit folder
    spec: StoreSpec
    arrays: Mapping[str, ts.TensorStore]  # one open TensorStore per family
    # Ranges that were found committed, or written: no writer takes a record back.
    seen: set[int] = dataclasses.field(default_factory=set, repr=False)

    def commit_key(self, range_id: int) -> str:
        """Key of the commit record of one range, below `url`."""
        return f"commits/{self.id}/{range_id:06d}.json"

    def shard_keys(self, range_id: int, name: str) -> list[str]:
        """Keys of one range's files in one family, below `url`."""
        first, last = self.spec.range_shards[range_id : range_id + 2].tolist()
        zeros = "/0" * len(self.spec.families[name].shape)
        return [f"{name}/c/{shard}{zeros}" for shard in range(first, last)]

    def source_of(self, range_id: int) -> str:
        """Name what has to be deleted for one range to be read again.

        The index says which answers were read while they were written, which nobody
        can do again: with such answers that is the store.
        """
        return self.url if self.spec.is_written.any() else self.commit_key(range_id)

    def describe(self, range_id: int) -> str:
        """Name one range for a message."""
        first, last = self.spec.range_examples[range_id : range_id + 2].tolist()
        return f"range {range_id} (examples {first} to {last - 1}) of {self.url}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """One family of several examples, end to end."""

    values: np.ndarray  # `[n_rows, …]`; of i `values[starts[i]:starts[i] + lengths[i]]`
    starts: np.ndarray  # `[n_examples]` int64
    lengths: np.ndarray  # `[n_examples]` int64, rows of each example
    # `[n_examples]` int64, the token of each example that has the first row; 0 where
    # every token has a row. What is at token t of example i lies in row
    # `starts[i] + t - first_tokens[i]`.
    first_tokens: np.ndarray

    def example(self, i: int) -> np.ndarray:
        """Return the rows of example i, without a copy."""
        return self.values[self.starts[i] : self.starts[i] + self.lengths[i]]


def open_store(url: str | Path) -> FeatureStore:
    """Open an existing store; it may still be incomplete, see `done_ranges`."""
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
    """Return the examples of two finished stores as one to read, without a copy.

    It has the fingerprint of the first, and the keys that are given for all examples.
    """
    specs = first.spec, second.spec
    here, there = ((dict(x.families), x.hidden_layers, x.rows_per_shard) for x in specs)
    if here != there:
        raise ValueError(
            f"{second.url} does not hold what {first.url} holds, expected the same "
            "families, layers, types and rows of a file; extract it again as that was"
        )
    fields: dict[str, Any] = {
        field: np.concatenate([getattr(spec, name) for spec in specs])
        for field, name in (
            ("lengths", "lengths"),
            ("spans", "spans"),
            ("firsts", "first_rows"),
            ("written_mask", "is_written"),
        )
    }
    spec = dataclasses.replace(
        first.spec,
        keys=tuple(keys),
        range_starts=frozenset([len(first.spec.keys)]),
        **fields,
    )
    arrays = {
        name: ts.concat([array, second.arrays[name]], axis=0)
        for name, array in first.arrays.items()
    }
    seen = set(range(spec.n_ranges))  # what is missing has no file, which is an error
    url = f"{first.url} and {second.url}"
    return FeatureStore(url=url, id="", spec=spec, arrays=arrays, seen=seen)


def done_ranges(store: FeatureStore) -> frozenset[int]:
    """Return the ranges that are committed now."""
    folder = f"commits/{store.id}/"
    span = ts.KvStore.KeyRange(folder, folder + "\x7f")
    keys = open_kvstore(store.url).list(span).result()
    store.seen.update(_range_of(store.url, key.decode()) for key in keys)
    return frozenset(store.seen)


def _range_of(url: str, key: str) -> int:
    match = re.fullmatch(r".*/([0-9]+)\.json", key)
    if match is None:
        raise ValueError(
            f"{url}{key} is no commit record, and the folder must hold nothing else "
            "(a stage is done again when it changes); delete that file"
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
    """Read row blocks `[start, stop)` as they are stored, int8 codes included."""
    array = _family_array(store, name, layer)
    n_rows = sum(stop - start for start, stop in blocks)
    values = np.empty((n_rows, *array.shape[1:]), array.dtype.numpy_dtype)
    target = ts.array(values, copy=False)
    pending: list[tuple[int, ts.WriteFutures]] = []
    row = in_flight = 0
    for start, stop in blocks:
        for range_id, stored, n in store.spec.segments(start, stop, name):
            if range_id not in store.seen and range_id not in done_ranges(store):
                raise ValueError(
                    f"{store.describe(range_id)} is not extracted yet (no "
                    f"{store.commit_key(range_id)}); run extract again, it continues"
                )
            copy = target[row : row + n].write(array[stored : stored + n])
            pending.append((range_id, copy))
            row, in_flight = row + n, in_flight + n * (values[:1].nbytes)
            if in_flight > _BYTES_IN_FLIGHT:
                _finish(store, name, pending)
                in_flight = 0
    _finish(store, name, pending)
    return values


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
                f"{', '.join(store.shard_keys(range_id, name))} ({_cause_of(error)}); "
                f"delete {store.source_of(range_id)} and run extract again"
            ) from error
    pending.clear()


def _joined(starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return row blocks; neighbours become one, which is read in one go."""
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

    Values are of the family's type; those of an int8 family are float32, unless its
    codes are asked for.

    Args:
      store: the store.
      family: name of the family.
      examples: indices in any order, a slice, or None for all.
      layer: number of one model layer of a family stored by layer, which leaves the
        layer axis out; None for all.
      span: 0, 1 or 2 for the rows of the context, question or answer alone; None for
        all that the family keeps.
      is_decoded: False for int8 codes, whose scales are a family of their own.
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
                f"{store.url} keeps {family!r} of the answer span alone; extract again "
                "with --set hidden_spans=all"
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
    """Create a store, or open it if exactly this one is there already.

    Several processes may do this at once: each writes the same bytes, and
    `index.json` comes last.
    """
    url = as_url(url)
    if not url.startswith(_WRITABLE):
        raise ValueError(
            f"a feature store cannot be written to {url}: only "
            f"{', '.join(_WRITABLE)} replace a file in one step; extract to one of "
            "these and copy the finished store"
        )
    kvstore = open_kvstore(url)
    index = spec.index_bytes()
    stored = kvstore.read("index.json").result()
    if stored.state == "value":
        if stored.value != index:
            raise ValueError(
                f"{url} holds another store: {_index_difference(stored.value, index)}; "
                "choose another place, or delete it to extract again"
            )
        return open_store(url)
    open_arrays(url, spec, create=True)
    kvstore.write("examples.safetensors", spec.examples_bytes()).result()
    kvstore.write("index.json", index).result()
    return open_store(url)


def _index_difference(stored: bytes, wanted: bytes) -> str:
    try:
        old, new = (
            index | {f"fingerprint.{k}": v for k, v in index["fingerprint"].items()}
            for index in (json.loads(stored), json.loads(wanted))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its index.json is not readable"
    differences = []
    for field in dict.fromkeys([*old, *new]):
        there, wants = json.dumps(old.get(field)), json.dumps(new.get(field))
        if there == wants or field in ("sha256", "fingerprint"):
            continue
        is_short = len(there) + len(wants) < 200
        differences.append(
            f"its {field} is {there}, not {wants}" if is_short else f"other {field}"
        )
    return "; ".join(differences) or "its index.json was written by another version"


def write_range(
    store: FeatureStore, range_id: int, signals: Mapping[str, np.ndarray]
) -> None:
    """Write every family of one range, then its commit record.

    Several processes may write different ranges at once. Signals are `[n_rows, …]` by
    family, the range's examples end to end; they replace what is there of the range.
    """
    kvstore = open_kvstore(store.url)
    _check_signals(store, range_id, signals)
    store.seen.discard(range_id)
    stale = [store.commit_key(range_id)]
    for name in store.spec.families:
        stale += store.shard_keys(range_id, name)
    # TensorStore merges a write into the shard it finds. What an interrupted run left
    # there is taken away first, so that the bytes cannot depend on it.
    for key in stale:
        kvstore.write(key, None).result()
    first = int(store.spec.range_shards[range_id]) * store.spec.rows_per_shard
    futures = [
        store.arrays[name][first : first + len(values)].write(values)
        for name, values in signals.items()
        if len(values)  # a range may keep no answer token at all
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
        raise ValueError(f"{store.describe(range_id)} needs {wanted}, found {came}")


def _checksums(signals: Mapping[str, np.ndarray]) -> dict[str, str]:
    """CRC-32 of each family's values, C order; SHA-256 would halve the write rate."""
    return {
        name: f"{zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data):08x}"
        for name, values in signals.items()
    }


def verify(store: FeatureStore) -> list[str]:
    """Read everything again; returns a sentence for each thing absent or damaged."""
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
                f"{store.describe(range_id)}: {files} does not hold what was written "
                f"(CRC-32 differs from {key}){again}"
            )
