"""Read stored signals as the padded spans that encoders take.

Signals are stored as ragged rows; an encoder reads every span padded to one length.
There are two spans closed-book and three with context; the answer is the last.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.extract.store.spec import Dtype, Family, decode, scale_name
from beatrice.extract.store.store import FeatureStore, Ragged, read_family
from beatrice.jaxprobe.families import (
    ANSWER,
    FamilyDims,
    Features,
    Standardizer,
    slices_of,
    span_lengths,
    used_spans,
    widths_of,
)
from beatrice.jaxprobe.stored import StoredTokens, words_of


class FamilyTokens(NamedTuple):
    """Signals as encoders read them: one array per family.

    The spans are concatenated, so that a family is gathered and projected in one piece;
    tokens come before examples (see `jaxprobe.encoder` for the reason).
    """

    # Per family `[n_tokens, n_examples, d_family]`, where `n_tokens` is the sum of the
    # spans' widths: standardised float32, or `StoredTokens`.
    tokens: tuple[Any, ...]
    masks: tuple[Any, ...]  # per span `[n_span_tokens, n_examples]` bool

    @property
    def n_examples(self) -> int:
        """Number of answers."""
        return self.masks[0].shape[1]

    @property
    def n_tokens(self) -> int:
        """Number of positions of all padded spans."""
        return self.span_slices[-1].stop

    @property
    def span_slices(self) -> tuple[slice, ...]:
        """The slice of each span within the `n_tokens` positions."""
        return slices_of([mask.shape[0] for mask in self.masks])

    def of_examples(
        self, change: Callable[..., Any], *others: "FamilyTokens"
    ) -> "FamilyTokens":
        """Apply `change` to each array (axis 1 is examples), with those of `others`."""

        def change_family(x: Any, *rest: Any) -> Any:
            if isinstance(x, StoredTokens):
                return x.of_examples(change, *rest)
            return change(x, *rest)

        tokens = map(change_family, self.tokens, *(other.tokens for other in others))
        masks = map(change, self.masks, *(other.masks for other in others))
        return FamilyTokens(tuple(tokens), tuple(masks))

    def take(self, rows: jax.Array) -> "FamilyTokens":
        """Select examples by index, `[n_rows]`."""
        return self.of_examples(partial(jnp.take, indices=rows, axis=1))


@partial(jax.jit, static_argnames="dims")
def split_families(
    features: Features, dims: FamilyDims, standardizer: Standardizer
) -> FamilyTokens:
    """Standardise signals and split them into one contiguous array per family.

    An encoder that does not read a family then neither gathers nor multiplies it.
    Padding becomes exactly zero. So do, for a family of the answer only, the other
    spans: a store without them and a live pass, which has them, give the same.
    """
    mean, std = (jnp.asarray(x)[None, None] for x in standardizer)
    spans = []
    for span, mask in zip(features.tokens, features.masks, strict=True):
        # Compilers divide by what rows share in this way; so does `_standardized`.
        values = (span.astype(jnp.float32) - mean) * (1.0 / std)
        values = jnp.where(mask[..., None], values, 0.0)
        for f in dims.of_answers if len(spans) < features.n_spans - 1 else ():
            values = values.at[..., dims.slices[f]].set(0.0)
        spans.append(values.transpose(1, 0, 2))
    tokens = jnp.concatenate(spans)
    return FamilyTokens(
        tuple(tokens[..., s] for s in dims.slices),
        tuple(jnp.asarray(mask).T for mask in features.masks),
    )


def empty_span(features: FamilyTokens, span: int) -> FamilyTokens:
    """Leave out one span: return the signals with all of its tokens masked."""
    masks = list(features.masks)
    masks[span] = jnp.zeros_like(masks[span])
    return FamilyTokens(features.tokens, tuple(masks))


def zero_span(features: FamilyTokens, span: int) -> FamilyTokens:
    """Set one span's signals to zero; unlike in `empty_span` its tokens stay real."""
    at = features.span_slices[span]

    def zero(x: Any) -> Any:
        if not isinstance(x, StoredTokens):
            return jnp.asarray(x).at[at].set(0.0)
        is_kept = jnp.ones(x.shape[0], bool) if x.is_kept is None else x.is_kept
        return dataclasses.replace(x, is_kept=is_kept.at[at].set(False))

    return FamilyTokens(tuple(map(zero, features.tokens)), features.masks)


