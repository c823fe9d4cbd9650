"""What fixes a feature store: families, examples, ranges, and the index on disk.

The glossary of axes and the meaning of a range are in `extract/store/store.py`. No
file is opened here.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from beatrice.extract.store.families import Family

FORMAT_VERSION = 3
# Which passes of the model signals come from: those that write the answer, with the
# model's cache, or one that reads it again.
ReadingPath = Literal["decode", "teacher_forced"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoreSpec:
    """Everything that fixes a store before the first signal is read."""

    families: Mapping[str, Family]  # by name, in the order they are stored
    keys: tuple[tuple[str, ...], ...]  # `n_examples` rows that name them, unique
    lengths: np.ndarray  # `[n_examples]` int64, tokens of each example, at least 1
    spans: np.ndarray  # `[n_examples, 3, 2]` int64, see the glossary
    rows_per_shard: int  # rows of one file, a power of two
    hidden_layers: tuple[int, ...]  # layer numbers behind the axis of `hidden`
    # What else the values depend on (model, revision, precision, …); JSON values. A
    # store with another fingerprint is another store.
    fingerprint: Mapping[str, Any]
    # `[n_examples]` int64, the token of each example from which on families have rows;
    # behind the worked examples of a prompt. None: from the first.
    firsts: np.ndarray | None = None
    # `[n_examples]` bool, those that were read while they were written. None: none of
    # them.
    written_mask: np.ndarray | None = None

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
        self._check_spans()
        for name, family in self.families.items():
            if family.by_layer and family.shape[0] != len(self.hidden_layers):
                raise ValueError(
                    f"family {name!r} has {family.shape[0]} layers, hidden_layers "
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
                f"{self.first_rows[first]} on; spans are [start, stop) inside the "
                "example, and its rows begin before them"
            )

    @functools.cached_property
    def first_rows(self) -> np.ndarray:
        """`[n_examples]` int64: the first token that has a row."""
        return np.zeros_like(self.lengths) if self.firsts is None else self.firsts

    @functools.cached_property
    def is_written(self) -> np.ndarray:
        """`[n_examples]` bool: the answers that were read while they were written."""
        absent = np.zeros(len(self.keys), dtype=bool)
        return absent if self.written_mask is None else self.written_mask

    @property
    def path(self) -> ReadingPath:
        """Return by which path most of the signals came."""
        return (
            "decode"
            if 2 * self.is_written.sum() > len(self.keys)
            else ("teacher_forced")
        )

    @functools.cached_property
    def n_read(self) -> np.ndarray:
        """`[n_examples]` int64: the tokens that have rows."""
        return self.lengths - self.first_rows

    @functools.cached_property
    def range_examples(self) -> np.ndarray:
        """`[n_ranges + 1]` int64: range r holds the examples from r to r + 1."""
        edges, used = [0], 0
        for example, length in enumerate(self.n_read.tolist()):
            if example > edges[-1] and used + length > self.rows_per_shard:
                edges.append(example)
                used = 0
            used += length
        return np.asarray([*edges, len(self.keys)], dtype=np.int64)

    @functools.cached_property
    def range_shards(self) -> np.ndarray:
        """`[n_ranges + 1]` int64: range r owns the shards from r to r + 1."""
        rows = np.add.reduceat(self.n_read, self.range_examples[:-1])
        return np.concatenate([[0], np.cumsum(-(-rows // self.rows_per_shard))])

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """`[n_examples + 1]` int64: example i owns the token rows from i to i + 1."""
        return np.concatenate([[0], np.cumsum(self.n_read)])

    @functools.cached_property
    def _answer_offsets(self) -> np.ndarray:
        lengths = self.spans[:, 2, 1] - self.spans[:, 2, 0]
        return np.concatenate([[0], np.cumsum(lengths)])

    def family_offsets(self, name: str) -> np.ndarray:
        """`[n_examples + 1]` int64: example i owns a family's rows from i to i + 1."""
        is_all = self.families[name].spans == "all"
        return self.offsets if is_all else self._answer_offsets

    def first_tokens(self, name: str) -> np.ndarray:
        """`[n_examples]` int64: the token of each example that has the first row."""
        is_all = self.families[name].spans == "all"
        return self.first_rows if is_all else self.spans[:, 2, 0]

    @property
    def n_ranges(self) -> int:
        """Number of ranges."""
        return len(self.range_examples) - 1

    def range_rows(self, range_id: int, name: str | None = None) -> tuple[int, int]:
        """Rows `[start, stop)` of one range, of a family or (None) of all tokens."""
        offsets = self.offsets if name is None else self.family_offsets(name)
        first, last = self.range_examples[range_id : range_id + 2]
        return int(offsets[first]), int(offsets[last])

    def segments(
        self, start: int, stop: int, name: str
    ) -> Iterator[tuple[int, int, int]]:
        """Cut a family's rows at range edges: (range, stored row, number of rows)."""
        edges = self.family_offsets(name)[self.range_examples]
        range_id = int(np.searchsorted(edges, start, side="right")) - 1
        while start < stop:
            shard_row = int(self.range_shards[range_id]) * self.rows_per_shard
            n_rows = min(stop, int(edges[range_id + 1])) - start
            if n_rows:  # a range may keep no answer token at all
                yield range_id, shard_row + start - int(edges[range_id]), n_rows
            start, range_id = start + n_rows, range_id + 1

    def layer_index(self, name: str, layer: int) -> int:
        """Position of a model layer on the layer axis."""
        if not self.families[name].by_layer:
            raise ValueError(f"family {name!r} is not stored by layer; leave layer out")
        if layer not in self.hidden_layers:
            raise ValueError(
                f"layer {layer} is not in the store, which keeps "
                f"{', '.join(map(str, self.hidden_layers))}; extract again with it"
            )
        return self.hidden_layers.index(layer)

    def examples_bytes(self) -> bytes:
        """Return the content of `examples.safetensors`."""
        tensors = {
            "lengths": self.lengths,
            "spans": self.spans,
            "firsts": self.first_rows,
            "written": self.is_written,
        }
        # The memory of a strided array would be written as it lies.
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
    """Return JSON bytes that depend on the content alone."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse_index(content: bytes, url: str) -> tuple[dict[str, Any], str]:
    """Read and check `index.json` of the store at `url`; also return its SHA-256."""
    try:
        index = json.loads(content)
        sha = index.pop("sha256")
        is_intact = sha == hashlib.sha256(canonical_json(index)).hexdigest()
        version = index["version"]
    except (ValueError, KeyError, TypeError, AttributeError):
        index, sha, is_intact, version = {}, "", False, FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{url}index.json is of version {version}, this program reads version "
            f"{FORMAT_VERSION}; use the program that wrote it, or extract again"
        )
    if not is_intact:
        raise ValueError(
            f"{url}index.json is damaged: it does not match its own SHA-256; "
            "restore it from a copy, or delete the store and extract again"
        )
    return index, sha


def parse_spec(index: Mapping[str, Any], examples: bytes, url: str) -> StoreSpec:
    """Check `examples.safetensors` against a parsed index and join the two."""
    if hashlib.sha256(examples).hexdigest() != index["examples_sha256"]:
        raise ValueError(
            f"{url}examples.safetensors is missing or damaged: it does not match the "
            "SHA-256 in index.json; delete the store and extract again"
        )
    tensors = safetensors.numpy.load(examples)
    families = {
        name: Family(**{**fields, "shape": tuple(fields["shape"])})
        for name, fields in index["families"].items()
    }
    return StoreSpec(
        families=families,
        keys=tuple(map(tuple, index["keys"])),
        lengths=tensors["lengths"],
        spans=tensors["spans"],
        firsts=tensors["firsts"],
        written_mask=tensors["written"],
        rows_per_shard=index["rows_per_shard"],
        hidden_layers=tuple(index["hidden_layers"]),
        fingerprint=index["fingerprint"],
    )
