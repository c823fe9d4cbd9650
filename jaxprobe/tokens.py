"""From token rows to padded spans: what the encoders read, out of the store.

Signals lie on disk as ragged rows; an encoder reads every span padded to one length.
Closed-book there are two spans, with context three; the answer is the last.
"""

from collections.abc import Callable, Iterator, Sequence
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
    assemble,
    check_width,
    span_lengths,
    standardizer_of,
    used_spans,
)
from beatrice.jaxprobe.stored import StoredTokens, moved


class FamilyTokens(NamedTuple):
    """The same signals with the families apart, as the encoders read them.

    The spans lie one after another, so that a family is gathered and projected in one
    piece; tokens come before examples (see `jaxprobe.encoder` for the reason).
    """

    # Per family `[n_tokens, n_examples, d_family]`, where `n_tokens` is the sum of the
    # spans' widths: float32, standardised, or as they are stored.
    tokens: tuple[Any, ...]
    masks: tuple[Any, ...]  # per span `[n_span_tokens, n_examples]` bool

    @property
    def n_examples(self) -> int:
        """How many answers there are."""
        return self.masks[0].shape[1]

    @property
    def span_slices(self) -> tuple[slice, ...]:
        """Where each span lies among the `n_tokens` positions."""
        stops = np.cumsum([mask.shape[0] for mask in self.masks]).tolist()
        return tuple(
            slice(stop - mask.shape[0], stop)
            for stop, mask in zip(stops, self.masks, strict=True)
        )

    def of_examples(
        self, change: Callable[..., Any], *others: "FamilyTokens"
    ) -> "FamilyTokens":
        """Change all arrays, whose axis 1 is that of examples, along with others'."""

        def change_family(x: Any, *rest: Any) -> Any:
            if isinstance(x, StoredTokens):
                return x.of_examples(change, *rest)
            return change(x, *rest)

        tokens = map(change_family, self.tokens, *(other.tokens for other in others))
        masks = map(change, self.masks, *(other.masks for other in others))
        return FamilyTokens(tuple(tokens), tuple(masks))

    def take(self, rows: jax.Array) -> "FamilyTokens":
        """Select examples by index, `[n_rows]`."""
        take = partial(jnp.take, indices=rows, axis=1)
        return self.of_examples(partial(moved, take))


@partial(jax.jit, static_argnames="dims")
def split_families(
    features: Features, dims: FamilyDims, standardizer: Standardizer
) -> FamilyTokens:
    """Standardise and lay the families apart, one contiguous array for each.

    Apart, an encoder that does not read a family neither gathers nor multiplies it.
    Padding becomes exactly zero, and so do signals of a span that is not read: a store
    of the answer span alone and a live pass, which has all spans, give the same.
    """
    mean, std = (jnp.asarray(x)[None, None] for x in standardizer)
    spans = []
    for span, mask in zip(features.tokens, features.masks, strict=True):
        # The compiler divides by what many rows share in this way; `_standardized` too.
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
    """Leave out one span: the same signals, none of whose tokens there is real."""
    masks = list(features.masks)
    masks[span] = jnp.zeros_like(masks[span])
    return FamilyTokens(features.tokens, tuple(masks))


def zero_span(features: FamilyTokens, span: int) -> FamilyTokens:
    """Set one span's signals to zero; unlike `empty_span` its tokens stay."""
    at = features.span_slices[span]

    def zero(x: Any) -> Any:
        if not isinstance(x, StoredTokens):
            return jnp.asarray(x).at[at].set(0.0)
        is_kept = jnp.ones(x.shape[0], bool) if x.is_kept is None else x.is_kept
        return x._replace(is_kept=is_kept.at[at].set(False))

    return FamilyTokens(tuple(map(zero, features.tokens)), features.masks)


def stored_signals(store: FeatureStore) -> dict[str, Family]:
    """Return the families of a store without those of the scales of int8 codes."""
    families = store.spec.families
    scales = set(map(scale_name, families))
    return {name: x for name, x in families.items() if name not in scales}


def family_dims(store: FeatureStore) -> FamilyDims:
    """Return what an encoder reads of a store; of families by layer, one layer."""
    families = stored_signals(store)
    shapes = (x.shape[1:] if x.by_layer else x.shape for x in families.values())
    return FamilyDims(
        names=tuple(families),
        sizes=tuple(int(np.prod(shape)) for shape in shapes),
        spans=tuple(x.spans for x in families.values()),
    )


def stored_dtypes(store: FeatureStore) -> tuple[Dtype, ...]:
    """Return the types in which the families are stored, in their order."""
    return tuple(x.dtype for x in stored_signals(store).values())


def stored_lengths(store: FeatureStore) -> np.ndarray:
    """Return the tokens of the spans that a store has, `[n_rows, n_spans]`."""
    spans = store.spec.spans
    return span_lengths(spans, used_spans(spans))


