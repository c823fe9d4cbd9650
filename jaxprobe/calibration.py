"""From a score to a calibrated probability.

For the paper's tables isotonic regression on validation scores (its controller
section). For probes one of three strictly increasing maps, chosen by cross-fitted log
loss: isotonic steps make hundreds of answers equal, and at 600 answers cost more log
loss than they repair. And the measures of how well probabilities are calibrated.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from beatrice.extract.records import Record

# Of the first two none is fitted; a saved probe may have them.
MapName = Literal["identity", "temperature", "platt", "beta", "centred", "isotonic"]
_SUREST = 1e-9  # a raw probability closer to 0 or 1 counts as this close
LEAST_TO_CHOOSE = 200  # answers from which on maps are compared
LEAST_OF_RARER = 20  # right, and wrong, answers from which on maps are compared
STANDARD_ERRORS = 2.0  # by which a simpler map may lose and still be taken
_N_FOLDS = 10
_N_DRAWS = 1000  # of right and wrong, by which chance is told
_TIE = 0.02  # share of the raw score in a centred map, which keeps answers apart


class Calibrator(Record, frozen=True, kw_only=True):
    """A map from raw scores to P(correct): its name and a few numbers.

    Of a raw probability p in [0, 1] it is sigmoid(a ln p - b ln(1 - p) + c), where (1,
    1, 0) is the identity and a = b an affine map of the logit; or the line through
    `n_knots`, increasing scores and non-decreasing P, constant outside of them, if
    there are any. `msgspec.to_builtins` is its plain form.
    """

    name: MapName
    numbers: tuple[float, float, float] = (1.0, 1.0, 0.0)
    scores: tuple[float, ...] = ()
    p_correct: tuple[float, ...] = ()

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Calibrated probability of being correct, float64 of the shape of `scores`."""
        if self.scores:
            return np.interp(scores, self.scores, self.p_correct)
        ends = np.clip(np.asarray(scores, np.float64), _SUREST, 1 - _SUREST)
        return _sigmoid(_terms(ends) @ np.array(self.numbers))


def _terms(p: np.ndarray) -> np.ndarray:
    """Return ln p, -ln(1 - p) and 1 of probabilities, `[..., 3]`."""
    return np.stack([np.log(p), -np.log1p(-p), np.ones_like(p)], axis=-1)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


class Reliability(NamedTuple):
    """Equal-width bins of predicted probability.

    Attributes:
      edges: `[n_bins + 1]`, from 0 to 1.
      confidence: `[n_bins]` mean prediction; NaN in an empty bin.
      accuracy: `[n_bins]` share of correct answers; NaN in an empty bin.
      n_examples: `[n_bins]`.
    """

    edges: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    n_examples: np.ndarray


def fit_calibrator(scores: np.ndarray, labels: np.ndarray) -> Calibrator:
    """Isotonic regression of correctness on scores, away from certainty.

    A level that the regression fits to `k` right ones of `n` is worth (k + 1/2) / (n +
    1), the midpoint of Wilson's interval of one standard error. No probability lies
    beyond the highest and the lowest of these: ten right answers among ten are no 1.0,
    and levels with hundreds of rows stay where they are (the paper has no such bound).

    Args:
      scores: `[n_examples]`, higher means more likely correct.
      labels: `[n_examples]` bool.
    """
    # Here, since it takes a second to load, and most stages fit no map.
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
    """Return scores as float64."""
    scores = np.asarray(scores, np.float64)
    if not scores.size or not np.isfinite(scores).all():
        raise ValueError(
            f"calibration needs finite scores; got {scores.size}, of which "
            f"{int((~np.isfinite(scores)).sum())} are not finite"
        )
    return scores


