"""Token signals of many answers, read by `LanguageModel.read` and used by `fit`."""

import contextlib
import copy
import itertools
import re
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import tensorstore as ts

from beatrice.extract.records import SETTINGS, Setting
from beatrice.extract.store.spec import Family, StoreSpec, scale_name
from beatrice.extract.store.store import (
    FeatureStore,
    as_url,
    create_store,
    open_kvstore,
    open_store,
    read_family,
    write_range,
)
from beatrice.pgir.arguments import argument_error, as_names, as_place

_N_SPANS = 3  # context, question, answer
_MEMORY = "memory://beatrice-signals-"
_NUMBERS = itertools.count()


def memory_url() -> str:
    """Return a new URL of a store in this process's memory."""
    return f"{_MEMORY}{next(_NUMBERS)}/"


@contextlib.contextmanager
def place_of(store: str | Path | None) -> Iterator[str | Path]:
    """Yield the place for signals; its memory is freed if the block fails."""
    url = memory_url() if store is None else as_place(store, "store")
    try:
        yield url
    except BaseException:
        if store is None:
            _forget(str(url))
        raise


def _forget(url: str) -> None:
    """Free the memory of a store; a forked process has only a copy, which it leaves."""
    with contextlib.suppress(RuntimeError):
        open_kvstore(url).delete_range(ts.KvStore.KeyRange()).result()


