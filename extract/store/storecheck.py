"""Verification: what a feature store holds against what was written to it."""

import json

from extract.store.store import FeatureStore, done_ranges, read_stored
from extract.store.storearrays import open_kvstore
from extract.store.storewrite import checksums


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
        values = read_stored(store, *rows, name)
        if checksums({name: values})[name] != wanted(name):
            files = ", ".join(store.shard_keys(range_id, name))
            problems.append(
                f"{store.describe(range_id)}: {files} does not hold what was written "
                f"(CRC-32 differs from {key})"
            )
    return problems
