"""Where correctness can be read: attention heads, spans and tokens, layers.

Heads (paper, appendix G, figure of attention heads): integrated gradients over the
channels of attention, from a baseline with that family at its means, over 400 test
answers; a head's share is the absolute attribution of its channels. The largest heads
of any map beat random ones on the answers on which they were chosen, which is where the
paper measures them; here, they are measured on the other half.

Positions: integrated gradients show how much each token moves the logit. In addition, a
whole span is set to its means: the AUROC lost is what only that span contributes.

Layers: the layer sweep of the paper (figure of the same name), but over every labelled
answer of validation, test and held-out sets, and with intervals.
"""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, Subject, encoder
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import FAMILIES, LETTERS, FamilyDims
from beatrice.jaxprobe.linear import Pooled, fit_and_score
from beatrice.jaxprobe.tokens import mean_answer_states
from beatrice.selection.analysis import (
    EVERY_FAMILY,
    TOLERANCE,
    Deployed,
    PerChannel,
    Ratio,
    draw_rows,
    incompleteness,
    ratio_rows,
    row_of,
)

HEADS = "anatomy_heads"
N_ANSWERS = 400  # as in the paper
N_HEADS = 8  # likewise
N_DRAWS = 20  # random sets of equally many heads to compare with
_ATTENTION = FAMILIES.index("attn")
POSITIONS, SPANS_GONE = "anatomy_positions", "anatomy_spans"
N_POSITIONS = 8  # leading tokens of an answer with rows of their own
_FEWEST = 20  # answers that must reach a position for it to have a row
LAYERS = "anatomy_layers"


def error_rows(
    experiment: str, subject: Subject, metric: str, error: float, n: int, at: dict
) -> list[ResultRow]:
    """Return the row of incompleteness; if too large, also a null row of `metric`."""
    result = [row_of(experiment, subject, "incompleteness", error, n, at)]
    if error > TOLERANCE:
        reason = (
            f"the attributions miss the differences of the logits by {error:.1%}, "
            f"more than {TOLERANCE:.0%}"
        )
        result.append(row_of(experiment, subject, metric, None, n, at, reason=reason))
    return result


def attributed_rows(deployed: Deployed) -> np.ndarray:
    """Return the test rows used for attributions, in their original wording."""
    rows = deployed.rows
    where = rows.where("test")
    where = where[rows.variants[where] == "original"]
    return draw_rows(rows, where, N_ANSWERS, deployed.bootstrap.seed)


