"""Maps from scores to calibrated probabilities, and measures of calibration.

The paper's tables use isotonic regression on validation scores (its controller
section). Probes use one of three strictly increasing maps, chosen by cross-fitted log
loss: isotonic steps give hundreds of answers the same P, and on 600 answers they cost
more log loss than they repair.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from beatrice.extract.records import Record

# The first two are not fitted here, but a saved probe may have them.
MapName = Literal["identity", "temperature", "platt", "beta", "centred", "isotonic"]
_SUREST = 1e-9  # a raw probability closer to 0 or 1 counts as this close
LEAST_TO_CHOOSE = 200  # fewest answers with which maps are compared
LEAST_OF_RARER = 20  # fewest right, and fewest wrong, answers with which they are
STANDARD_ERRORS = 2.0  # by which a simpler map may lose and still be chosen
_N_FOLDS = 10
_N_DRAWS = 1000  # draws of labels in `ece_by_chance`
_TIE = 0.02  # weight of the raw score in a centred map, which keeps answers distinct


class Calibrator(Record, frozen=True, kw_only=True):
    """A map from raw scores to P(correct): its name and a few numbers.

    With knots, increasing `scores` and non-decreasing `p_correct`, it interpolates
    linearly between them and is constant outside. Without, it maps a raw probability p
    in [0, 1] to sigmoid(a ln p - b ln(1 - p) + c) for `numbers` (a, b, c): (1, 1, 0) is
    the identity, and a = b affine in the logit. `msgspec.to_builtins` serialises it.
    """

    name: MapName
    numbers: tuple[float, float, float] = (1.0, 1.0, 0.0)
    scores: tuple[float, ...] = ()
    p_correct: tuple[float, ...] = ()

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return calibrated probabilities, float64 in the shape of `scores`."""
        if self.scores:
            return np.interp(scores, self.scores, self.p_correct)
        ends = np.clip(np.asarray(scores, np.float64), _SUREST, 1 - _SUREST)
        return _sigmoid(_terms(ends) @ np.array(self.numbers))


def _terms(p: np.ndarray) -> np.ndarray:
    """Return ln p, -ln(1 - p) and 1 of each probability, `[..., 3]`."""
    return np.stack([np.log(p), -np.log1p(-p), np.ones_like(p)], axis=-1)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


class Reliability(NamedTuple):
    """Equal-width bins of predicted probability."""

    edges: np.ndarray  # `[n_bins + 1]`, from 0 to 1
    confidence: np.ndarray  # `[n_bins]` mean prediction; NaN in an empty bin
    accuracy: np.ndarray  # `[n_bins]` share of correct answers; NaN in an empty bin
    n_examples: np.ndarray  # `[n_bins]`
    bins: np.ndarray  # `[n]` the bin of each example


def fit_calibrator(scores: np.ndarray, labels: np.ndarray) -> Calibrator:
    """Fit isotonic regression of correctness on scores, bounded away from certainty.

    A level that the regression fits to `k` right answers of `n` supports (k + 1/2) / (n
    + 1), the midpoint of Wilson's interval of one standard error. All probabilities are
    clipped to the range of these values, so that ten right answers of ten do not give
    1.0, while levels with hundreds of rows hardly change. The paper has no such bound.

    Args:
      scores: `[n_examples]`, higher means more likely correct.
      labels: `[n_examples]` bool.
    """
    # Imported here: it takes a second to load, and most stages fit no map.
    from sklearn.isotonic import IsotonicRegression

    scores = _finite(scores)
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    fitted = model.fit_transform(scores, np.asarray(labels, np.float64))
    supported = _supported_levels(fitted)[1]
    bounded = np.clip(model.y_thresholds_, supported.min(), supported.max())
    return Calibrator(
        name="isotonic",
        scores=tuple(model.X_thresholds_.tolist()),
        p_correct=tuple(bounded.tolist()),
    )


def _finite(scores: np.ndarray) -> np.ndarray:
    """Return scores as float64; check that there are any, and that all are finite."""
    scores = np.asarray(scores, np.float64)
    if not scores.size or not np.isfinite(scores).all():
        raise ValueError(
            f"calibration needs at least one score, all finite; got {scores.size}, of "
            f"which {int((~np.isfinite(scores)).sum())} are not finite"
        )
    return scores


