"""What a detector has seen, and from which probability on an answer is trusted.

A probability learned on one kind of question says little about another kind. So the
detector keeps where its signals lay, in which scripts its texts were written, and its P
of validation answers: these certify, for any precision that is asked for, from which P
on an answer is trusted and up to which it is distrusted.
"""

import bisect
import collections
import dataclasses
import functools
import math
import unicodedata
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np

from beatrice.jaxprobe.families import FamilyDims, Features

QUANTILES = (0.001, 0.999)  # of a channel over training tokens: its range
FLAGGED = 0.001  # share of validation answers that a family's limit would flag
# Read for the ranges, 16 of which lie beyond either end; and read at once.
MOST_TOKENS = 1 << 14
_CHANNELS_AT_ONCE = 512  # sorted together, to bound memory
_LEAST_SHARE = 0.001  # of the letters; a script with fewer was not learned


class Scope(NamedTuple):
    """Where the signals of one pass lay in training."""

    # `[d_total]` float32, the 0.1 % quantile of each channel over training tokens.
    low: np.ndarray
    high: np.ndarray  # `[d_total]` float32, the 99.9 % quantile
    # `[n_families]` float32: one validation answer in a thousand had a larger share of
    # a family's values beyond `low` and `high`.
    limits: np.ndarray


def _is_read(dims: FamilyDims, span: int, n_spans: int) -> np.ndarray:
    """Channels of a span that are signals, `[d_total]`; others are zeros of a store."""
    mask = np.ones(dims.total, bool)
    for f in dims.of_answers if span < n_spans - 1 else ():
        mask[dims.slices[f]] = False
    return mask


