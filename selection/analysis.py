"""Input and output of every analysis, and ratios as rows with intervals.

An analysis reads the encoders and heads of a finished run and returns rows; the table
of all analyses is in `selection.anatomy`.

A signal is removed by replacing it with its mean over the evaluation data (paper,
appendix G). Means are per span, over all labelled test and held-out answers: each span
has its own convolution, and a mean over all spans would put the passages' mean into the
answer. The paper does not say which mean it uses.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.extract.records import IN_DOMAIN, Answer, Example, Record, Setting, Share
from beatrice.extract.run.rows import ResultRow, Subject
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.config import GridConfig
from beatrice.jaxprobe.detector import HeadName, SettingHead
from beatrice.jaxprobe.encoder import (
    COLLECTION,
    Encoder,
    Params,
    apply_module,
    linear_logits,
    materialize,
    pooled_signals,
)
from beatrice.jaxprobe.families import (
    FLOATS,
    LETTERS,
    N_FAMILIES,
    N_SUBSETS,
    SPAN_NAMES,
    SPANS,
    SUBSETS,
    FamilyDims,
    subset_index,
)
from beatrice.jaxprobe.grid import is_linear_only, member_logits
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    interval_of,
    resamples,
    wilson_interval,
)
from beatrice.jaxprobe.rows import StoreRows, TrainingSet, training_set
from beatrice.jaxprobe.tokens import FamilyTokens
from beatrice.selection.exhaustive import Ranking

EVERY_FAMILY = "HPRA"
# `[n_spans, d_family]` for each family: a value, or a flag, per channel of every span.
PerChannel = tuple[Any, ...]
_N_STEPS = (32, 64, 128, 256, 512, 1024)  # tried until attributions add up
_STEPS_AT_ONCE = 16  # steps per compiled call, whatever the total
TOLERANCE = 0.01  # largest incompleteness, relative to the attributed differences


@jax.jit
def replaced(
    features: FamilyTokens, means: PerChannel, gone: PerChannel
) -> FamilyTokens:
    """Replace real tokens' signals by means `[n_spans, d_family]` where `gone`."""
    lengths = np.array([len(mask) for mask in features.masks])
    real = jnp.concatenate(features.masks)

    def replace(tokens: jax.Array, mean: jax.Array, is_gone: jax.Array) -> jax.Array:
        spread = partial(
            jnp.repeat, repeats=lengths, axis=0, total_repeat_length=int(lengths.sum())
        )
        at = spread(is_gone)[:, None, :] & real[..., None]
        return jnp.where(at, spread(mean)[:, None, :], tokens)

    tokens = map(replace, features.tokens, means, gone)
    return FamilyTokens(tuple(tokens), features.masks)


@partial(jax.jit, static_argnames=("encoder",))
def path_gradients(
    params: Params,
    family_mask: jax.Array,
    start: FamilyTokens,
    end: FamilyTokens,
    nodes: jax.Array,
    weights: jax.Array,
    *,
    encoder: Encoder | None,
) -> tuple[jax.Array, ...]:
    """Return integrated gradients of the logits on the line from start to end.

    Sundararajan et al. 2017, by quadrature.

    Args:
      params: weights of one encoder.
      family_mask: `[n_families]` bool, the families that it reads.
      start: the baseline, with the same masks.
      end: the signals.
      nodes: `[n_steps]` in (0, 1).
      weights: `[n_steps]`, which sum to 1.
      encoder: the module; None if its network adds nothing to the linear part.

    Returns:
      For each family, attributions `[n_tokens, n_examples, d_family]` in logits; those
      of an example sum to the difference of its logits.
    """

    def total(tokens: tuple[jax.Array, ...]) -> jax.Array:
        features = FamilyTokens(tokens, end.masks)
        if encoder is None:
            return linear_logits(params[COLLECTION], pooled_signals(features)).sum()
        return apply_module(encoder, params, features, family_mask)[0].sum()

    def step(so_far, at):
        node, weight = at
        # Computed once, since a second rounding could change which token is largest.
        between = jax.tree.map(
            lambda a, b: materialize(a + node * (b - a), family_mask.any()),
            start.tokens,
            end.tokens,
        )
        gradient = jax.grad(total)(between)
        return jax.tree.map(lambda s, g: s + weight * g, so_far, gradient), None

    zero = jax.tree.map(jnp.zeros_like, end.tokens)
    means, _ = jax.lax.scan(step, zero, (nodes, weights))
    return jax.tree.map(lambda g, a, b: g * (b - a), means, start.tokens, end.tokens)