class Signals:
    """The token signals of many answers in one setting, in memory or in a store.

    An integer index returns one answer's arrays by family. A slice, or an array of
    indices or booleans, returns the signals of those answers without copying.
    """

    def __init__(
        self,
        store: FeatureStore | str | Path,
        indices: np.ndarray | None = None,
        *,
        model: Any = None,
    ) -> None:
        """Wrap a feature store.

        Args:
          store: an open feature store, or its folder or URL.
          indices: `[n]` indices of the answers to use, in this order; None uses all.
          model: the `LanguageModel` that they were read from, or None; a probe that
            is fitted on them then scores with it instead of loading a model.

        Raises:
          ValueError: there is no store, or it holds answers of both settings.
        """
        # A store given by its address belongs to someone else, who frees its memory.
        is_owned = isinstance(store, FeatureStore) and indices is None
        if not isinstance(store, FeatureStore):
            store = open_store(as_place(store, "store"))
        settings = {key[1] for key in store.spec.keys if len(key) > 1}
        if settings - {*SETTINGS} or len(settings) != 1:
            raise ValueError(
                f"{store.url}: expected signals of answers of one setting, found "
                f"{', '.join(sorted(settings)) or 'none'}"
            )
        self.store, self.model = store, model
        n_stored = len(store.spec.keys)
        self.indices = np.arange(n_stored) if indices is None else np.asarray(indices)
        if is_owned and store.url.startswith(_MEMORY):
            weakref.finalize(store, _forget, store.url).atexit = False

    @classmethod
    def from_arrays(
        cls,
        families: Mapping[str, np.ndarray | Sequence[np.ndarray]],
        *,
        lengths: Sequence[int] | np.ndarray | None = None,
        spans: np.ndarray | None = None,
        ids: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        store: str | Path | None = None,
    ) -> "Signals":
        """Create signals from arrays of any families, under any names.

        Args:
          families: mapping from name to arrays; every family has the same answers and
            tokens. Either a list with one array `[n_tokens, d, …]` per answer, or a
            single array (or tensor, or data frame) `[n_rows, …]`: with `lengths` the
            answers' tokens end to end, without it one row per answer.
          lengths: `[n_answers]` number of tokens of each answer.
          spans: `[n_answers, 3, 2]` start and stop (exclusive) of context, question and
            answer among an answer's tokens; an empty span has start == stop. None
            assigns every token to the answer.
          ids: question ids, one per answer; None numbers the answers.
          layers: layer numbers, if the family "hidden" has a layer axis
            `[…, n_layers, d_model]` from which `fit` chooses one layer.
          store: a folder or URL that holds only these signals; None keeps them in
            memory.

        Raises:
          ValueError: shapes do not match, values are not finite, or names repeat.
        """
        if not isinstance(families, Mapping) or not families:
            raise ValueError(
                "families: expected a mapping from names to arrays, such as "
                f"{{'hidden': …, 'attn': …}}, found {type(families).__name__}"
            )
        _check_names(families)
        counts = None if lengths is None else _whole_numbers(lengths, "lengths")
        rows = {name: _end_to_end(name, x, counts) for name, x in families.items()}
        n_tokens = _equal_lengths({name: n for name, (_, n) in rows.items()})
        values = {name: x for name, (x, _) in rows.items()}
        spans = _spans_of(spans, n_tokens)
        hidden_layers = _layers_of(values, layers)
        by_layer = {"hidden"} if hidden_layers else ()
        has_context = (spans[:, 0, 1] > spans[:, 0, 0]).any()
        fingerprint: dict[str, Any] = {"source": "arrays"}
        if store is not None:  # to recognise these values in it
            fingerprint["sums"] = {
                name: zlib.crc32(x.data) for name, x in values.items()
            }
        setting: Setting = "with_context" if has_context else "closed_book"
        n = len(n_tokens)
        names = range(n) if ids is None else _ids_of(ids, n)
        spec = StoreSpec(
            families={
                k: Family(shape=x.shape[1:], by_layer=k in by_layer)
                for k, x in values.items()
            },
            keys=tuple((str(name), setting, "original") for name in names),
            lengths=n_tokens,
            spans=spans,
            rows_per_shard=1 << max(0, int(n_tokens.sum() - 1).bit_length()),
            hidden_layers=hidden_layers,
            fingerprint=fingerprint,
        )
        with place_of(store) as url:
            opened = create_store(url, spec)
            write_range(opened, 0, values)  # one shard holds all rows
            return cls(opened)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what to pickle, including signals that are in memory.

        A model in memory is left out, because it cannot be sent to another process.
        """
        store, model = cast(Any, self.store), self.model
        if model is not None and not model.backbone.is_of_files:
            model = None
        if store.url.startswith(_MEMORY):
            memory = open_kvstore(store.url)
            keys = memory.list().result()
            store = {key: memory.read(key).result().value for key in keys}
        return _reopened, (store, self.indices, model)

    def __copy__(self) -> "Signals":
        """Return a copy that shares the store and the model."""
        return Signals(self.store, self.indices, model=self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Signals":
        """Return a deep copy; unlike pickling, this keeps a model in memory."""
        _, (store, indices, _) = self.__reduce__()
        return _reopened(store, indices, copy.deepcopy(self.model, memo))

    @cached_property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """Question id, setting and variant of each answer."""
        return tuple(self.store.spec.keys[i] for i in self.indices)

    @property
    def ids(self) -> tuple[str, ...]:
        """The question id of each answer."""
        return tuple(key[0] for key in self.keys)

    @property
    def setting(self) -> Setting:
        """Whether the answers were given closed-book or with context."""
        return cast(Setting, self.store.spec.keys[0][1])  # checked when opened

    @property
    def layers(self) -> tuple[int, ...]:
        """Entries of the resid axis with hidden states (0 is the embedding)."""
        return self.store.spec.hidden_layers

    @property
    def families(self) -> dict[str, tuple[int, ...]]:
        """The shape of one token's signals in each family."""
        families = self.store.spec.families
        scales = set(map(scale_name, families))
        return {name: f.shape for name, f in families.items() if name not in scales}

    @property
    def spans(self) -> np.ndarray:
        """`[n_answers, 3, 2]` start and exclusive stop of context, question, answer."""
        return self.store.spec.spans[self.indices]

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.indices)

    @overload
    def __getitem__(self, which: int) -> dict[str, np.ndarray]: ...
    @overload
    def __getitem__(self, which: slice | np.ndarray | Sequence[int]) -> "Signals": ...
    def __getitem__(self, which: Any) -> "dict[str, np.ndarray] | Signals":
        """Return one answer's arrays by family, or the signals of several answers."""
        if isinstance(which, bool | str):
            expected = "the place of an answer, a slice, or places or a mask of answers"
            raise TypeError(f"expected {expected}, found {which!r}")
        if not isinstance(which, int | np.integer):
            chosen = self.indices[which if isinstance(which, slice) else list(which)]
            if chosen.ndim != 1:
                kind = "an index with one axis, such as np.flatnonzero's"
                raise ValueError(f"expected {kind}, found shape {chosen.shape}")
            return Signals(self.store, chosen, model=self.model)
        at = [self.indices[which]]
        families = self.families
        return {name: read_family(self.store, name, at).values for name in families}

    def __repr__(self) -> str:
        """Show the number of answers, the setting, layers and families."""
        layers = ", ".join(map(str, self.layers))
        parts = [
            f"{len(self)} answer{'s' * (len(self) != 1)}",
            self.setting.replace("_", "-"),
            *([f"layers {layers}"] if len(self.layers) > 1 else []),
            *([f"layer {layers}"] if len(self.layers) == 1 else []),
            f"{len(self.families)} famil{'y' if len(self.families) == 1 else 'ies'}",
        ]
        is_in_memory = self.store.url.startswith(_MEMORY)
        where = "in memory" if is_in_memory else f"in {as_url(self.store.url)}"
        return f"Signals({', '.join(parts)}, {where})"