def stored_signals(store: FeatureStore) -> dict[str, Family]:
    """Return a store's families, without those that hold scales of int8 codes."""
    families = store.spec.families
    scales = set(map(scale_name, families))
    return {name: x for name, x in families.items() if name not in scales}


def family_dims(store: FeatureStore) -> FamilyDims:
    """Return the families that an encoder reads; of families by layer, one layer."""
    families = stored_signals(store)
    shapes = (x.shape[1:] if x.by_layer else x.shape for x in families.values())
    return FamilyDims(
        names=tuple(families),
        sizes=tuple(int(np.prod(shape)) for shape in shapes),
        spans=tuple(x.spans for x in families.values()),
    )


def stored_dtypes(store: FeatureStore) -> tuple[Dtype, ...]:
    """Return the stored types of the families, in their order."""
    return tuple(x.dtype for x in stored_signals(store).values())


def stored_lengths(store: FeatureStore) -> np.ndarray:
    """Return the span lengths of stored answers, `[n_rows, n_spans]`."""
    spans = store.spec.spans
    return span_lengths(spans, used_spans(spans))


def _read_families(
    store: FeatureStore, layer: int | None, examples: np.ndarray
) -> dict[str, Ragged]:
    """Read all families of stored examples, each in a thread of its own.

    Reading holds no lock, and with small chunks a single core cannot copy as fast as a
    disk delivers. int8 codes are as they are, with the families of their scales.
    """
    stored = store.spec.families

    def read(name: str) -> Ragged:
        at = layer if stored[name].by_layer else None
        return read_family(store, name, examples, layer=at, is_decoded=False)

    with ThreadPoolExecutor(len(stored)) as pool:
        return dict(zip(stored, pool.map(read, stored), strict=True))


def read_tokens(
    store: FeatureStore,
    layer: int | None,
    examples: np.ndarray,
    n_tokens: Sequence[int],
    read: Sequence[int] | None = None,
    *,
    standardizer: Standardizer,
    device_dtypes: Sequence[Dtype],
) -> FamilyTokens:
    """Read the signals of stored examples in the layout of the device, on the host.

    Their values are those of `split_families` after `read_features`, whose arguments
    are the same. `device_dtypes` are for each family `float32`, to standardise it here,
    or its stored type, for `StoredTokens`.
    """
    families = _read_families(store, layer, examples)
    read = used_spans(store.spec.spans) if read is None else read
    spans = store.spec.spans[examples][:, list(read)]
    masks, positions = [], []
    for s, width in enumerate(n_tokens):
        start, stop = spans[:, s].T
        position = np.arange(width)[:, None] + start
        if (longest := int((stop - start).max(initial=0))) > width:
            raise ValueError(
                f"a span has {longest} tokens, expected at most {width}; pad to a "
                "larger length"
            )
        masks.append(position < stop)
        positions.append(position)
    mask, position = np.concatenate(masks), np.concatenate(positions)
    is_answer = np.arange(len(mask)) >= len(mask) - n_tokens[-1]

    def tokens_of(name: str, at: slice, dtype: Dtype) -> np.ndarray | StoredTokens:
        ragged, scales = families[name], families.get(scale_name(name))
        is_all = store.spec.families[name].spans == "all"
        is_stored = mask if is_all else mask & is_answer[:, None]
        rows = (position + (ragged.starts - ragged.first_tokens))[is_stored]
        scalars = None if scales is None else scales.values.take(rows, axis=0)
        codes = ragged.values.reshape(len(ragged.values), -1).take(rows, axis=0)
        mean, std = standardizer.mean[at], standardizer.std[at]
        if dtype == "float32":
            return _padded(_standardized(codes, scalars, mean, std), is_stored)
        return StoredTokens(
            codes=_padded(words_of(codes), is_stored),
            dtype=dtype,
            scales=None if scalars is None else _padded(scalars, is_stored),
            mean=mean,
            std=std,
            is_kept=None if is_all else is_answer,
        )

    dims = family_dims(store)
    tokens = map(tokens_of, dims.names, dims.slices, device_dtypes)
    return FamilyTokens(tuple(tokens), tuple(masks))