def quadrature(n_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Gauss-Legendre nodes in (0, 1) and their weights, `[n_steps]` each."""
    nodes, weights = np.polynomial.legendre.leggauss(n_steps)
    return ((nodes + 1) / 2).astype(np.float32), (weights / 2).astype(np.float32)


def attributed(
    params: Params,
    family_mask: jax.Array,
    start: FamilyTokens,
    end: FamilyTokens,
    encoder: Encoder,
    n: int,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return attributions that sum to the differences of logits within `TOLERANCE`.

    The number of steps is doubled until they do, at most to 1,024: encoders have kinks,
    for which the error falls in inverse proportion to the steps (.2 to 1 % at 64).
    Arguments are those of `path_gradients`. Attributions are `[n_tokens, n, d_family]`
    for each family, differences `[n]`, of the first `n` examples.
    """
    before, after = (
        member_logits([(params, family_mask)], at, encoder=encoder)[0, :n]
        for at in (start, end)
    )
    change = after - before
    network = None if is_linear_only(params) else encoder
    attributions: list[np.ndarray] = []
    for n_steps in _N_STEPS:
        steps = (x.reshape(-1, _STEPS_AT_ONCE) for x in quadrature(n_steps))
        gradients = (
            path_gradients(
                params, family_mask, start, end, *map(jnp.asarray, at), encoder=network
            )
            for at in zip(*steps, strict=True)
        )
        total = reduce(partial(jax.tree.map, jnp.add), gradients)
        attributions = [np.asarray(x)[:, :n] for x in total]
        added = np.sum([x.sum(axis=(0, 2)) for x in attributions], axis=0)
        if incompleteness(added, change) <= TOLERANCE:
            break
    return attributions, change


def of_families(dims: FamilyDims, n_spans: int, families: Sequence[int]) -> PerChannel:
    """Return a mask of all channels of some families."""
    return tuple(
        np.full((n_spans, size), f in families) for f, size in enumerate(dims.sizes)
    )


def of_span(dims: FamilyDims, n_spans: int, span: int) -> PerChannel:
    """Return a mask of all channels of one span."""
    at = (np.arange(n_spans) == span)[:, None]
    return tuple(np.repeat(at, size, axis=1) for size in dims.sizes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Deployed:
    """The encoders of a setting and the rows they score; values are computed once."""

    setting: Setting  # of the answers analysed
    store: FeatureStore
    rows: StoreRows
    layer: int  # from which the hidden family is read; an entry of the resid axis
    # Weights and outputs of all encoders on all rows; see `jaxprobe.train`.
    tree: Mapping[str, Any]
    config: GridConfig
    # Encoders of this pass selected by any search, named by their letters.
    selected: tuple[str, ...]
    # How intervals are computed; its seed also serves every other random draw.
    bootstrap: BootstrapConfig

    @property
    def n_seeds(self) -> int:
        """Number of training seeds of every encoder."""
        return self.config.train.n_seeds

    @cached_property
    def queried(self) -> tuple[str, ...]:
        """The encoders analysed: that of all families, and selected combinations.

        The paper queries the combination encoders that its search selected. Our search
        may have selected only single families, which have nothing to combine, while
        every run has the encoder of all four.
        """
        combined = (name for name in self.selected if len(name) > 1)
        return tuple(dict.fromkeys([EVERY_FAMILY, *combined]))

    @cached_property
    def judged(self) -> np.ndarray:
        """Labelled test and held-out rows, `[n]` indices into the store."""
        is_judged = np.isin(self.rows.splits, ("test", "ood")) & self.rows.is_labelled
        return np.flatnonzero(is_judged)

    @property
    def spans(self) -> tuple[str, ...]:
        """Names of the setting's spans, in order."""
        return tuple(SPAN_NAMES[span] for span in SPANS[self.setting])

    @property
    def n_spans(self) -> int:
        """Number of the setting's spans."""
        return len(SPANS[self.setting])

    def set_fields(self, dataset: str, split: str) -> dict[str, Any]:
        """Return the fields of a row that say on which set it was measured."""
        return {"setting": self.setting, "dataset": dataset, "split": split}

    @cached_property
    def logits(self) -> np.ndarray:
        """Logits of all encoders on every row, `[n_seeds, 15, n_rows]`."""
        logits = np.asarray(self.tree["outputs"]["logits"])
        return logits.reshape(self.n_seeds, N_SUBSETS, -1)

    def logits_of(self, name: str) -> np.ndarray:
        """Return the logits of one encoder on every row, `[n_seeds, n_rows]`."""
        return self.logits[:, subset_index(name)]

    def intact(self, name: str) -> np.ndarray:
        """Return the logits of one encoder on the judged rows, `[n_seeds, n]`."""
        return self.logits_of(name)[:, self.judged]

    def without(self, name: str, what: str) -> np.ndarray:
        """Return a queried encoder's logits on judged rows without a family or span."""
        variants = (*LETTERS, *self.spans)
        return self._without[self.queried.index(name), variants.index(what)]

    @cached_property
    def _without(self) -> np.ndarray:
        """Logits `[n_queried, n_families + n_spans, n_seeds, n_judged]`."""
        each = [of_families(self.dims, self.n_spans, (f,)) for f in range(N_FAMILIES)]
        each += [of_span(self.dims, self.n_spans, i) for i in range(self.n_spans)]
        return self.logits_without(self.queried, self.judged, each)

    @cached_property
    def data(self) -> TrainingSet:
        """The rows as the encoders read them."""
        # "streamed": training rows are read for their statistics, and not kept.
        return training_set(
            self.store,
            self.rows,
            layer=self.layer,
            n_batch=self.config.train.batch_size,
            streamed=True,
            device_dtypes=FLOATS,  # signals are replaced and differentiated
        )

    @property
    def dims(self) -> FamilyDims:
        """Number of channels of each family."""
        return self.data.dims

    @property
    def encoder(self) -> Encoder:
        """The module that all encoders share."""
        return Encoder(self.config.encoder, self.dims)

    def params(self, name: str) -> list[Params]:
        """Return the weights of an encoder for each seed."""
        indices = np.arange(self.n_seeds) * N_SUBSETS + subset_index(name)
        return [
            jax.tree.map(lambda x, i=i: np.asarray(x)[i], self.tree["params"])
            for i in indices
        ]

    @cached_property
    def means(self) -> PerChannel:
        """Mean of every span's channels over the labelled test and held-out rows."""
        sums = [np.zeros((self.n_spans, size)) for size in self.dims.sizes]
        counts = np.zeros((self.n_spans, 1))
        for indices, tokens in self.data.batches(self.judged):
            for span, at in enumerate(tokens.span_slices):
                real = np.asarray(tokens.masks[span])[:, : len(indices)]
                counts[span] += real.sum()
                for family, values in enumerate(tokens.tokens):
                    real_values = np.asarray(values)[at][:, : len(indices)][real]
                    sums[family][span] += real_values.sum(axis=0, dtype=np.float64)
        return tuple(
            (total / np.maximum(counts, 1)).astype(np.float32) for total in sums
        )

    def logits_without(
        self, names: Sequence[str], where: np.ndarray, each: Sequence[PerChannel]
    ) -> np.ndarray:
        """Return the logits of encoders after signals are replaced by their means.

        `names` are the encoders' letters, `where` `[n]` rows of the store, and `each`
        has a mask of the channels to replace for every variant. Logits are `[n_names,
        n_variants, n_seeds, n]`.
        """
        shape = (len(names), len(each), self.n_seeds, len(where))
        result = np.full(shape, np.nan, np.float32)
        every = [
            (params, jnp.asarray(SUBSETS[subset_index(name)]))
            for name in names
            for params in self.params(name)
        ]
        for indices, tokens in self.data.batches(where, n_copies=2):
            for v, gone in enumerate(each):
                changed = replaced(tokens, self.means, gone)
                logits = member_logits(every, changed, encoder=self.encoder)
                by_name = logits[:, : len(indices)].reshape(*result.shape[::2], -1)
                result[:, v, :, indices] = np.moveaxis(by_name, -1, 0)
        return result

    def attributions(
        self, name: str, where: np.ndarray, families: Sequence[int] = range(N_FAMILIES)
    ) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...], Any]]:
        """Yield integrated gradients batch by batch, from some families at their means.

        Yields:
          Indices into `where` `[n]`; differences of the logits `[n_seeds, n]`; for each
          family attributions `[n_seeds, n_tokens, n, d_family]`; the batch's tokens.
        """
        gone = of_families(self.dims, self.n_spans, families)
        mask = jnp.asarray(SUBSETS[subset_index(name)])
        for indices, tokens in self.data.batches(where, n_copies=8):
            start = replaced(tokens, self.means, gone)
            by_seed, differences = zip(
                *(
                    attributed(params, mask, start, tokens, self.encoder, len(indices))
                    for params in self.params(name)
                ),
                strict=True,
            )
            stacked = tuple(np.stack(seeds) for seeds in zip(*by_seed, strict=True))
            yield indices, np.stack(differences), stacked, tokens