def _reopened(
    store: FeatureStore | Mapping[bytes, bytes], indices: np.ndarray, model: Any
) -> Signals:
    """Return signals of a store, or of the contents of a store in memory."""
    if isinstance(store, Mapping):
        url = memory_url()
        memory = open_kvstore(url)
        for key, content in store.items():
            memory.write(key, content).result()
        store = open_store(url)
    return Signals(store, model=model)[indices]


def _spans_of(spans: Any, n_tokens: np.ndarray) -> np.ndarray:
    """Return checked spans; by default every token belongs to the answer."""
    of_answers = np.zeros((len(n_tokens), _N_SPANS, 2), np.int64)
    of_answers[:, 2, 1] = n_tokens
    spans = of_answers if spans is None else _whole_numbers(spans, "spans", 3)
    if spans.shape != of_answers.shape:
        raise ValueError(
            f"spans: expected [n_answers, 3, 2], here {of_answers.shape}, found "
            f"{spans.shape}"
        )
    return spans


def _ids_of(ids: Any, n_answers: int) -> np.ndarray:
    """Return the answers' ids; check that each occurs once."""
    names = as_names(ids, "ids", n_answers)
    several, counts = np.unique(names, return_counts=True)
    if (counts > 1).any():
        first = str(several[np.argmax(counts > 1)])
        raise ValueError(
            f"ids: expected each id once, found {first!r} several times; number the "
            f"further answers to a question, such as {first + '-2'!r}"
        )
    return names


def _check_names(families: Mapping[str, Any]) -> None:
    """Check that every name can be a folder name and is not used by another family."""
    scales = {scale_name(str(name)) for name in families}
    for name in families:
        # With URL syntax in them, two names could mean the same place, or none.
        is_name = isinstance(name, str) and re.fullmatch(
            r"\w[^/\\?#%|\x00-\x1f]*", name
        )
        if not is_name or name in scales:
            raise ValueError(
                "families: expected names that begin with a letter, a digit or _, "
                "contain none of / \\ ? # % | and no line break, and do not add _scale "
                f"to another family's name, found {name!r}"
            )


def _whole_numbers(values: Any, name: str, n_axes: int = 1) -> np.ndarray:
    """Return non-negative whole numbers as int64."""
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        numbers = np.array(np.nan)
    is_whole = np.isfinite(numbers) & (numbers >= 0) & (numbers == np.floor(numbers))
    if numbers.ndim != n_axes or not is_whole.all():
        raise ValueError(
            f"{name}: expected whole numbers of at least 0, {n_axes}-dimensional, "
            f"found {values!r:.80}"
        )
    return numbers.astype(np.int64)


def _layers_of(
    values: Mapping[str, np.ndarray], layers: Sequence[int] | None
) -> tuple[int, ...]:
    """Return layer numbers; check that "hidden" has an entry for each."""
    if layers is None:
        return ()
    numbers = tuple(_whole_numbers(layers, "layers").tolist())
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"layers: expected each layer once, found {numbers}")
    shape = values["hidden"].shape if "hidden" in values else None
    if numbers and (shape is None or len(shape) < 3 or shape[-2] != len(numbers)):
        present = "no such family" if shape is None else f"the shape {shape}"
        raise ValueError(
            f"layers: expected a family 'hidden' of shape […, {len(numbers)}, "
            f"d_model], found {present}"
        )
    return numbers


