"""Where a feature store's bytes lie: its URL, key-value store and zarr3 arrays."""

import functools
from pathlib import Path
from typing import Any

import tensorstore as ts

from extract.store.spec import StoreSpec


@functools.cache
def _context() -> ts.Context:
    """Return the context all stores share: a memory:// store lives in its context."""
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
                f"({cause_of(error)}); delete {url} and extract again"
            ) from error
    return arrays


def cause_of(error: Exception) -> str:
    """Shorten TensorStore's message to its innermost part."""
    text = str(error).rsplit(": ", 1)[-1].rstrip(".")
    return "it or a part of it is missing" if text.endswith("is missing") else text
