"""Creating a feature store, writing its ranges, and verifying what it holds."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from beatrice.extract.store.read import (
    FeatureStore,
    as_url,
    done_ranges,
    open_arrays,
    open_kvstore,
    open_store,
    read_blocks,
)
from beatrice.extract.store.spec import StoreSpec, canonical_json

# TensorStore's documentation warns that its S3 driver cannot write atomically.
_WRITABLE = ("file://", "memory://", "gs://")


def create_store(url: str | Path, spec: StoreSpec) -> FeatureStore:
    """Create a store, or open it if exactly this one is there already.

    Several processes may do this at once: each writes the same bytes, and
    `index.json` comes last.

    Raises:
      ValueError: another store is there (the message names what differs), or none
        can be written there.
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
    found = kvstore.read("index.json").result()
    if found.state == "value":
        if found.value != index:
            raise ValueError(
                f"{url} holds another store: {_index_difference(found.value, index)}; "
                "choose another place, or delete it to extract again"
            )
        return open_store(url)
    open_arrays(url, spec, create=True)
    kvstore.write("examples.safetensors", spec.examples_bytes()).result()
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
    parts = []
    for field in dict.fromkeys([*old, *new]):
        there, wants = json.dumps(old.get(field)), json.dumps(new.get(field))
        if there == wants or field in ("sha256", "fingerprint"):
            continue
        is_short = len(there) + len(wants) < 200
        parts.append(
            f"its {field} is {there}, not {wants}" if is_short else f"other {field}"
        )
    return "; ".join(parts) or "its index.json was written by another version"


def write_range(
    store: FeatureStore, range_id: int, signals: Mapping[str, np.ndarray]
) -> None:
    """Write every family of one range, then its commit record.

    Several processes may write different ranges at once.

    Args:
      store: as `create_store` returned it.
      range_id: which range; what is there of it is replaced.
      signals: by family `[n_rows, …]`, the range's examples end to end.
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
    """Check names, shapes and types against the spec."""
    wanted = {}
    for name, family in store.spec.families.items():
        start, stop = store.spec.range_rows(range_id, name)
        wanted[name] = ((stop - start, *family.shape), family.numpy_dtype)
    found = {name: (value.shape, value.dtype) for name, value in signals.items()}
    if found != wanted:
        raise ValueError(f"{store.describe(range_id)} needs {wanted}, found {found}")


def _checksums(signals: Mapping[str, np.ndarray]) -> dict[str, str]:
    """CRC-32 of each family's values, C order; SHA-256 would halve the write rate."""
    return {
        name: f"{zlib.crc32(np.ascontiguousarray(values).view(np.uint8)):08x}"
        for name, values in signals.items()
    }


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
    content = open_kvstore(store.url).read(key).result().value
    try:
        wanted = json.loads(content)["crc32"].get
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{store.describe(range_id)} has an unreadable commit record {key}"]
    problems = []
    for name in store.spec.families:
        rows = store.spec.range_rows(range_id, name)
        values = read_blocks(store, name, None, [rows])
        if _checksums({name: values})[name] != wanted(name):
            files = ", ".join(store.shard_keys(range_id, name))
            problems.append(
                f"{store.describe(range_id)}: {files} does not hold what was written "
                f"(CRC-32 differs from {key})"
            )
    return problems