def _end_to_end(
    name: str, given: Any, lengths: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return a family's rows `[n_rows, …]` float32, and the rows of each answer."""
    try:
        if _is_whole(given):
            values = _floats(given)
            counts = np.ones(len(values), np.int64) if lengths is None else lengths
        else:
            parts = [_floats(array) for array in given]
            if vectors := [n for n, part in enumerate(parts) if part.ndim == 1]:
                raise ValueError(
                    f"answer {vectors[0]} is a vector; if its entries are tokens of "
                    "one channel, pass it as [:, None]; if they are channels of one "
                    "token, pass np.stack of all answers"
                )
            values, counts = np.concatenate(parts), [len(array) for array in parts]
    except (TypeError, ValueError, RuntimeError) as error:  # also a deleted JAX array
        raise ValueError(f"family {name!r}: expected arrays of numbers: {error}") from (
            None
        )
    counts = np.asarray(counts, np.int64)
    if lengths is not None and not np.array_equal(counts, lengths):
        raise ValueError(
            f"family {name!r}: the lengths of its {len(counts)} arrays differ from "
            "the argument lengths; give a single array, or leave lengths out"
        )
    if (counts == 0).any():
        raise ValueError(
            f"family {name!r}: answer {int(np.argmin(counts))} has no tokens; leave "
            "out the answer and its label"
        )
    if values.ndim == 1:
        values = values[:, None]
    if counts.sum() != len(values) or not len(values):
        raise ValueError(
            f"family {name!r}: {len(values)} rows, but the lengths sum to "
            f"{counts.sum()}; give one row per token of every answer"
        )
    if not np.isfinite(values).all():
        n_bad = int((~np.isfinite(values)).sum())
        raise ValueError(f"family {name!r}: {n_bad} values are not finite in float32")
    return values, counts


def _is_whole(given: Any) -> bool:
    """Return whether it is a single array, tensor or frame, not a series of arrays."""
    if not hasattr(given, "__array__"):
        return False
    is_series = getattr(given, "ndim", 2) == 1 and len(given) > 0  # pyarrow has no ndim
    return not (is_series and np.ndim(next(iter(given))))


def _floats(array: Any) -> np.ndarray:
    """Return an array, or a tensor of any device and dtype, as C-ordered float32."""
    if hasattr(array, "detach") and not array.is_complex():
        array = array.detach().cpu().float()
    if np.ma.is_masked(array):
        raise ValueError("some are masked; leave out those tokens or features")
    array = np.asarray(array)
    if array.dtype.kind in "cmM":
        raise ValueError(f"{array.dtype} values are not real numbers; convert them")
    with np.errstate(over="ignore"):  # infinite values are counted later
        return np.asarray(array, np.float32, order="C")


def _equal_lengths(counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the number of tokens of each answer; check that all families agree."""
    first = next(iter(counts))
    for name, lengths in counts.items():
        if not np.array_equal(lengths, counts[first]):
            raise ValueError(
                f"families {first!r} and {name!r} have different numbers of tokens; "
                "give all families for the same tokens of the same answers"
            )
    return counts[first]


def by_setting(
    signals: "Signals | Mapping[Setting, Signals]",
) -> dict[Setting, Signals]:
    """Return signals as a mapping from their setting."""
    passes = signals
    if isinstance(signals, Signals):
        passes = {signals.setting: signals}
    if not isinstance(passes, Mapping) or not passes:
        raise argument_error(
            "signals", f"Signals, or a mapping from {' and '.join(SETTINGS)}", signals
        )
    for setting, item in passes.items():
        if not isinstance(item, Signals):
            raise argument_error(f"signals[{setting!r}]", "Signals", item)
        if item.setting != setting:
            raise ValueError(
                f"signals[{setting!r}]: these are signals of {item.setting} answers; "
                "give them under that name"
            )
    return {setting: passes[setting] for setting in SETTINGS if setting in passes}
