"""Signals that were read while answers were written, waiting for a feature store.

The position of an answer's rows in a store depends on the lengths of all answers before
it, which are unknown while these are written. So each batch leaves a file of its
signals, in the dtypes of the store, before its answers are recorded: every recorded
answer has been read. `extract` copies the rows into the store, reads those that are
missing, and deletes the files when it is done. Nothing here loads Torch.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

import numpy as np
import safetensors
import safetensors.numpy

from beatrice.extract.records import Answer
from beatrice.extract.run.files import from_json, write_stream_atomic
from beatrice.extract.signals.sequence import Reader, TokenSequence, sequence_of
from beatrice.extract.store.spec import Dtype, Spans, StoreConfig, encode, numpy_dtype

FORMAT_VERSION = 2


class WaitingSignals(NamedTuple):
    """One answer's families, `[n_rows, …]` each; see `AnswerSignals`."""

    hidden: np.ndarray
    prob: np.ndarray
    resid: np.ndarray
    attn: np.ndarray


def sequence_key(*sequences: TokenSequence) -> str:
    """Return the SHA-256 of what the model read and wrote, and of its spans."""
    digest = hashlib.sha256()
    for sequence in sequences:
        for numbers in (sequence.ids, sequence.targets, sequence.spans):
            digest.update(np.ascontiguousarray(numbers, dtype="<i8").data)
    return digest.hexdigest()


def waiting_config(config: StoreConfig) -> StoreConfig:
    """Return the config with which signals are stored while they wait.

    They have the dtypes of the store, so that rounding again changes nothing. Only int8
    would be rounded twice, so these values wait in float32.
    """
    dtype = "float32" if config.dtype == "int8" else config.dtype
    return dataclasses.replace(config, dtype=dtype)


def _types(config: StoreConfig) -> dict[str, Dtype]:
    """Return the dtype in which each family waits."""
    hidden = waiting_config(config).dtype
    return {
        n: hidden if n == "hidden" else config.scalars for n in WaitingSignals._fields
    }


def save_batch(
    folder: Path,
    reader: Reader,
    config: StoreConfig,
    answers: Sequence[Answer],
    signals: Sequence[Any],
) -> None:
    """Write the signals of a batch of answers into a new file in a folder.

    `signals` holds what `reader` read of each answer, or None for an answer that must
    be read again. Values are converted to the dtypes of `config`.
    """
    rows = {
        sequence_key(sequence_of(answer, answer_span=config.answer_span)): of_answer
        for answer, of_answer in zip(answers, signals, strict=True)
        if of_answer is not None
    }
    if not rows:
        return
    types = _types(config)
    edges, tensors, sums = {}, {}, {}
    for name, dtype in types.items():
        values = [getattr(of_answer, name) for of_answer in rows.values()]
        edges[name] = np.cumsum([0, *map(len, values)]).tolist()
        # Viewed as integers of the same size, since safetensors has no NumPy bfloat16.
        encoded = encode(np.concatenate(values), dtype)
        if encoded.n_overflowed:
            raise ValueError(
                f"{encoded.n_overflowed} values of {name!r} are too large for "
                f"{dtype}; make the run with --set dtype=bf16"
            )
        codes = encoded.codes
        tensors[name] = codes.view(f"<u{codes.dtype.itemsize}")
        stretches = itertools.pairwise(edges[name])
        sums[name] = [zlib.crc32(tensors[name][i:j].tobytes()) for i, j in stretches]
    about = {
        "version": FORMAT_VERSION,
        "keys": list(rows),
        "edges": edges,
        "crc32": sums,  # of each answer's rows
        "types": types,
        "hidden_layers": list(reader.hidden_layers),
        "hidden_spans": reader.hidden_spans,
        "answer_span": config.answer_span,
        "fingerprint": dict(reader.fingerprint),
        "shapes": dict(reader.shapes),
    }
    name = hashlib.sha256("\n".join(about["keys"]).encode()).hexdigest()[:16]
    content = safetensors.numpy.save(tensors, {"about": json.dumps(about)})
    with write_stream_atomic(folder / f"{name}.safetensors") as stream:
        stream.write(content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenSignals(Mapping[str, WaitingSignals]):
    """The signals in a folder by `sequence_key`, read from disk on access."""

    fingerprint: Mapping[str, Any]  # of the reader, see `Reader`
    hidden_layers: tuple[int, ...]  # returned for every answer
    hidden_spans: Spans  # for which hidden states were read
    shapes: Mapping[str, tuple[int, ...]]  # of one token's signals, per family
    places: dict[str, tuple[Path, int]]  # file of each answer, and its index in it
    # Opens a file and returns it with its metadata.
    opened: Callable[[Path], tuple[Any, dict[str, Any]]]

    @classmethod
    def open(
        cls, folder: Path, fingerprint: Mapping[str, Any], config: StoreConfig
    ) -> Self | None:
        """Return the signals in a folder that match a reader and a config.

        `fingerprint` is the reader's; `config` says what is needed of each answer.
        Returns None if the folder has no such signals.
        """
        places: dict[str, tuple[Path, int]] = {}
        last: dict[str, Any] = {}
        opened = functools.lru_cache(maxsize=64)(_open)
        for path in sorted(folder.glob("*.safetensors")):
            _, about = opened(path)
            if _has_needed_signals(about, fingerprint, config):
                last = about
                places |= {k: (path, i) for i, k in enumerate(about["keys"])}
        if not places:
            return None
        layers = config.hidden_layers
        layers = last["hidden_layers"] if layers is None else layers
        shapes = {name: tuple(shape) for name, shape in last["shapes"].items()}
        return cls(
            fingerprint=fingerprint,
            hidden_layers=tuple(layers),
            hidden_spans=last["hidden_spans"],
            shapes=shapes | {"hidden": (len(layers), *shapes["hidden"][1:])},
            places=places,
            opened=opened,
        )

    def __contains__(self, key: object) -> bool:
        """Return whether an answer's signals exist, without reading any."""
        return key in self.places

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.places)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of the answers."""
        return iter(self.places)

    def __getitem__(self, key: str) -> WaitingSignals:
        """Read one answer's signals."""
        path, index = self.places[key]
        file, about = self.opened(path)
        values = {}
        for name, dtype in about["types"].items():
            start, stop = about["edges"][name][index : index + 2]
            codes = file.get_slice(name)[start:stop]
            if zlib.crc32(codes.tobytes()) != about["crc32"][name][index]:
                raise ValueError(_damage(path, f"CRC-32 of {name!r} differs"))
            values[name] = codes.view(numpy_dtype(dtype)).astype(np.float32)
        # A file has the layers wanted when it was written, perhaps more than these.
        if (there := about["hidden_layers"]) != list(self.hidden_layers):
            slots = [there.index(layer) for layer in self.hidden_layers]
            values["hidden"] = values["hidden"][:, slots]
        return WaitingSignals(**values)