def _supported_levels(fitted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return isotonic levels, what each is worth, and the level of each row."""
    levels, level_of = np.unique(fitted, return_inverse=True)
    n = np.bincount(level_of)
    return levels, (levels * n + 0.5) / (n + 1.0), level_of


def _fit_numbers(
    raw: np.ndarray, labels: np.ndarray, name: MapName, n_free: int
) -> Calibrator:
    """Fit a = b and c (a normal prior draws them to the identity), or a, b and c."""
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

    # A slope of zero or less would make answers equal, or turn their order round; of
    # answers that are wholly in order it has no maximum, and P would be 1.
    bounds = [*[(1e-2, 4.0)] * (n_free - 1), (None, None)]
    fitted = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B").x
    a, b, c = (float(x) for x in fitted @ np.array(spread, float))
    return Calibrator(name=name, numbers=(a, b, c))


def _fit_centred(raw: np.ndarray, labels: np.ndarray) -> Calibrator:
    """Centred isotonic regression (arXiv 1701.05964), with a fiftieth of the score."""
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(y_min=0.0, y_max=1.0).fit_transform(raw, labels)
    levels, supported, level_of = _supported_levels(fitted)
    means = np.bincount(level_of, raw) / np.bincount(level_of)
    knots = np.concatenate([[0.0], means, [1.0]])
    levels = np.clip(levels, supported.min(), supported.max())
    at = np.concatenate([levels[:1], levels, levels[-1:]])
    at = (1 - _TIE) * at + _TIE * knots
    inner = np.append(np.diff(knots) > 0, True)  # an answer may lie at 0 or 1 itself
    return Calibrator(
        name="centred",
        scores=tuple(knots[inner].tolist()),
        p_correct=tuple(at[inner].tolist()),
    )


_Fit = Callable[[np.ndarray, np.ndarray], Calibrator]
# From simple to flexible. Platt's map, drawn to the identity, leaves a score that is
# calibrated nearly as it is (.002 nats lost at 200 answers) and repairs one that is
# not; with the identity itself among them, overconfidence stayed (.037 nats, not .005).
MAPS: dict[MapName, _Fit] = {
    "platt": partial(_fit_numbers, name="platt", n_free=2),
    "beta": partial(_fit_numbers, name="beta", n_free=3),
    "centred": _fit_centred,
}


def log_losses(p_correct: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Log loss of each answer in nats, no more than that of P .001 or .999."""
    p = np.clip(p_correct, 1e-3, 1 - 1e-3)
    return -np.log(np.where(labels, p, 1 - p))


def choose_calibrator(
    raw: np.ndarray, labels: np.ndarray, questions: Sequence[str] | np.ndarray
) -> Calibrator:
    """Fit the simplest map that is not clearly worse than the best.

    Every map is fitted on nine tenths of the questions and measured on the last, ten
    times over. Taken is the first of `MAPS` that loses at most two standard errors
    of the paired difference, by question, to the map of least log loss: rows that had a
    part in choosing the scorer would otherwise prefer the most flexible one. Where
    there are too few answers or questions to compare, it is the first.

    Args:
      raw: `[n]` scores in [0, 1].
      labels: `[n]` bool, of both classes.
      questions: `[n]` names; answers to one question are in one fold.
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

    def is_good(name: MapName) -> bool:  # as the best itself is, which loses nothing
        lost = np.bincount(question, losses[name] - best)
        return lost.sum() <= STANDARD_ERRORS * lost.std(ddof=1) * len(lost) ** 0.5

    return MAPS[next(filter(is_good, MAPS))](raw, labels)


def folds_of(ids: Sequence[str] | np.ndarray, n_folds: int) -> np.ndarray:
    """Put questions into folds by id alone, `[n]`: a rewording goes along."""
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
    """Return for every fold the map that was fitted on the other folds.

    What is searched on probabilities of rows that their own map has seen is searched
    on numbers that are too good; these have not. `fit` makes a map of scores, labels
    and questions, all `[n_examples]`; `folds` are numbers from 0, one may be empty.
    """
    others = (folds != k for k in range(n_folds))
    return tuple(fit(scores[x], labels[x], questions[x]) for x in others)


def brier(p_correct: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared difference of probability and outcome, in [0, 1]; NaN of nothing."""
    if not len(labels):
        return float("nan")
    return float(np.mean(np.square(np.asarray(p_correct) - np.asarray(labels))))


N_BINS = 10  # equal ones, of every calibration error and picture


def reliability(
    p_correct: np.ndarray, labels: np.ndarray, n_bins: int = N_BINS
) -> Reliability:
    """Mean prediction and accuracy per equal-width bin of predicted probability."""
    p_correct, labels = np.asarray(p_correct, float), np.asarray(labels, float)
    edges = np.linspace(0.0, 1.0, n_bins + 1)
    bins = np.clip(np.searchsorted(edges, p_correct, side="right") - 1, 0, n_bins - 1)
    count = np.bincount(bins, minlength=n_bins)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(bins, p_correct, n_bins) / count
        accuracy = np.bincount(bins, labels, n_bins) / count
    return Reliability(edges, confidence, accuracy, count)


def ece(p_correct: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error in ten bins, in [0, 1]; NaN of none or NaN."""
    if not len(labels):
        return float("nan")
    bins = reliability(p_correct, labels)
    gap, n = np.abs(bins.confidence - bins.accuracy), bins.n_examples
    return float((gap * n)[n > 0].sum() / n.sum())


def ece_by_chance(p_correct: np.ndarray, questions: np.ndarray, seed: int = 0) -> float:
    """Return what the calibration error stays below in 39 of 40 draws where P is right.

    The error of a finite sample is above zero whatever P is. Right and wrong are drawn
    from P itself; answers to one question go together, as far as their P allow.

    Args:
      p_correct: `[n]` probabilities, at least one.
      questions: `[n]` names.
      seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    names, question = np.unique(questions, return_inverse=True)
    draws = (rng.random(len(names))[question] < p_correct for _ in range(_N_DRAWS))
    errors = [ece(p_correct, is_right) for is_right in draws]
    return float(np.quantile(errors, 0.975))