def head_sums(
    deployed: Deployed, name: str, where: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return how much each head of each layer moves the logit, and the error.

    The encoder must read attention. On rows `[n]` of the store, returns its absolute
    attributions `[n, n_layers, n_heads]` in logits, summed over seeds, tokens, spans
    and channels, and the incompleteness of the attributions.
    """
    shape = deployed.store.spec.families["attn"].shape
    sums = np.zeros((len(where), *shape[-2:]))
    added, wanted = [], []
    for indices, change, attributions, _ in deployed.attributions(
        name, where, (_ATTENTION,)
    ):
        attention = attributions[_ATTENTION]
        sizes = np.abs(attention).sum(axis=(0, 1))
        sums[indices] = sizes.reshape(len(indices), -1, *shape[-2:]).sum(axis=1)
        added.append(attention.sum(axis=(1, 3)).ravel())
        wanted.append(change.ravel())
    return sums, incompleteness(np.concatenate(added), np.concatenate(wanted))


def channels_of_heads(dims: FamilyDims, n_spans: int, cells: np.ndarray) -> PerChannel:
    """Return a mask of the channels of the heads in a mask `[n_layers, n_heads]`."""
    channels = [np.zeros((n_spans, size), bool) for size in dims.sizes]
    # The channels' axes: two other spans, two readings, then layers and heads.
    channels[_ATTENTION][:] = np.tile(
        cells.ravel(), dims.sizes[_ATTENTION] // cells.size
    )[None]
    return tuple(channels)


def heads(deployed: Deployed) -> list[ResultRow]:
    """Return the share of every head, and what the eight largest are worth."""
    where = attributed_rows(deployed)
    names = dict.fromkeys([*(n for n in deployed.queried if "A" in n), "A"])
    set_fields = deployed.set_fields(IN_DOMAIN, "test")
    result: list[ResultRow] = []
    for name in names if len(where) > 1 else ():
        sums, error = head_sums(deployed, name, where)
        of_error = HEADS, encoder(name), "share_of_top_heads", error, len(where)
        result += error_rows(*of_error, set_fields)
        if error <= TOLERANCE:
            result += _head_rows(deployed, name, where, sums, set_fields)
    return result


def _head_rows(
    deployed: Deployed, name: str, where: np.ndarray, sums: np.ndarray, set_fields: dict
) -> list[ResultRow]:
    subject = encoder(name)
    shape, n_cells = sums.shape[1:], sums[0].size
    totals = sums.sum(axis=(1, 2))
    ratios = [
        Ratio(subject._replace(layer=i), "share", sums[:, i, j], totals, {"head": j})
        for i, j in np.ndindex(shape)
    ]
    ids, config = deployed.rows.ids[where], deployed.bootstrap
    result = ratio_rows(HEADS, ratios, ids, set_fields, config)
    n_heads = min(N_HEADS, n_cells)
    half = len(where) // 2  # a random half: rows are in the order of a hash
    order = np.argsort(-sums[:half].sum(axis=0).ravel(), kind="stable")
    rng = np.random.default_rng(deployed.bootstrap.seed)
    drawn = [rng.choice(n_cells, n_heads, replace=False) for _ in range(N_DRAWS)]
    top, *others = (
        np.isin(np.arange(n_cells), flat).reshape(shape)
        for flat in (order[:n_heads], *drawn)
    )
    rest = where[half:]
    variants = [
        channels_of_heads(deployed.dims, deployed.n_spans, cells)
        for cells in (top & ~top, top, *others)  # the first masks no head
    ]
    (without,) = deployed.logits_without([name], rest, variants)
    moved = np.abs(without[1:] - without[:1]).mean(axis=1)  # [1 + n_draws, n]
    by_random, every = moved[1:].mean(axis=0), np.ones(len(rest))
    measured = sums[half:]
    measures = {
        "share_of_top_heads": (measured[:, top].sum(axis=1), measured.sum(axis=(1, 2))),
        "moved_by_top_heads": (moved[0], every),
        "moved_by_random_heads": (by_random, every),
        "moved_more_by_top_heads": (moved[0] - by_random, every),
    }
    ratios = [Ratio(subject, metric, *both) for metric, both in measures.items()]
    ids = deployed.rows.ids[rest]
    for row in ratio_rows(HEADS, ratios, ids, set_fields, config):
        if row.metric == "moved_more_by_top_heads" and len(set(ids)) < 6:
            # No sign test of five is significant, but resamples of them may all agree.
            low, high = min(row.ci_low or 0.0, 0.0), max(row.ci_high or 0.0, 0.0)
            result.append(msgspec.structs.replace(row, ci_low=low, ci_high=high))
        else:
            result.append(row)
    even = "even_share_of_top_heads", n_heads / n_cells, n_cells, set_fields
    return [*result, row_of(HEADS, subject, *even)]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAttribution:
    """How much tokens move an encoder's logit, summed over seeds."""

    families: np.ndarray  # `[n, n_spans, n_families]`, summed over each span's tokens
    answer: np.ndarray  # `[n, longest]`, each token of the answer; 0 beyond its end
    lengths: np.ndarray  # `[n, n_spans]`, in tokens
    error: float  # incompleteness

    @property
    def spans(self) -> np.ndarray:
        """Movement by each span's tokens, summed over families, `[n, n_spans]`."""
        return self.families.sum(axis=2)


def attribute_tokens(
    deployed: Deployed, name: str, where: np.ndarray
) -> TokenAttribution:
    """Return how much every token moves an encoder's logit.

    A token's movement is the absolute sum over each family's channels, added over
    families: what one family adds and another takes away counts as two movements.
    """
    n, n_spans = len(where), deployed.n_spans
    lengths = deployed.data.lengths[where]
    families = np.zeros((n, n_spans, len(FAMILIES)))
    answer = np.zeros((n, int(lengths[:, -1].max())))
    added, wanted = [], []
    for indices, change, attributions, tokens in deployed.attributions(name, where):
        per_family = np.stack([x.sum(axis=3) for x in attributions], axis=-1)
        added.append(per_family.sum(axis=(1, 3)).ravel())
        wanted.append(change.ravel())
        size = np.abs(per_family).sum(axis=0)  # [n_tokens, n, n_families]
        for span, at in enumerate(tokens.span_slices):
            families[indices, span] = size[at].sum(axis=0)
        of_answer = size[tokens.span_slices[-1]].sum(axis=2)
        answer[indices, : len(of_answer)] = of_answer.T[:, : answer.shape[1]]
    error = incompleteness(np.concatenate(added), np.concatenate(wanted))
    return TokenAttribution(families, answer, lengths, error)


def position_ratios(
    name: str, moved: TokenAttribution, spans: tuple[str, ...]
) -> list[Ratio]:
    """Return shares by span, by family within a span, and by position in the answer."""
    subject = encoder(name)
    total_moved, tokens = moved.spans.sum(axis=1), moved.lengths.sum(axis=1)
    ratios = []
    for i, span in enumerate(spans):
        at = {"span": span}
        ratios.append(Ratio(subject, "share", moved.spans[:, i], total_moved, at))
        ratios.append(Ratio(subject, "token_share", moved.lengths[:, i], tokens, at))
        for f, letter in enumerate(LETTERS):
            movement = moved.families[:, i, f]
            ratios.append(
                Ratio(subject, "share", movement, total_moved, at | {"family": letter})
            )
    length, total = moved.lengths[:, -1], moved.answer.sum(axis=1)
    # The share in an even map, weighted by each answer's movement like "share".
    even = total / np.maximum(length, 1)
    for k in range(min(N_POSITIONS, moved.answer.shape[1])):
        has = length > k
        if has.sum() >= _FEWEST:
            movement, at = moved.answer[:, k], {"position": k + 1}
            ratios.append(Ratio(subject, "share", movement * has, total * has, at))
            ratios.append(Ratio(subject, "even_share", even * has, total * has, at))
    last = moved.answer[np.arange(len(length)), np.maximum(length, 1) - 1]
    several = length > 1
    subject = subject._replace(kind="last")
    ratios.append(Ratio(subject, "share", last * several, total * several))
    ratios.append(Ratio(subject, "even_share", even * several, total * several))
    return ratios


def positions(deployed: Deployed) -> list[ResultRow]:
    """Return the shares of spans and positions from integrated gradients."""
    where = attributed_rows(deployed)
    if not len(where):
        return []
    moved = attribute_tokens(deployed, EVERY_FAMILY, where)
    set_fields = deployed.set_fields(IN_DOMAIN, "test")
    of_error = POSITIONS, encoder(EVERY_FAMILY), "share", moved.error, len(where)
    result = error_rows(*of_error, set_fields)
    if moved.error > TOLERANCE:
        return result
    ratios = position_ratios(EVERY_FAMILY, moved, deployed.spans)
    ids = deployed.rows.ids[where]
    return result + ratio_rows(POSITIONS, ratios, ids, set_fields, deployed.bootstrap)


def spans_gone(deployed: Deployed) -> list[ResultRow]:
    """Return the AUROC of encoders with a span set to its means, and the loss."""
    scored, pairs = [], []
    for name in deployed.queried:
        intact = encoder(name)
        scored.append(DetectorScores(name=intact, scores=deployed.intact(name)))
        for span in deployed.spans:
            without = intact._replace(span=span)
            scored.append(
                DetectorScores(name=without, scores=deployed.without(name, span))
            )
            pairs.append((without, intact))
    rows = deployed.rows.take(deployed.judged)
    return detection_rows(
        scored, rows, deployed.bootstrap, SPANS_GONE, {SPANS_GONE: pairs}
    )


def linear_scores(
    blocks: Sequence[np.ndarray],
    labels: np.ndarray,
    train: np.ndarray,
    valid: np.ndarray,
) -> np.ndarray:
    """Return the log-odds `[n]` of a logistic regression (see `fit_and_score`).

    All are NaN if training or validation rows have only one class. Blocks are scaled,
    so that five probabilities count as much as thousands of hidden states.
    """
    if any(len(set(labels[split].tolist())) < 2 for split in (train, valid)):
        return np.full(len(labels), np.nan)
    return fit_and_score(blocks, labels, train, valid)[0]


def pooled_signals(deployed: Deployed, where: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the features that regressions read, `[n, n_features]` per family."""
    labels = deployed.rows.labels[where]
    return Pooled.of(deployed.data.batches(where, n_copies=2), labels).families


def layers(deployed: Deployed) -> list[ResultRow]:
    """Return the AUROC of the mean answer state of every stored layer, on all sets."""
    rows, store = deployed.rows, deployed.store
    where = np.flatnonzero(rows.is_labelled)
    labelled = rows.take(where)
    train, valid = labelled.where("train"), labelled.where("validation")
    scored = []
    for layer in store.spec.hidden_layers:
        states = mean_answer_states(store, where, layer)
        scores = linear_scores([states], labelled.labels, train, valid)
        probe = Subject("layer_probe", layer=int(layer))
        scored.append(DetectorScores(name=probe, scores=scores[None]))
    result = detection_rows(scored, labelled, deployed.bootstrap, LAYERS)
    return [row for row in result if row.metric == "auroc"]
