"""From token rows to padded spans: what the encoders read, out of the store.

Signals lie on disk as ragged rows; an encoder reads every span padded to one length.
Closed-book there are two spans, with context three; the answer is the last.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from beatrice.extract.store.families import Dtype, Family, decode, scale_name
from beatrice.extract.store.store import FeatureStore, Ragged, read_family
from beatrice.jaxprobe.families import (
    ANSWER,
    FamilyDims,
    FamilyTokens,
    Features,
    Standardizer,
    assemble,
    check_width,
    span_lengths,
    standardizer_of,
    used_spans,
    widths_of,
)
from beatrice.jaxprobe.kernels.stored import StoredTokens


def stored_signals(store: FeatureStore) -> dict[str, Family]:
    """Return the families of a store without those of the scales of int8 codes."""
    families = store.spec.families
    scales = set(map(scale_name, families))
    return {name: own for name, own in families.items() if name not in scales}


def family_dims(store: FeatureStore) -> FamilyDims:
    """Return what an encoder reads of a store; of families by layer, one layer."""
    families = stored_signals(store)
    shapes = (own.shape[1:] if own.by_layer else own.shape for own in families.values())
    return FamilyDims(
        names=tuple(families),
        sizes=tuple(int(np.prod(shape)) for shape in shapes),
        spans=tuple(own.spans for own in families.values()),
    )


def stored_dtypes(store: FeatureStore) -> tuple[Dtype, ...]:
    """Return the types in which the families are stored, in their order."""
    return tuple(own.dtype for own in stored_signals(store).values())


def stored_lengths(store: FeatureStore) -> np.ndarray:
    """Return the tokens of the spans that a store has, `[n_rows, n_spans]`."""
    spans = store.spec.spans
    return span_lengths(spans, used_spans(spans))


def longest_spans(store: FeatureStore) -> tuple[int, ...]:
    """Return the padded length of each span of a store, at least one token."""
    return widths_of(stored_lengths(store))


def fit_reading(features: Features, dims: FamilyDims) -> Standardizer:
    """Fit the standardisation of what is read, see `fit_reading_of`."""
    return fit_reading_of(lambda: iter([features]), dims)


def fit_reading_of(
    parts: Callable[[], Iterator[Features]], dims: FamilyDims
) -> Standardizer:
    """Fit the standardisation on examples that memory need not hold together.

    Families that a store keeps of the answer span alone are fitted on that span: the
    zeros that stand for the others would shrink the mean and widen the spread.

    Args:
      parts: yields the examples, some at a time; called twice where a family is kept
        of the answer span alone.
      dims: of the store.
    """
    whole = standardizer_of(parts())
    if not dims.of_answers:
        return whole
    answers = (Features(x.tokens[-1:], x.masks[-1:]) for x in parts())
    of_answers = standardizer_of(answers)
    for at in (dims.slices[f] for f in dims.of_answers):
        for all_spans, answer in zip(whole, of_answers, strict=True):
            all_spans[at] = answer[at]
    return whole


def read_families(
    store: FeatureStore,
    layer: int | None,
    examples: np.ndarray | None = None,
    *,
    is_decoded: bool = True,
) -> dict[str, Ragged]:
    """Read all families of stored examples at once.

    Each in a thread of its own: reading holds no lock, and where chunks are small one
    core alone cannot copy as fast as a disk delivers.

    Args:
      store: an extracted setting.
      layer: entry of the resid axis, of families that are stored by layer.
      examples: `[n]` indices into the store, or None for all.
      is_decoded: False for int8 codes, and the families of their scales beside them.
    """
    stored = store.spec.families
    names = list(stored_signals(store) if is_decoded else stored)

    def read(name: str) -> Ragged:
        own = layer if stored[name].by_layer else None
        return read_family(store, name, examples, layer=own, is_decoded=is_decoded)

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def read_tokens(
    store: FeatureStore,
    layer: int | None,
    examples: np.ndarray,
    n_tokens: Sequence[int],
    *,
    standardizer: Standardizer,
    held_as: Sequence[Dtype],
) -> FamilyTokens:
    """Read the signals of stored examples as a device holds them.

    Their values are those of `split_families` after `read_features`.

    Args:
      store: an extracted setting.
      layer: entry of the resid axis for the hidden family (0 is the embedding); None
        where no family is stored by layer.
      examples: `[n]` indices into the store.
      n_tokens: padded length per span.
      standardizer: fitted on training tokens.
      held_as: of each family `float32`, which is standardised here, or the type in
        which it is stored, which is kept as `StoredTokens`.

    Returns:
      Arrays of the host.
    """
    families = read_families(store, layer, examples, is_decoded=False)
    spans = store.spec.spans[examples][:, list(used_spans(store.spec.spans))]
    first, lengths = spans[..., 0], spans[..., 1] - spans[..., 0]
    masks, places = [], []
    for s, width in enumerate(n_tokens):
        check_width(lengths[:, s], width)
        position = np.arange(width)[:, None]
        masks.append(position < lengths[None, :, s])
        places.append(first[None, :, s] + position)
    mask, place = np.concatenate(masks), np.concatenate(places)
    is_answer = np.arange(len(mask)) >= len(mask) - n_tokens[-1]

    def one(name: str, at: slice, dtype: Dtype) -> np.ndarray | StoredTokens:
        ragged, scales = families[name], families.get(scale_name(name))
        is_all = store.spec.families[name].spans == "all"
        own = mask if is_all else mask & is_answer[:, None]
        rows = (place + (ragged.starts - ragged.first_tokens))[own]
        scalars = None if scales is None else scales.values.take(rows, axis=0)
        codes = ragged.values.reshape(len(ragged.values), -1).take(rows, axis=0)
        mean, std = standardizer.mean[at], standardizer.std[at]
        if dtype == "float32":
            return _padded(_standardized(codes, scalars, mean, std), own)
        return StoredTokens(
            codes=_padded(codes, own),
            scales=None if scalars is None else _padded(scalars, own),
            mean=mean,
            std=std,
            is_kept=None if is_all else is_answer,
        )

    dims = family_dims(store)
    tokens = map(one, dims.names, dims.slices, held_as)
    return FamilyTokens(tuple(tokens), tuple(masks))


def _padded(values: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Lay values out where `own` is True, in its order, and zeros elsewhere."""
    found = np.zeros((*own.shape, *values.shape[1:]), values.dtype)
    found[own] = values
    return found