def incompleteness(summed: np.ndarray, differences: np.ndarray) -> float:
    """Return the sum of absolute errors relative to that of absolute differences."""
    size = float(np.abs(differences).sum())
    return float(np.abs(summed - differences).sum()) / size if size else 0.0


Part = Literal["closed_book", "with_context", "rankings", "ablations", "other"]


class Search(NamedTuple):
    """The encoders selected by a search, and the scores of its heads."""

    reads: tuple[tuple[Setting, str], ...]  # pass and letters of every selected encoder
    # P(correct) `[n_seeds, n_rows]` by the head's name: "champion" and others.
    scores: Mapping[str, np.ndarray]


class QuestionTexts(NamedTuple):
    """Questions by id, and answers by (question, setting, variant)."""

    examples: Mapping[str, Example]
    answers: Mapping[tuple[str, str, str], Answer]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AnalysisInput:
    """Everything that an analysis may read."""

    settings: Mapping[Setting, Deployed]  # the encoders of every setting
    searches: Mapping[HeadName, Search]
    heads: Mapping[HeadName, SettingHead]
    # Reads the questions and answers, which most analyses do not need.
    read_texts: Callable[[], QuestionTexts]
    # Identity of each available part that some runs lack, by name.
    parts: Mapping[Part, str]
    rankings: Mapping[Setting, Ranking]  # of every set of three encoders, by setting
    # P(correct) `[n_seeds, n_rows]` from the search among encoders that do not read
    # hidden states, for each setting where it selected any.
    without_hidden: Mapping[Setting, np.ndarray]
    # The encoders of a run of another backbone, by setting.
    other: Mapping[Setting, Deployed]
    models: tuple[str, ...]  # names of this run's backbone and the other's
    folder: Path  # of retrained encoders, until all of them are finished


