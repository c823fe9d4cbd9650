"""A threshold on answer perplexity in the place of the detector, in the same loop.

The nearest thing that needs no detector: the mean log-probability of the answer, which
generation gives for nothing. It is calibrated as the detector is, by an isotonic map
for each setting fitted on the same validation answers, so that drafts with and without
passages can be compared, and one threshold means one probability.
"""

from collections.abc import Callable, Mapping

import numpy as np

from beatrice.extract.records import Setting
from beatrice.extract.store.read import FeatureStore, read_family
from beatrice.jaxprobe.calibration import fit_calibrator
from beatrice.pgir.controllers.calls import Plan, Reply
from beatrice.pgir.controllers.policy import Judge
from beatrice.pgir.controllers.session import Session, Stores, rival

Map = Callable[[np.ndarray], np.ndarray]
_SURPRISAL = 1  # column of a prob row: -log p of the next token, in nats


def answer_log_probs(store: FeatureStore) -> np.ndarray:
    """Return each stored answer's mean log-probability in nats, `[n_rows]`.

    As `Reply.log_prob`: over its tokens and the stop token, if there was one.
    """
    ragged = read_family(store, "prob")
    means = []
    for i, (start, stop) in enumerate(store.spec.spans[:, 2].tolist()):
        first = int(ragged.first_tokens[i])
        # An answer without a token has an empty literal span; its end was emitted by
        # the token before.
        rows = ragged.example(i)[min(start, stop - 1) - first : stop - first]
        means.append(-float(np.mean(rows[:, _SURPRISAL], dtype=np.float64)))
    return np.array(means)


def perplexity_maps(stores: Stores) -> dict[Setting, Map]:
    """Return what makes a mean log-probability P(correct), of each setting.

    Args:
      stores: signals of the run's own answers, with their labels.
    """
    maps: dict[Setting, Map] = {}
    for setting, (store, rows) in stores.items():
        where = rows.where("validation")
        maps[setting] = fit_calibrator(
            answer_log_probs(store)[where], rows.labels[where]
        )
    return maps


def perplexity_judge(maps: Mapping[Setting, Map]) -> Judge:
    """Return a judge of drafts that asks for nothing: it reads how they were written.

    Args:
      maps: from a mean log-probability to P(correct), of each setting.
    """

    def judge(
        question: str, passages: tuple[int, ...], reply: Reply
    ) -> Plan[tuple[float, float]]:
        p_correct_of = maps["with_context" if passages else "closed_book"]
        return float(p_correct_of(np.float64(reply.log_prob))), reply.log_prob
        yield  # a plan without a call

    return judge


@rival("perplexity_rag", "", "stores")
def run_perplexity(session: Session) -> None:
    """Choose threshold and budget on validation, and run.

    Where the loop is run no pass of the detector is asked for, nor paid.
    """
    judge = perplexity_judge(perplexity_maps(session.stores()))
    session.run_loop("perplexity_rag", judge)
    if session.queries != "paper":
        session.deferred.append(
            lambda: session.enter_query("perplexity_rag", judge, show_all=False)
        )