def fit_standardizer(
    batches: Callable[[], Iterator[Features]], dims: FamilyDims
) -> Standardizer:
    """Fit the standardisation on examples that memory need not hold together.

    Families that a store keeps of the answer span alone are fitted on that span, in a
    second reading: the zeros that stand for the others would shrink the mean and widen
    the spread.
    """
    standardizer = standardizer_of(batches(), dims.slices)
    if not dims.of_answers:
        return standardizer
    answers = (Features(x.tokens[-1:], x.masks[-1:]) for x in batches())
    of_answers = standardizer_of(answers, dims.slices)
    for at in (dims.slices[f] for f in dims.of_answers):
        for all_spans, answer in zip(standardizer, of_answers, strict=True):
            all_spans[at] = answer[at]
    return standardizer


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
        at = layer if stored[name].by_layer else None
        return read_family(store, name, examples, layer=at, is_decoded=is_decoded)

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def read_tokens(
    store: FeatureStore,
    layer: int | None,
    examples: np.ndarray,
    n_tokens: Sequence[int],
    *,
    standardizer: Standardizer,
    device_dtypes: Sequence[Dtype],
) -> FamilyTokens:
    """Read the signals of stored examples as they lie on a device.

    Their values are those of `split_families` after `read_features`.

    Args:
      store: an extracted setting.
      layer: entry of the resid axis for the hidden family (0 is the embedding); None
        where no family is stored by layer.
      examples: `[n]` indices into the store.
      n_tokens: padded length per span.
      standardizer: fitted on training tokens.
      device_dtypes: of each family `float32`, standardised here, or the type in
        which it is stored, for `StoredTokens`.

    Returns:
      Arrays of the host.
    """
    families = read_families(store, layer, examples, is_decoded=False)
    spans = store.spec.spans[examples][:, list(used_spans(store.spec.spans))]
    first, lengths = spans[..., 0], spans[..., 1] - spans[..., 0]
    masks, positions = [], []
    for s, width in enumerate(n_tokens):
        check_width(lengths[:, s], width)
        position = np.arange(width)[:, None]
        masks.append(position < lengths[None, :, s])
        positions.append(first[None, :, s] + position)
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
            codes=_padded(codes, is_stored),
            scales=None if scalars is None else _padded(scalars, is_stored),
            mean=mean,
            std=std,
            is_kept=None if is_all else is_answer,
        )

    dims = family_dims(store)
    tokens = map(tokens_of, dims.names, dims.slices, device_dtypes)
    return FamilyTokens(tuple(tokens), tuple(masks))


def _padded(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Lay values out where the mask is True, in its order, and zeros elsewhere."""
    padded = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
    padded[mask] = values
    return padded


def _standardized(
    codes: np.ndarray, scales: np.ndarray | None, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Widen and standardise, bit by bit as `split_families`."""
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
    starts = np.cumsum(lengths) - lengths - spec.first_rows[chosen]
    rows = {
        name: _spread(ragged, starts, int(lengths.sum()))
        if spec.families[name].spans == "answer"
        else ragged.values
        for name, ragged in families.items()
    }
    read = used_spans(spec.spans) if read is None else read
    return assemble(rows, starts, spec.spans[chosen], read, n_tokens)


def _spread(answers: Ragged, starts: np.ndarray, n_rows: int) -> np.ndarray:
    """Return rows of answers at their tokens, among zeros, which no encoder sees."""
    values, lengths = answers.values, answers.lengths
    spread = np.zeros((n_rows, *values.shape[1:]), values.dtype)
    within = np.arange(len(values)) - np.repeat(answers.starts, lengths)
    spread[np.repeat(starts + answers.first_tokens, lengths) + within] = values
    return spread


SURPRISAL = 1  # column of a prob row: p(v), -log p(v), entropy, top p, margin


def answer_log_prob(prob_rows: np.ndarray, answer_span: tuple[int, int]) -> float:
    """Return the mean log-probability of an answer's tokens, in nats; at most 0.

    Of the prob family of one example, `[n_tokens, 5]`: the logarithm of the inverse
    perplexity, so higher means more likely correct. A row is of the token behind it, so
    that the span begins at the last prompt token; an empty one is read there.
    """
    start, stop = answer_span
    if not 0 <= start <= stop <= len(prob_rows) or stop == 0:
        raise ValueError(
            f"answer span [{start}, {stop}) is outside the {len(prob_rows)} tokens of "
            "this example"
        )
    start = min(start, stop - 1)
    surprisal = np.asarray(prob_rows[start:stop, SURPRISAL], dtype=np.float64)
    return -float(surprisal.mean())


def answer_log_probs(store: FeatureStore) -> np.ndarray:
    """Return the mean log-probability of every stored answer, `[n_rows]` nats."""
    ragged = read_family(store, "prob")
    spans = store.spec.spans[:, ANSWER] - ragged.first_tokens[:, None]
    spans[:, 0] -= first_step(store)  # a row is of the token behind it
    return np.array(
        [answer_log_prob(ragged.example(i), (a, b)) for i, (a, b) in enumerate(spans)]
    )


def first_step(store: FeatureStore) -> int:
    """Return the step of the answer span's first row; 1 where the span is literal."""
    return int(store.spec.fingerprint.get("answer_span") == "literal")


def mean_log_eigenvalue(states: np.ndarray, ridge: float = 1e-3) -> float:
    """Return (1/k) ln det(Z J Z' + ridge I) of `[k, d]`, high where they lie apart.

    J centres each state over its own dimensions; the products are not divided by their
    number. Of INSIDE (eq. 6, where the ridge is alpha) and of SeaKR.
    """
    wide = np.asarray(states, np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    # By the log-determinant, which is positive with a ridge.
    gram = centred @ centred.T + ridge * np.eye(len(wide))
    return float(np.linalg.slogdet(gram)[1] / len(wide))


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