class CaseStudy(Record, frozen=True, kw_only=True):
    """A question that illustrates a kind of decision; `p_…` are calibrated."""

    dataset: str
    split: str
    kind: str
    question: str
    gold: str
    closed_book: str
    p_closed_book: Share
    is_closed_book_right: bool
    with_context: str
    p_with_context: Share
    is_with_context_right: bool


AnalysisOutput = Sequence[ResultRow | CaseStudy]  # rows, and cases for the report


def row_of(
    experiment: str,
    subject: Subject | str,
    metric: str,
    value: float | None,
    n: int,
    columns: Mapping[str, Any],
    interval: tuple[float | None, float | None] = (None, None),
    reason: str | None = None,
) -> ResultRow:
    """Return a result row; `columns` are its set's fields and any further ones."""
    low, high = interval
    fields = {**Subject.of(subject)._asdict(), **columns, "reason": reason}
    fields |= {"value": value, "ci_low": low, "ci_high": high, "n": n}
    return ResultRow(experiment=experiment, metric=metric, **fields)


def per_setting(
    rows_of: Callable[[Deployed], list[ResultRow]],
) -> Callable[[AnalysisInput], AnalysisOutput]:
    """Return an analysis that treats every setting separately."""
    return lambda inputs: [x for s in inputs.settings.values() for x in rows_of(s)]