def _padded(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Fill an array with `values` in order where the mask is True, else with zeros."""
    padded = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
    padded[mask] = values
    return padded


def _standardized(
    codes: np.ndarray, scales: np.ndarray | None, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Widen and standardise with exactly the result of `split_families`."""
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
    """Read the signals of stored examples as padded spans.

    Args:
      store: an extracted setting.
      layer: entry of the resid axis for the hidden family (0 is the embedding); None if
        no family is stored by layer.
      examples: `[n]` indices into the store, or None for all.
      n_tokens: padded length per span; None for the longest of each.
      read: spans to read, indices into `SPAN_NAMES`; None for those the store has.
    """
    spans, dims = store.spec.spans, family_dims(store)
    as_stored = (f(dims.total, np.float32) for f in (np.zeros, np.ones))
    some = np.arange(len(spans)) if examples is None else examples
    read = used_spans(spans) if read is None else read
    families = read_tokens(
        store,
        layer,
        some,
        widths_of(span_lengths(spans[some], read)) if n_tokens is None else n_tokens,
        read,
        standardizer=Standardizer(*as_stored),
        device_dtypes=("float32",) * dims.n_families,
    )
    tokens = (
        np.concatenate([np.swapaxes(x[at], 0, 1) for x in families.tokens], axis=2)
        for at in families.span_slices
    )
    masks = (np.ascontiguousarray(mask.T) for mask in families.masks)
    return Features(tuple(tokens), tuple(masks))


SURPRISAL = 1  # column of a prob row: p(v), -log p(v), entropy, top p, margin


def answer_log_prob(prob_rows: np.ndarray, answer_span: tuple[int, int]) -> float:
    """Return the mean log-probability of an answer's tokens, in nats; at most 0.

    This is the log of the inverse perplexity: higher means more likely correct. A row
    of the prob family `[n_tokens, 5]` of one example describes the token after it, so
    the span begins at the last prompt token; for an empty span that row is used.
    """
    start, stop = answer_span
    if not 0 <= start <= stop <= len(prob_rows) or stop == 0:
        raise ValueError(
            f"answer span [{start}, {stop}) must lie within the {len(prob_rows)} "
            "tokens of the example"
        )
    start = min(start, stop - 1)
    surprisal = np.asarray(prob_rows[start:stop, SURPRISAL], dtype=np.float64)
    return -float(surprisal.mean())


def answer_log_probs(store: FeatureStore) -> np.ndarray:
    """Return the mean log-probability of every stored answer, `[n_rows]` nats."""
    ragged = read_family(store, "prob")
    spans = store.spec.spans[:, ANSWER] - ragged.first_tokens[:, None]
    spans[:, 0] -= first_step(store)  # a row describes the token after it
    return np.array(
        [answer_log_prob(ragged.example(i), (a, b)) for i, (a, b) in enumerate(spans)]
    )


def first_step(store: FeatureStore) -> int:
    """Return the step of the answer span's first row; 1 if the span is literal."""
    return int(store.spec.fingerprint.get("answer_span") == "literal")


def mean_log_eigenvalue(states: np.ndarray, ridge: float = 1e-3) -> float:
    """Return (1/k) ln det(Z J Z' + ridge I) of states Z `[k, d]`, high if they differ.

    J centres each state over its own dimensions; the products are not divided by their
    number. From INSIDE (eq. 6, where the ridge is alpha) and SeaKR.
    """
    wide = np.asarray(states, np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    # With a ridge the determinant is positive.
    gram = centred @ centred.T + ridge * np.eye(len(wide))
    return float(np.linalg.slogdet(gram)[1] / len(wide))


def mean_answer_states(
    store: FeatureStore, examples: np.ndarray, layer: int, n_chunk: int = 1024
) -> np.ndarray:
    """Return the mean hidden state over the answer span, for the layer sweep.

    Only rows of answer spans are read, each once, `n_chunk` examples at a time.
    `examples` are `[n_examples]` indices into the store, `layer` an entry of the resid
    axis (0 is the embedding). Means are `[n_examples, d_model]` float32; zeros where
    the span is empty.
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