class _FileMetadata(TypedDict):
    """The metadata of a file, see `save_batch`."""

    version: int
    keys: list[str]
    edges: dict[str, list[int]]
    crc32: dict[str, list[int]]
    types: dict[str, Dtype]
    hidden_layers: list[int]
    hidden_spans: Spans
    answer_span: str
    fingerprint: dict[str, Any]
    shapes: dict[str, list[int]]


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return an open file, whose rows are not read yet, and its metadata."""
    try:
        file = safetensors.safe_open(path, framework="np")
        text = (file.metadata() or {})["about"]
        about = from_json(dict[str, Any], text, "its header")
        if about["version"] == FORMAT_VERSION:
            from_json(_FileMetadata, text, "its header")
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(_damage(path, error)) from error
    return file, about


def _damage(path: Path, cause: object) -> str:
    return (
        f"{path} is damaged ({cause}); delete it, and also the feature store if "
        "extract has begun one; its answers are then read again"
    )


def _has_needed_signals(
    about: Mapping[str, Any], fingerprint: Mapping[str, Any], config: StoreConfig
) -> bool:
    """Return whether a file's signals have all that is needed of each answer."""
    if about["version"] != FORMAT_VERSION:
        return False
    layers = config.hidden_layers
    n_entries = about["shapes"]["resid"][0] // 4 + 1
    wanted = set(range(n_entries) if layers is None else layers)
    return (
        about["fingerprint"] == dict(fingerprint)
        and about["types"] == _types(config)
        and about["answer_span"] == config.answer_span
        and about["hidden_spans"] in ("all", config.hidden_spans)
        and wanted <= set(about["hidden_layers"])
    )


class WrittenReader:
    """A `Reader` of answers whose signals were read while they were written.

    Other answers are read by another reader, which is opened when first needed.
    """

    def __init__(
        self,
        signals: Mapping[str, Any],
        about: Reader | WrittenSignals,
        open_reader: Callable[[], Reader],
    ) -> None:
        """Hold signals by `sequence_key`; `about` describes how they were read."""
        self._signals = signals
        self.hidden_layers = about.hidden_layers
        self.hidden_spans: Spans = about.hidden_spans
        self.fingerprint, self.shapes = about.fingerprint, about.shapes
        self._reader = functools.cache(open_reader)

    @classmethod
    def of(
        cls, reader: Reader, answers: Sequence[Answer], signals: Sequence[Any]
    ) -> Self:
        """Hold the signals of answers in memory, as `reader` read them."""
        sequences = map(sequence_of, answers)
        by_key = dict(zip(map(sequence_key, sequences), signals, strict=True))
        return cls(by_key, reader, lambda: reader)

    def is_written(self, sequence: TokenSequence) -> bool:
        """Return whether an answer was read while it was written."""
        return sequence_key(sequence) in self._signals

    def start(self, sequences: list[TokenSequence]) -> "_StartedBatch":
        """Begin to read the answers of a batch that have no signals, see `Reader`."""
        keys = list(map(sequence_key, sequences))
        pairs = zip(keys, sequences, strict=True)
        again = [sequence for key, sequence in pairs if key not in self._signals]
        started = self._reader().start(again) if again else None
        return _StartedBatch(self._signals, keys, started)


class _StartedBatch(NamedTuple):
    """A batch that has begun, some of whose answers are read again."""

    signals: Mapping[str, Any]
    keys: list[str]
    started: Any  # the batch of answers that are read again; None if there are none

    def result(self) -> Iterator[Any]:
        again = iter(() if self.started is None else self.started.result())
        for key in self.keys:
            yield self.signals[key] if key in self.signals else next(again)