def judged_sets(rows: StoreRows) -> list[tuple[str, str]]:
    """Return the test and held-out sets, several in-domain ones also together."""
    sets = [x for x in rows.evaluated_sets() if x[1] in ("test", "ood")]
    in_domain = [x for x in sets if x[1] == "test" and x[0] != IN_DOMAIN]
    return [x for x in sets if len(in_domain) > 1 or x not in in_domain]


def draw_rows(rows: StoreRows, where: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Draw `n` rows by a hash of their question, independently of their order."""

    def key(i: int) -> bytes:
        text = f"{seed} {rows.ids[i]} {rows.variants[i]}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    return np.array(sorted(where.tolist(), key=key)[:n], dtype=np.int64)


class Ratio(NamedTuple):
    """A share or a mean: the sum of `numerator` over the sum of `denominator`."""

    detector: Subject | str
    metric: str
    # `[..., n]`, bool if answers are counted; leading axes such as seeds are summed.
    numerator: np.ndarray
    denominator: np.ndarray  # the same; 0 for examples that do not count
    # Columns of the row besides those of its detector, such as `family`.
    columns: dict[str, Any] = {}

    @property
    def is_share(self) -> bool:
        """Whether answers are counted, rather than quantities averaged."""
        return self.numerator.dtype == bool


def ratio_rows(
    experiment: str,
    ratios: Sequence[Ratio],
    ids: np.ndarray,
    set_fields: dict[str, Any],
    config: BootstrapConfig,
    reason: str = "no answer of this kind",
) -> list[ResultRow]:
    """Return rows of ratios with 95 % intervals from resampled questions.

    Resamples of few answers, or of a share of 0 or 1, are all alike, so the interval of
    a share also covers Wilson's. That one counts questions, since seeds and wordings
    are no new evidence.

    Args:
      experiment: the rows' experiment.
      ratios: ratios over the same `n` examples.
      ids: `[n]` questions; two wordings of one are resampled together.
      set_fields: the rows' setting, dataset and split.
      config: of the resamples, which all ratios share.
      reason: why a ratio with a denominator of 0 is undefined.
    """
    if not ratios:
        return []
    numerators = _summed(ratio.numerator for ratio in ratios)
    denominators = _summed(ratio.denominator for ratio in ratios)
    draws = np.zeros((len(ratios), 0))
    if len(ids):
        with np.errstate(invalid="ignore", divide="ignore"):
            blocks = [
                (numerators @ w) / (denominators @ w) for w in resamples(ids, config)
            ]
        draws = np.concatenate(blocks, axis=1)
    result = []
    for ratio, numerator, denominator, ratio_draws in zip(
        ratios, numerators, denominators, draws, strict=True
    ):
        total = denominator.sum(dtype=np.float64)
        value, interval, missing = None, (None, None), reason
        if total:
            value = float(numerator.sum(dtype=np.float64) / total)
            low, high = interval_of(ratio_draws)
            ends = value, value
            if ratio.is_share:
                n_questions = len(np.unique(ids[denominator > 0]))
                ends = wilson_interval(min(value, 1.0), n_questions)
            # Single-precision sums can leave a share of 1 just outside its interval.
            interval, missing = (min(low, value, *ends), max(high, value, *ends)), None
        measured = experiment, ratio.detector, ratio.metric, value
        n_counted = int(np.count_nonzero(denominator))
        columns = ratio.columns | set_fields
        result.append(row_of(*measured, n_counted, columns, interval, missing))
    return result


def _summed(values: Iterable[np.ndarray]) -> np.ndarray:
    """Sum arrays `[..., n]` over all axes but the last; return `[n_values, n]`."""
    arrays = [np.asarray(x, np.float32) for x in values]
    return np.stack([x.sum(axis=tuple(range(x.ndim - 1))) for x in arrays])
