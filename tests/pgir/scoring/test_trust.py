"""When a score warns, and what it decides: scope, threshold, what is no number."""

import dataclasses

import jax
import numpy as np

from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.scope import Scope, Threshold
from beatrice.pgir.scoring.scorer import Scorer
from tests.pgir.small_detector import PASSAGE, QUESTION

ANSWER = "Guzolt Falls"


def with_detector(probed, **changes):
    """The same backbone with another detector."""
    return Scorer(probed.backbone, dataclasses.replace(probed.detector, **changes))


def scoped(probed, **changes):
    """A detector whose with-context signals lay between two bounds in training."""
    bank = probed.detector.banks["with_context"]
    total = bank.dims.total
    scope = Scope(
        low=np.full(total, -1e9, np.float32),
        high=np.full(total, 1e9, np.float32),
        limits=np.zeros(4, np.float32),
    )._replace(**changes)
    banks = {**probed.detector.banks}
    banks["with_context"] = dataclasses.replace(bank, scope=scope, lengths=(12, 30, 9))
    trained = dataclasses.replace(probed.trained, scripts=("LATIN",))
    return with_detector(probed, banks=banks, provenance=trained)


def test_an_answer_like_trainings_has_no_warning(probed):
    assert scoped(probed).score(QUESTION, ANSWER, PASSAGE).warnings == ()


def test_signals_outside_the_range_of_training_are_a_warning(probed):
    total = probed.detector.banks["with_context"].dims.total
    high = np.full(total, 1e9, np.float32)
    high[probed.detector.banks["with_context"].dims.slices[1]] = -1e9
    (warning,) = scoped(probed, high=high).score(QUESTION, ANSWER, PASSAGE).warnings
    assert "100.0% of the prob signals lie outside" in warning


def test_a_longer_context_than_any_in_training_is_a_warning(probed):
    (warning,) = scoped(probed).score(QUESTION, ANSWER, [PASSAGE] * 2).warnings
    assert "the context has 16 tokens, more than any" in warning


def test_another_script_is_a_warning(probed):
    score = scoped(probed).score(QUESTION + " где родился", ANSWER, PASSAGE)
    assert any("in a script" in w and "CYRILLIC" in w for w in score.warnings)


def test_of_signals_that_are_no_numbers_nothing_is_known(probed):
    head = probed.detector.heads["closed_book"]
    # Stands for a model whose states overflow: what comes of them is no number either.
    params = jax.tree.map(lambda x: np.full_like(x, np.nan), head.params)
    broken = dataclasses.replace(head, params=params)
    heads = {**probed.detector.heads, "closed_book": broken}
    score = with_detector(probed, heads=heads).score(QUESTION, ANSWER)
    assert (score.p_correct, score.decision) == (None, "unknown")
    assert "not finite" in score.reason


def with_threshold(probed, p_correct):
    """A detector that trusts closed-book answers from a probability on."""
    head = dataclasses.replace(
        probed.detector.heads["closed_book"],
        calibrator=Calibrator(np.array([0.0, 1.0]), np.array([0.5, 0.5])),
        threshold=Threshold(
            wanted=0.9,
            p_correct=p_correct,
            precision=0.9,
            low=0.8,
            high=0.95,
            coverage=0.3,
            n=100,
        ),
    )
    heads = {**probed.detector.heads, "closed_book": head}
    return with_detector(probed, heads=heads).score(QUESTION, ANSWER)


def test_an_answer_is_trusted_from_the_threshold_on(probed):
    assert with_threshold(probed, 0.5).decision == "trust"
    below = with_threshold(probed, 0.51)
    assert below.decision == "distrust" and "is below 0.5100" in below.reason
    assert below.p_correct == 0.5


def test_without_a_threshold_that_reaches_the_precision_nothing_is_known(probed):
    never = with_threshold(probed, None)
    assert never.decision == "unknown" and "no P reaches" in never.reason
    assert never.p_correct == 0.5


def test_without_any_threshold_nothing_is_known_but_the_number(probed):
    score = Scorer(probed.backbone, probed.detector).score(QUESTION, ANSWER)
    assert score.decision == "unknown" and "--precision" in score.reason
    assert 0 <= score.p_correct <= 1