def share_outside(
    features: Features, dims: FamilyDims, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Return which share of each family's values lies beyond its channels' ranges.

    Features are as read, not standardised, `low` and `high` `[d_total]`. Returned are
    `[n_examples, n_families]` in [0, 1]; a value that is no number lies outside, and an
    answer without tokens has none there.
    """
    n_outside = np.zeros((features.n_examples, dims.n_families))
    n_values = np.zeros_like(n_outside)
    for span, real in enumerate(map(np.asarray, features.masks)):
        x = np.asarray(features.tokens[span])
        read, n_tokens = _is_read(dims, span, features.n_spans), real.sum(axis=1)
        outside = ~((low <= x) & (x <= high)) & real[..., None] & read
        for family, channels in enumerate(dims.slices):
            n_outside[:, family] += outside[..., channels].sum(axis=(1, 2))
            n_values[:, family] += n_tokens * int(read[channels].sum())
    return n_outside / np.maximum(n_values, 1)


def _some(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Take rows at even distances, of at most `MOST_TOKENS` tokens; at least one."""
    mean = max(1.0, float(lengths[rows].mean()))
    n = max(1, min(len(rows), int(MOST_TOKENS / mean)))
    return rows[np.linspace(0, len(rows) - 1, n).astype(np.int64)]


def fit_scope(
    read: Callable[[np.ndarray], Features],
    dims: FamilyDims,
    lengths: np.ndarray,
    train: np.ndarray,
    validation: np.ndarray,
) -> Scope:
    """Find the ranges on training answers, and the limits on validation answers.

    The ranges are found on answers at even distances, of some 16,000 tokens; the limits
    on all of validation, of which as many are in memory at once. `lengths` `[n_rows]`
    are the tokens that are read; of both kinds of rows there is at least one.
    """
    features = read(_some(train, lengths))
    low, high = np.zeros((2, dims.total), np.float32)
    for first in range(0, dims.total, _CHANNELS_AT_ONCE):
        channels = slice(first, first + _CHANNELS_AT_ONCE)
        values = []
        for span, real in enumerate(map(np.asarray, features.masks)):
            x = np.asarray(features.tokens[span])[real][:, channels]
            is_read = _is_read(dims, span, features.n_spans)[channels]
            values.append(np.where(is_read, x, np.nan))
        low[channels], high[channels] = np.nanquantile(
            np.concatenate(values), QUANTILES, axis=0
        )
    n_batches = -(-len(validation) * int(lengths[validation].max()) // MOST_TOKENS)
    shares = [
        share_outside(read(rows), dims, low, high)
        for rows in np.array_split(validation, min(max(1, n_batches), len(validation)))
    ]
    limits = np.quantile(np.concatenate(shares), 1 - FLAGGED, axis=0)
    return Scope(low, high, limits.astype(np.float32))


@functools.lru_cache(maxsize=1 << 14)
def _script(letter: str) -> str:
    """The script in a letter's Unicode name, as in "FULLWIDTH LATIN SMALL LETTER A"."""
    words = unicodedata.name(letter, "UNNAMED").split(" ")
    return words[words[0] in ("FULLWIDTH", "HALFWIDTH")]


def count_scripts(text: str) -> collections.Counter[str]:
    """Return how many letters of each script (which is no language) a text has."""
    if text.isascii():
        return collections.Counter({"LATIN": sum(map(str.isalpha, text))})
    return collections.Counter(_script(letter) for letter in text if letter.isalpha())


def scripts_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the scripts of at least one in a thousand letters, in order of names."""
    counts = sum(map(count_scripts, texts), collections.Counter())
    least = _LEAST_SHARE * counts.total()
    return tuple(sorted(s for s, n in counts.items() if n and n >= least))


LEAST_ANSWERS = 10  # right, and wrong, in training and in validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """On how many answers a head rests, and how sure it is that it can tell."""

    # Right and wrong answers that it was trained on, one a question each.
    train: tuple[int, int]
    validation: tuple[int, int]  # likewise those that it was calibrated on
    # 95 % interval of its validation AUROC (`metrics.auroc_interval`), of a head that
    # validation chose an interval of all that it was chosen among.
    auroc: tuple[float, float]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Say why its P is not to be trusted; empty where it may be.

        The best of fifteen encoders that know nothing has a median AUROC of .85 on 2
        right and 98 wrong answers, and of .67 on 10 and 90 (simulated).
        """
        doubts = [
            f"too few to trust: {n_right} right and {n_wrong} wrong {split} answers, "
            f"and {LEAST_ANSWERS} of each would do"
            for split, (n_right, n_wrong) in (
                ("training", self.train),
                ("validation", self.validation),
            )
            if min(n_right, n_wrong) < LEAST_ANSWERS
        ]
        low, high = self.auroc
        if not doubts and low <= 0.5:
            doubts.append(
                "the probe is not shown to be better than chance: validation AUROC "
                f"within [{low:.2f}, {high:.2f}]"
            )
        return tuple(doubts)


def n_of_classes(labels: np.ndarray, questions: np.ndarray) -> tuple[int, int]:
    """Return how many questions have a right answer, and how many a wrong one."""
    right, wrong = (len(np.unique(questions[x])) for x in (labels, ~labels))
    return right, wrong


CONFIDENCE = 0.9  # with which a threshold holds its precision
PRECISIONS = (0.7, 0.8, 0.9, 0.95)  # that cards and tables show
# Errors allowed where the sequence starts, if that is within the surer half of what can
# be decided; else fewer. In simulations two decide most: one error would end a shorter
# start, and a longer one begins beyond what can be certified.
_ERRORS_AT_START = (2, 1, 0)
_N_STEPS = 40  # of the sequence
Decision = Literal["trust", "distrust", "unknown"]


class Validation(NamedTuple):
    """The P of the answers that a head was calibrated on, one a question.

    They lie in order of the raw scores, lowest first: a map with steps gives many of
    them one P.
    """

    p_correct: np.ndarray  # `[n]` float64, calibrated
    labels: np.ndarray  # `[n]` bool, whether the answer is right

    @classmethod
    def of_answers(
        cls,
        scores: np.ndarray,
        p_correct: np.ndarray,
        labels: np.ndarray,
        questions: np.ndarray,
    ) -> "Validation":
        """Keep an answer to each question, drawn: others are no new evidence.

        The first would not do. Files often hold the right answer before the wrong ones.
        So equal scores lie in random order.
        """
        drawn = np.random.default_rng(0).permutation(len(questions))
        kept = drawn[np.sort(np.unique(questions[drawn], return_index=True)[1])]
        kept = kept[np.argsort(scores[kept], kind="stable")]
        return cls(np.asarray(p_correct, np.float64)[kept], labels[kept])

    def with_ties_against(self) -> "Validation":
        """Order answers by P, and those of one P so that least is certified.

        For answers without their raw scores: no order of these would certify less. Of
        one P the wrong come last, where `certify` begins to trust, and the right first.
        """
        order = np.lexsort((~self.labels, self.p_correct))
        return Validation(self.p_correct[order], self.labels[order])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
    """The P(correct) where a decision begins that is right as often as was asked.

    Answers from there on are trusted, or up to there distrusted. Of answers like those
    of validation, one a question, at least `wanted` are then decided rightly, with a
    confidence of 90 %: in nine of ten draws of the validation answers that is true. No
    answer is trusted that is more likely wrong than right, nor the other way round.
    """

    decision: Literal["trust", "distrust"]  # which begins there
    # Share of the trusted answers that shall be right, or of the distrusted that shall
    # be wrong.
    wanted: float
    # Least P of a trusted, greatest of a distrusted answer; None where no threshold
    # holds the wanted share.
    p_correct: float | None
    # Validation answers beyond it; those of the test that failed where none holds.
    n_decided: int
    n_errors: int  # of them, decided falsely
    low: float  # exact lower bound of the share, with the same confidence
    n: int  # validation answers that count, one a question
    # Why none is certified whatever validation shows, see `Evidence.doubts`.
    doubt: str | None = None

    @property
    def precision(self) -> float:
        """Share of the validation answers beyond it decided rightly; NaN of none."""
        return 1 - self.n_errors / self.n_decided if self.n_decided else float("nan")

    @property
    def coverage(self) -> float:
        """Share of the validation answers that it decides."""
        return self.n_decided / self.n if self.p_correct is not None else 0.0

    def holds(self, p_correct: float) -> bool:
        """Return whether an answer of this P lies beyond it."""
        if self.p_correct is None:
            return False
        if self.decision == "trust":
            return p_correct >= self.p_correct
        return p_correct <= self.p_correct

    def in_words(self) -> str:
        """Say what it is, in a sentence's part."""
        if self.doubt is not None:
            return f"no P to {self.decision}: {self.doubt}"
        trusts = self.decision == "trust"
        share = f"{self.wanted:g} are {'right' if trusts else 'wrong'}"
        promise = f"at least {share} with {CONFIDENCE:.0%} confidence"
        if self.wanted >= 1:
            return f"no P to {self.decision}, where {promise}: no number would show it"
        if self.p_correct is None:
            side = "above" if trusts else "below"
            seen = f"fewer of the {self.n} have a P {side} one half"
            if self.n_decided:
                which = (
                    "most probable are wrong" if trusts else "least probable are right"
                )
                seen = f"{self.n_errors} of the {self.n_decided} {which}"
            return (
                f"no P to {self.decision}, where {promise}: "
                f"{fewest_decided(self.wanted)} validation answers without an error "
                f"would show it, and {seen}"
            )
        return (
            f"{self.decision} P {'>=' if trusts else '<='} {self.p_correct:.4f}, where "
            f"{promise}: {self.n_errors} of {self.n_decided} such validation answers "
            f"are {'wrong' if trusts else 'right'} (precision {self.precision:.3f}, at "
            f"least {self.low:.3f}), at coverage {self.coverage:.3f} of {self.n}"
        )


class Thresholds(NamedTuple):
    """From which P on answers are trusted, and up to which they are distrusted."""

    trust: Threshold
    distrust: Threshold

    def decide(self, p_correct: float) -> tuple[Decision, str | None]:
        """Return what to do with an answer, and why it is not trusted."""
        if self.trust.holds(p_correct):
            return "trust", None
        if self.distrust.holds(p_correct):
            return "distrust", (
                f"P {p_correct:.4f} is at most {self.distrust.p_correct:.4f}; of all "
                f"answers up to there {self.distrust.wanted:g} are wrong"
            )
        above, below = self.trust.p_correct, self.distrust.p_correct
        if above is None:
            return "unknown", self.trust.doubt or self.trust.in_words()
        if below is None:
            return "unknown", (
                f"P {p_correct:.4f} is below {above:.4f}, from where "
                f"{self.trust.wanted:g} are right; {self.distrust.in_words()}"
            )
        return "unknown", (
            f"P {p_correct:.4f} lies between {below:.4f}, up to where "
            f"{self.distrust.wanted:g} are wrong, and {above:.4f}, from where as many "
            "are right"
        )


def _at_most(n_errors: int, n: int, share: float) -> float:
    """Return the binomial probability of at most `n_errors` of `n`, each of a share."""
    if share <= 0:
        return 1.0
    logs = math.log(share), math.log1p(-share)
    log_orders = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        for k in range(n_errors + 1)
    )
    return math.fsum(
        math.exp(log_order + k * logs[0] + (n - k) * logs[1])
        for k, log_order in enumerate(log_orders)
    )


def fewest_decided(wanted: float, n_errors: int = 0) -> int:
    """Return how many decided answers certify a precision below 1 with some errors."""

    def shows(n: int) -> bool:
        return _at_most(n_errors, n, 1 - wanted) <= 1 - CONFIDENCE

    most = n_errors + 1
    while not shows(most):
        most *= 2
    return bisect.bisect_left(range(most), True, lo=n_errors + 1, key=shows)


def _lower_bound(n_errors: int, n: int) -> float:
    """Return the least share of right ones that is not refuted (Clopper-Pearson)."""
    low, high = 0.0, 1.0  # of the share of errors
    if n_errors == n:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(n_errors, n, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return 1 - high


def certify(
    validation: Validation, wanted: float, decision: Literal["trust", "distrust"]
) -> Threshold:
    """Certify the threshold that decides most answers at a wanted precision.

    Fixed-sequence testing (Learn then Test, arXiv 2110.01052) of the 52, 67, ... most
    probable answers, the counts fixed beforehand: each is tested at the full level by
    the exact binomial bound (Clopper and Pearson), the first that fails ends the
    sequence, and the last that passed is the threshold. It lies just above the next
    answer, so that the trusted ones are a free draw of what lies beyond it. Answers of
    one P are tested in order of their raw scores: the labels have chosen where steps of
    an isotonic map end, and tests there would often pass by chance. To distrust is to
    trust that an answer is wrong, whose probability is 1 - P. Only answers beyond one
    half take part. A precision of 1 is never certified.
    """
    sign = 1 if decision == "trust" else -1  # of P: the surest decision comes first
    least = 0.5 if decision == "trust" else np.nextafter(-0.5, 0)
    p, errors = sign * validation.p_correct, validation.labels == (sign < 0)
    n, n_beyond = len(p), int((p >= least).sum())
    order = np.argsort(validation.p_correct, kind="stable")[::-sign]
    p = np.append(p[order], -np.inf)
    n_errors = np.append(0, np.cumsum(errors[order]))
    starts = [fewest_decided(wanted, e) for e in _ERRORS_AT_START if wanted < 1]
    start = next((m for m in starts if m <= n_beyond / 2), min(starts, default=n + 1))
    counts = [*range(start, n_beyond, max(1, n // _N_STEPS)), n_beyond]
    threshold, m, tested = None, 0, 0
    for count in counts if n_beyond >= start else ():
        if _at_most(int(n_errors[count]), count, 1 - wanted) > 1 - CONFIDENCE:
            if threshold is None:
                m = tested = count
            break
        # Equal probabilities are decided together, or not at all.
        n_above = int(np.searchsorted(-p[:-1], -p[count]))
        if n_above >= start:
            threshold = sign * float(max(np.nextafter(p[count], 1), least))
            m, tested = n_above, count
    return Threshold(
        decision=decision,
        wanted=wanted,
        p_correct=threshold,
        n_decided=m,
        n_errors=int(n_errors[m]),
        low=_lower_bound(int(n_errors[tested]), tested),
        n=n,
    )


def certified(validation: Validation, wanted: float) -> Thresholds:
    """Certify both thresholds at a wanted precision, see `certify`."""
    return Thresholds(
        certify(validation, wanted, "trust"), certify(validation, wanted, "distrust")
    )