def _supported_levels(fitted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return isotonic levels, the P that each supports, and the level of each row."""
    # Rounding may keep neighbours of equal share, such as 15 of 30 and 1 of 2, apart.
    values = np.unique(fitted)
    levels = values[np.diff(values, prepend=-1.0) > 1e-12]
    level_of = np.searchsorted(levels, fitted, "right") - 1
    n = np.bincount(level_of)
    return levels, (levels * n + 0.5) / (n + 1.0), level_of


def _fit_numbers(
    raw: np.ndarray, labels: np.ndarray, name: MapName, n_free: int
) -> Calibrator:
    """Fit a = b and c, with a normal prior around the identity, or a, b and c."""
    from scipy.optimize import minimize

    terms, labels = _terms(np.clip(raw, _SUREST, 1 - _SUREST)), labels.astype(float)
    spread = {2: [[1, 1, 0], [0, 0, 1]], 3: np.eye(3)}[n_free]
    design, start = terms @ np.transpose(spread), np.array([*[1.0] * (n_free - 1), 0.0])
    deviations = np.array([0.5, 1.0]) if n_free == 2 else np.full(n_free, np.inf)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        logits, drawn = design @ x, (x - start) / deviations
        value = np.logaddexp(0.0, logits).sum() - labels @ logits + drawn @ drawn / 2
        slope = design.T @ (_sigmoid(logits) - labels) + drawn / deviations
        return float(value), slope

    # Bounds: a slope of zero or less would make answers equal or reverse their order;
    # for perfectly ranked answers the slope would grow without limit, and P become 1.
    bounds = [*[(1e-2, 4.0)] * (n_free - 1), (None, None)]
    fitted = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B").x
    a, b, c = (float(x) for x in fitted @ np.array(spread, float))
    return Calibrator(name=name, numbers=(a, b, c))


def _fit_centred(raw: np.ndarray, labels: np.ndarray) -> Calibrator:
    """Fit centred isotonic regression (arXiv 1701.05964), with 2 % of the raw score."""
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(y_min=0.0, y_max=1.0).fit_transform(raw, labels)
    levels, supported, level_of = _supported_levels(fitted)
    means = np.bincount(level_of, raw) / np.bincount(level_of)
    knots = np.concatenate([[0.0], means, [1.0]])
    levels = np.clip(levels, supported.min(), supported.max())
    at = np.concatenate([levels[:1], levels, levels[-1:]])
    at = (1 - _TIE) * at + _TIE * knots
    inner = np.append(np.diff(knots) > 0, True)  # scores may be exactly 0 or 1
    return Calibrator(
        name="centred",
        scores=tuple(knots[inner].tolist()),
        p_correct=tuple(at[inner].tolist()),
    )


_Fit = Callable[[np.ndarray, np.ndarray], Calibrator]
# From simple to flexible. Platt's map with a prior around the identity hardly changes a
# calibrated score (.002 nats lost at 200 answers) and repairs others. With the identity
# itself as a candidate, overconfidence remained (.037 nats instead of .005).
MAPS: dict[MapName, _Fit] = {
    "platt": partial(_fit_numbers, name="platt", n_free=2),
    "beta": partial(_fit_numbers, name="beta", n_free=3),
    "centred": _fit_centred,
}


def log_losses(p_correct: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return each answer's log loss in nats, with P clipped to [.001, .999]."""
    p = np.clip(p_correct, 1e-3, 1 - 1e-3)
    return -np.log(np.where(labels, p, 1 - p))


def choose_calibrator(
    raw: np.ndarray, labels: np.ndarray, questions: Sequence[str] | np.ndarray
) -> Calibrator:
    """Fit the simplest map that is not clearly worse than the best.

    Maps are compared by the log loss of ten-fold cross-fitting over questions. Chosen
    is the first of `MAPS` that loses at most two standard errors of the paired
    difference, by question, to the map of least log loss: rows that were used to choose
    the scorer would otherwise prefer the most flexible map. With too few answers or
    questions to compare, it is the first map.

    Args:
      raw: `[n]` scores in [0, 1].
      labels: `[n]` bool, of both classes.
      questions: `[n]` names; answers to one question share a fold.
    """
    raw, labels = _finite(raw), np.asarray(labels, bool)
    n_rarer = min(labels.sum(), (~labels).sum())
    names, question = np.unique(questions, return_inverse=True)
    folds = folds_of(questions, _N_FOLDS)
    has_both = all(
        len({*labels[folds != fold].tolist()}) == 2 for fold in {*folds.tolist()}
    )
    is_few = len(raw) < LEAST_TO_CHOOSE or n_rarer < LEAST_OF_RARER
    if is_few or len(names) < _N_FOLDS or not has_both:
        return MAPS["platt"](raw, labels)
    losses = {name: np.zeros(len(raw)) for name in MAPS}
    for fold in np.unique(folds):
        unseen = folds == fold
        for name, fit in MAPS.items():
            p_correct = fit(raw[~unseen], labels[~unseen])(raw[unseen])
            losses[name][unseen] = log_losses(p_correct, labels[unseen])
    best = min(losses.values(), key=np.sum)

    def is_good(name: MapName) -> bool:  # True for the best, which loses nothing
        lost = np.bincount(question, losses[name] - best)
        return lost.sum() <= STANDARD_ERRORS * lost.std(ddof=1) * len(lost) ** 0.5

    return MAPS[next(filter(is_good, MAPS))](raw, labels)


def folds_of(ids: Sequence[str] | np.ndarray, n_folds: int) -> np.ndarray:
    """Return each question's fold by its id only, `[n]`; rewordings share a fold."""
    digests = (hashlib.sha256(str(x).encode()).digest() for x in ids)
    return np.array([int.from_bytes(x[:8], "big") % n_folds for x in digests], int)


def cross_fit(
    fit: Callable[..., Calibrator],
    scores: np.ndarray,
    labels: np.ndarray,
    questions: np.ndarray,
    folds: np.ndarray,
    n_folds: int,
) -> tuple[Calibrator, ...]:
    """Return for each fold the map that is fitted on the other folds.

    What is tuned on the P of rows that their map has seen is tuned on numbers that are
    too good; these maps have not seen their rows. `fit` takes scores, labels and
    questions, all `[n_examples]`; `folds` are numbers from 0, and one may be empty.
    """
    others = (folds != k for k in range(n_folds))
    return tuple(fit(scores[x], labels[x], questions[x]) for x in others)


def brier(p_correct: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean squared error of probabilities, in [0, 1]; NaN without data."""
    if not len(labels):
        return float("nan")
    return float(np.mean(np.square(np.asarray(p_correct) - np.asarray(labels))))


N_BINS = 10  # equal-width bins in every calibration error and diagram


def reliability(p_correct: np.ndarray, labels: np.ndarray) -> Reliability:
    """Return mean prediction and accuracy in equal-width bins of probability."""
    p_correct, labels = np.asarray(p_correct, float), np.asarray(labels, float)
    edges = np.linspace(0.0, 1.0, N_BINS + 1)
    bins = np.clip(np.searchsorted(edges, p_correct, side="right") - 1, 0, N_BINS - 1)
    count = np.bincount(bins, minlength=N_BINS)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(bins, p_correct, N_BINS) / count
        accuracy = np.bincount(bins, labels, N_BINS) / count
    return Reliability(edges, confidence, accuracy, count, bins)


def ece(p_correct: np.ndarray, labels: np.ndarray) -> float:
    """Return expected calibration error in [0, 1], ten bins; NaN if empty or of NaN."""
    if not len(labels):
        return float("nan")
    bins = reliability(p_correct, labels)
    gap, n = np.abs(bins.confidence - bins.accuracy), bins.n_examples
    return float((gap * n)[n > 0].sum() / n.sum())


def ece_by_chance(p_correct: np.ndarray, questions: np.ndarray, seed: int = 0) -> float:
    """Return the 97.5 % quantile of the calibration error of perfectly calibrated P.

    Even then a finite sample has an error above zero. Labels are drawn from P; answers
    to one question share a random number, and so are right together if P allows.

    Args:
      p_correct: `[n]` probabilities, at least one.
      questions: `[n]` names.
      seed: seed of the draws.
    """
    rng = np.random.default_rng(seed)
    names, question = np.unique(questions, return_inverse=True)
    draws = (rng.random(len(names))[question] < p_correct for _ in range(_N_DRAWS))
    errors = [ece(p_correct, is_right) for is_right in draws]
    return float(np.quantile(errors, 0.975))