def _standardized(
    codes: np.ndarray, scales: np.ndarray | None, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Widen and standardise, bit by bit as `standardize_span`."""
    values = codes.astype(np.float32) if scales is None else decode(codes, scales)
    values -= mean
    values *= 1.0 / std
    return values


def read_features(
    store: FeatureStore,
    layer: int | None,
    examples: np.ndarray | None = None,
    n_tokens: Sequence[int] | None = None,
    read: Sequence[int] | None = None,
) -> Features:
    """Read the signals of stored examples as the encoders read them.

    Args:
      store: an extracted setting.
      layer: entry of the resid axis for the hidden family (0 is the embedding); None
        where no family is stored by layer.
      examples: `[n]` indices into the store, or None for all.
      n_tokens: padded length per span; None takes the longest of each.
      read: the spans, places among `SPAN_NAMES`; None takes those that the store has.
    """
    spec, families = store.spec, read_families(store, layer, examples)
    chosen = slice(None) if examples is None else examples
    lengths = spec.n_read[chosen]
    # The row of each example's token 0, or where it would be.
    starts = np.cumsum(lengths) - lengths - spec.firsts[chosen]
    rows = {
        name: _spread(ragged, starts, int(lengths.sum()))
        if spec.families[name].spans == "answer"
        else ragged.values
        for name, ragged in families.items()
    }
    read = used_spans(spec.spans) if read is None else read
    return assemble(rows, starts, spec.spans[chosen], read, n_tokens)


def _spread(kept: Ragged, starts: np.ndarray, n_rows: int) -> np.ndarray:
    """Return kept rows at the tokens they are of, among zeros.

    The zeros stand for states that nobody kept. An encoder never sees them: what it
    reads of those spans is zero after standardisation, see `split_families`.

    Args:
      kept: rows of the answer span.
      starts: as in `pad_span`.
      n_rows: of all tokens.
    """
    spread = np.zeros((n_rows, *kept.values.shape[1:]), kept.values.dtype)
    within = np.arange(len(kept.values)) - np.repeat(kept.starts, kept.lengths)
    first = np.repeat(starts + kept.first_tokens, kept.lengths)
    spread[first + within] = kept.values
    return spread


def mean_answer_states(
    store: FeatureStore, examples: np.ndarray, layer: int, n_chunk: int = 1024
) -> np.ndarray:
    """Return the mean hidden state over the answer span, for the layer sweep.

    Only rows of answer spans are read, once, a few examples at a time.

    Args:
      store: an extracted setting.
      examples: `[n_examples]` indices into the store.
      layer: entry of the resid axis (0 is the embedding).
      n_chunk: examples whose rows are in memory together.

    Returns:
      `[n_examples, d_model]` float32; zeros where the span is empty.
    """
    d_model = store.spec.families["hidden"].shape[1]
    means = np.zeros((len(examples), d_model), np.float32)
    for start in range(0, len(examples), n_chunk):
        chunk = examples[start : start + n_chunk]
        ragged = read_family(store, "hidden", chunk, layer=layer, span=ANSWER)
        some = np.flatnonzero(ragged.lengths)  # `reduceat` has no empty sums
        if len(some):
            rows = ragged.values.astype(np.float64)
            sums = np.add.reduceat(rows, ragged.starts[some], axis=0)
            means[start + some] = sums / ragged.lengths[some, None]
    return means
