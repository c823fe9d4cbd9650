"""Where in the text the read-out comes from: by span, and by token of the answer.

Two ways. Integrated gradients of the encoder of all families, from all signals at their
means, say how much each token moves its logit. And a whole span is put at its means
inside the deployed encoder: the AUROC that is lost is what only that span has. The
paper's way, a span zeroed and everything trained again, is `evaluate --ablations`; a
head that reads the answer span's vector loses there by construction.
"""

import dataclasses

import numpy as np

from extract.records import IN_DOMAIN
from extract.run.results import ResultRow
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.subsets import FAMILIES
from selection.anatomy.analysis import (
    Analysis,
    Ratio,
    in_each_setting,
    ratio_rows,
    some_rows,
)
from selection.anatomy.encoders import (
    EVERY_FAMILY,
    TOLERANCE,
    Deployed,
    incompleteness,
)
from selection.anatomy.heads import incomplete, not_attributed, test_answers

EXPERIMENT, SPANS_GONE = "anatomy_positions", "anatomy_spans"
N_POSITIONS = 8  # first tokens of an answer that are told apart
_FEWEST = 20  # answers that have a position


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """How much tokens move a logit, summed over seeds.

    Attributes:
      families: `[n, n_spans, n_families]`, of each span's tokens together.
      answer: `[n, longest]` of the tokens of the answer, 0 beyond its end.
      lengths: `[n, n_spans]` tokens.
      error: incompleteness.
    """

    families: np.ndarray
    answer: np.ndarray
    lengths: np.ndarray
    error: float

    @property
    def spans(self) -> np.ndarray:
        """Of each span's tokens, `[n, n_spans]`; what families move is not summed."""
        return self.families.sum(axis=2)


def moved_by_tokens(deployed: Deployed, name: str, where: np.ndarray) -> Moved:
    """Return how much every token moves an encoder's logit.

    A token's part is the size of what each family's channels add there together,
    families apart: what one adds and another takes away is two movements.
    """
    n, n_spans = len(where), deployed.n_spans
    lengths = deployed.data.lengths[where]
    families = np.zeros((n, n_spans, len(FAMILIES)))
    answer = np.zeros((n, int(lengths[:, -1].max())))
    added, wanted = [], []
    for places, change, found, tokens in deployed.attributions(name, where):
        each = np.stack([own.sum(axis=3) for own in found], axis=-1)
        added.append(each.sum(axis=(1, 3)).ravel())
        wanted.append(change.ravel())
        size = np.abs(each).sum(axis=0)  # [n_tokens, n, n_families]
        for span, at in enumerate(tokens.span_slices):
            families[places, span] = size[at].sum(axis=0)
        own = size[tokens.span_slices[-1]].sum(axis=2)
        answer[places, : len(own)] = own.T[:, : answer.shape[1]]
    error = incompleteness(np.concatenate(added), np.concatenate(wanted))
    return Moved(families, answer, lengths, error)


def position_ratios(printed: str, moved: Moved, spans: tuple[str, ...]) -> list[Ratio]:
    """Return shares by span, by family within, and by position in the answer."""
    whole, tokens = moved.spans.sum(axis=1), moved.lengths.sum(axis=1)
    ratios = []
    for i, span in enumerate(spans):
        ratios.append(Ratio(printed, f"share in {span}", moved.spans[:, i], whole))
        own = moved.lengths[:, i]
        ratios.append(Ratio(printed, f"tokens in {span}", own, tokens))
        for f, family in enumerate(FAMILIES):
            part = moved.families[:, i, f]
            ratios.append(Ratio(printed, f"share in {span} by {family}", part, whole))
    length, total = moved.lengths[:, -1], moved.answer.sum(axis=1)
    for k in range(min(N_POSITIONS, moved.answer.shape[1])):
        has = length > k
        if has.sum() >= _FEWEST:
            part = moved.answer[:, k]
            metric = f"share at {k + 1}"
            ratios.append(Ratio(printed, metric, part * has, total * has))
            metric = f"even share at {k + 1}"
            even = has / np.maximum(length, 1)
            ratios.append(Ratio(printed, metric, even, has))
    last = moved.answer[np.arange(len(length)), np.maximum(length, 1) - 1]
    several = length > 1
    ratios.append(Ratio(printed, "share at last", last * several, total * several))
    even = several / np.maximum(length, 1)
    ratios.append(Ratio(printed, "even share at last", even, several))
    return ratios


def positions(deployed: Deployed) -> list[ResultRow]:
    """Return the shares of spans and positions, by integrated gradients."""
    where, printed = test_answers(deployed), deployed.printed(EVERY_FAMILY)
    if not len(where):
        return []
    moved = moved_by_tokens(deployed, EVERY_FAMILY, where)
    place = deployed.place(IN_DOMAIN, "test")
    made = [incomplete(EXPERIMENT, printed, moved.error, **place, n=len(where))]
    if moved.error > TOLERANCE:
        fields = dict(experiment=EXPERIMENT, detector=printed, metric="share in answer")
        reason = not_attributed(moved.error)
        row = ResultRow(**fields, **place, value=None, reason=reason, n=len(where))
        return [*made, row]
    ratios = position_ratios(printed, moved, deployed.spans)
    ids = deployed.rows.ids[where]
    return made + ratio_rows(EXPERIMENT, ratios, ids, place, deployed.bootstrap)


def spans_gone(deployed: Deployed) -> list[ResultRow]:
    """Return the AUROC of queried encoders with each span at its means, and the loss.

    The encoder's own logit, without a head.
    """
    scored, pairs = [], []
    for name in deployed.queried:
        printed = deployed.printed(name)
        scored.append(Scored(name=printed, scores=deployed.intact(name)))
        for span in deployed.spans:
            without = deployed.without(name, span)
            scored.append(Scored(name=f"{printed} without {span}", scores=without))
            pairs.append((f"{printed} without {span}", printed))
    rows = some_rows(deployed.rows, deployed.judged)
    return detection_rows(
        scored, rows, deployed.bootstrap, SPANS_GONE, {SPANS_GONE: pairs}
    )


ANALYSES = (
    Analysis("positions", in_each_setting(positions)),
    Analysis("spans", in_each_setting(spans_gone)),
)
