"""What a detector has seen in training, and the P at which it trusts an answer.

A probability learned on one kind of question says little about another kind. So a
detector keeps the ranges of its training signals, the scripts of its training texts,
and its P of validation answers. From the last it certifies, for any precision, the P
from which on answers are trusted and the P up to which they are distrusted.
"""

import bisect
import collections
import dataclasses
import functools
import math
import unicodedata
from collections.abc import Callable, Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Literal, NamedTuple

import numpy as np

from beatrice.jaxprobe.families import FamilyDims, Features

QUANTILES = (0.001, 0.999)  # range of a channel over training tokens
FLAGGED = 0.001  # share of validation answers that a family's limit would flag
# Most tokens to find ranges on (16 of them lie beyond either end), or to read at once.
MOST_TOKENS = 1 << 14
_CHANNELS_AT_ONCE = 512  # channels sorted together, to bound memory
_LEAST_SHARE = 0.001  # least share of letters for a script to count as learned


class Scope(NamedTuple):
    """The ranges of one pass's signals in training."""

    low: np.ndarray  # `[d_total]` float32, 0.1 % quantile over training tokens
    high: np.ndarray  # `[d_total]` float32, the 99.9 % quantile
    # `[n_families]` float32: the share of a family's values outside `low` and `high`
    # that one validation answer in a thousand exceeds.
    limits: np.ndarray


def _is_read(dims: FamilyDims, span: int, n_spans: int) -> np.ndarray:
    """Return which channels of a span are signals, not a store's zeros, `[d_total]`."""
    mask = np.ones(dims.total, bool)
    for f in dims.of_answers if span < n_spans - 1 else ():
        mask[dims.slices[f]] = False
    return mask


def share_outside(
    features: Features, dims: FamilyDims, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Return the share of each family's values outside its channels' ranges.

    Features are as read, not standardised; `low` and `high` are `[d_total]`. Shares are
    `[n_examples, n_families]` in [0, 1]. NaN counts as outside, and an answer without
    tokens has share 0.
    """
    # A token of every prompt may be an extreme itself; its values are rounded
    # differently in other batches.
    slack = np.float32(1e-5)
    low, high = low - slack * np.abs(low), high + slack * np.abs(high)
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


def _sampled_rows(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return evenly spaced rows of about `MOST_TOKENS` tokens at most; at least one."""
    mean = max(1.0, float(lengths[rows].mean()))
    n = max(1, min(len(rows), int(MOST_TOKENS / mean)))
    return rows[np.linspace(0, len(rows) - 1, n).astype(np.int64)]


def _parts(rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Split rows into parts of about `MOST_TOKENS` tokens at most, when padded."""
    n = -(-len(rows) * int(lengths[rows].max()) // MOST_TOKENS)
    return np.array_split(rows, min(max(1, n), len(rows)))


def fit_scope(
    read: Callable[[np.ndarray], Features],
    dims: FamilyDims,
    lengths: np.ndarray,
    train: np.ndarray,
    validation: np.ndarray,
) -> Scope:
    """Fit the ranges on training answers, and the limits on validation answers.

    The ranges use evenly spaced answers with some 16,000 tokens in all; the limits use
    all validation answers, about as many tokens at a time. `lengths` `[n_rows]` are the
    numbers of tokens read. There must be at least one row of each split.
    """
    tokens: list[np.ndarray] = []
    for rows in _parts(_sampled_rows(train, lengths), lengths):
        features = read(rows)
        for span, real in enumerate(map(np.asarray, features.masks)):
            x = np.asarray(features.tokens[span])[real]
            x[:, ~_is_read(dims, span, features.n_spans)] = np.nan
            tokens.append(x)
        del features  # else it would stay alive until the next one is read
    low, high = np.zeros((2, dims.total), np.float32)
    for first in range(0, dims.total, _CHANNELS_AT_ONCE):
        channels = slice(first, first + _CHANNELS_AT_ONCE)
        low[channels], high[channels] = np.nanquantile(
            np.concatenate([x[:, channels] for x in tokens]), QUANTILES, axis=0
        )
    shares = [
        share_outside(read(rows), dims, low, high)
        for rows in _parts(validation, lengths)
    ]
    limits = np.quantile(np.concatenate(shares), 1 - FLAGGED, axis=0)
    return Scope(low, high, limits.astype(np.float32))


@functools.lru_cache(maxsize=1 << 14)
def _script(letter: str) -> str:
    """Return the script in a Unicode name, as in "FULLWIDTH LATIN SMALL LETTER A"."""
    words = unicodedata.name(letter, "UNNAMED").split(" ")
    return words[words[0] in ("FULLWIDTH", "HALFWIDTH")]


def count_scripts(text: str) -> collections.Counter[str]:
    """Count a text's letters by script (not by language)."""
    if text.isascii():
        return collections.Counter({"LATIN": sum(map(str.isalpha, text))})
    return collections.Counter(_script(letter) for letter in text if letter.isalpha())


def scripts_of(texts: Iterable[str], words: str = "", n: int = 0) -> tuple[str, ...]:
    """Return the scripts of at least one letter in a thousand, sorted by name.

    The letters of `words` do not count `n` times, as for a template of `n` texts.
    """
    counts = sum(map(count_scripts, texts), collections.Counter())
    for script, n_letters in count_scripts(words).items():
        counts[script] -= n * n_letters
    least = _LEAST_SHARE * (+counts).total()
    return tuple(sorted(s for s, n in counts.items() if n > 0 and n >= least))


LEAST_ANSWERS = 10  # least right, and least wrong, answers in each split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """How many answers a head was fitted on, and how surely it beats chance."""

    train: tuple[int, int]  # questions with a right, and with a wrong, training answer
    validation: tuple[int, int]  # likewise of the answers that calibrated the head
    # 95 % interval of its validation AUROC (`metrics.auroc_interval`), simultaneous for
    # `n_tried` encoders.
    auroc: tuple[float, float]
    # From how many encoders validation chose the head's first one; 1 if the head was
    # fixed before. In simulations, what a search adds later breaks no promise
    # (docs/measurements.md). Formats up to 10 did not save it; they count as fixed.
    n_tried: int = 1

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons not to trust the head's P; empty if there are none.

        The best of fifteen encoders that know nothing has a median AUROC of .85 on 2
        right and 98 wrong answers, and of .67 on 10 and 90 (simulated).
        """
        doubts = [
            f"too few to trust: {n_right} right and {n_wrong} wrong {split} answers; "
            f"at least {LEAST_ANSWERS} of each are needed"
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


CONFIDENCE = 0.9  # that a threshold holds its precision
PRECISIONS = (0.7, 0.8, 0.9, 0.95)  # shown on cards and in tables
# Errors allowed in the first test of the sequence: the first of these with which it has
# at most half of the answers that may be decided. In simulations two decide most: with
# fewer, one error may end the sequence; with more, it begins past what is certifiable.
_ERRORS_AT_START = (2, 1, 0)
_N_STEPS = 40  # steps of the sequence
Decision = Literal["trust", "distrust", "unknown"]


class Validation(NamedTuple):
    """P of the answers that a head was calibrated on, one per question.

    Answers are in ascending order of raw scores; steps in a map give many the same P.
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
        """Keep one random answer per question, as further ones are no new evidence.

        Not the first one: files often hold the right answer before the wrong ones.
        Answers of equal score are in random order, for the same reason.
        """
        drawn = np.random.default_rng(0).permutation(len(questions))
        rows = drawn[np.sort(np.unique(questions[drawn], return_index=True)[1])]
        rows = rows[np.argsort(scores[rows], kind="stable")]
        return cls(np.asarray(p_correct, np.float64)[rows], labels[rows])

    def with_ties_against(self) -> "Validation":
        """Sort answers by P, and those of equal P so that the least is certified.

        For answers without raw scores. Among equal P wrong answers come last, where
        `certify` begins to trust, and right ones first, where it begins to distrust.
        """
        order = np.lexsort((~self.labels, self.p_correct))
        return Validation(self.p_correct[order], self.labels[order])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
    """The P(correct) at which a decision begins, with a certified precision.

    Answers of at least this P are trusted, or of at most this P distrusted. Among
    answers like those of validation, one per question, a share of at least `wanted` of
    these decisions is right, with 90 % confidence: in nine of ten draws of validation
    answers, also if these chose the head. No answer is trusted that is more likely
    wrong than right, nor the reverse.
    """

    decision: Literal["trust", "distrust"]  # what the threshold decides
    # Share of trusted answers to be right, or of distrusted answers to be wrong.
    wanted: float
    # Least P to trust, or greatest to distrust; None if none holds the wanted share.
    p_correct: float | None
    # Validation answers that it decides or, if `p_correct` is None, of the failed test.
    n_decided: int
    n_errors: int  # wrong decisions among them
    low: float  # exact lower bound of the share of right decisions, 90 % confidence
    n: int  # validation answers that count, one per question
    n_tried: int = 1  # encoders for which the confidence holds together
    # Why none is certified whatever validation shows, see `Evidence.doubts`.
    doubt: str | None = None

    @property
    def precision(self) -> float:
        """Share of right decisions on validation answers; NaN if none is decided."""
        return 1 - self.n_errors / self.n_decided if self.n_decided else float("nan")

    @property
    def coverage(self) -> float:
        """Share of the validation answers that are decided."""
        return self.n_decided / self.n if self.p_correct is not None else 0.0

    def holds(self, p_correct: float) -> bool:
        """Return whether the threshold decides an answer with this P."""
        if self.p_correct is None:
            return False
        if self.decision == "trust":
            return p_correct >= self.p_correct
        return p_correct <= self.p_correct

    @property
    def digits(self) -> str:
        """`p_correct` to four digits, rounded to the side of the decided answers."""
        assert self.p_correct is not None
        is_up = self.decision == "trust"
        return _digits(self.p_correct, ROUND_CEILING if is_up else ROUND_FLOOR)

    def in_words(self) -> str:
        """Describe the threshold in a phrase."""
        if self.doubt is not None:
            return f"no threshold to {self.decision}: {self.doubt}"
        trusts = self.decision == "trust"
        share = f"{self.wanted:g} is {'right' if trusts else 'wrong'}"
        promise = f"a share of at least {share} with {CONFIDENCE:.0%} confidence"
        if self.n_tried > 1:
            promise += f" after a choice among {self.n_tried} encoders"
        if self.wanted >= 1:
            return f"no threshold to {self.decision}: no data can show that {promise}"
        if self.p_correct is None:
            side = "above" if trusts else "below"
            seen = f"fewer of the {self.n} have P {side} one half"
            if self.n_decided:
                which = (
                    "most probable are wrong" if trusts else "least probable are right"
                )
                seen = f"{self.n_errors} of the {self.n_decided} {which}"
            return (
                f"no threshold to {self.decision} at which {promise}: "
                f"{fewest_decided(self.wanted, n_tried=self.n_tried)} validation "
                f"answers without an error would show that, but {seen}"
            )
        return (
            f"{self.decision} at P {'>=' if trusts else '<='} {self.digits}, "
            f"where {promise}: in validation {self.n_errors} of {self.n_decided} such "
            f"answers are {'wrong' if trusts else 'right'} (precision "
            f"{self.precision:.3f}, lower bound {self.low:.3f}; coverage "
            f"{self.coverage:.3f} of {self.n})"
        )


class Thresholds(NamedTuple):
    """The P from which on answers are trusted, and up to which they are distrusted."""

    trust: Threshold
    distrust: Threshold

    def decide(self, p_correct: float) -> tuple[Decision, str | None]:
        """Return the decision on an answer, and the reason if it is not "trust"."""
        if self.trust.holds(p_correct):
            return "trust", None
        # Rounded towards its side of a threshold, so that a reason never shows two
        # equal numbers: a threshold may lie just above the P of many answers.
        p = _digits(p_correct, ROUND_FLOOR)
        if self.distrust.holds(p_correct):
            return "distrust", (
                f"P {p} is at most {self.distrust.digits}, the threshold up to which "
                f"at least {self.distrust.wanted:g} of all answers are wrong"
            )
        if self.trust.p_correct is None:
            return "unknown", self.trust.doubt or self.trust.in_words()
        if self.distrust.p_correct is None:
            return "unknown", (
                f"P {p} is below {self.trust.digits}, the threshold from which at "
                f"least {self.trust.wanted:g} are right; {self.distrust.in_words()}"
            )
        if p == self.distrust.digits:
            p = _digits(p_correct, ROUND_CEILING)
        return "unknown", (
            f"P {p} lies between {self.distrust.digits}, up to which at least "
            f"{self.distrust.wanted:g} of all answers are wrong, and "
            f"{self.trust.digits}, from which at least as many are right"
        )


def _digits(p_correct: float, rounding: str) -> str:
    """Return a P to four digits; `rounding` is a mode of the module `decimal`."""
    exact = Decimal(str(p_correct))
    return f"{exact.quantize(Decimal('1e-4'), rounding):f}"


def _at_most(n_errors: int, n: int, share: float) -> float:
    """Return the binomial probability of at most `n_errors` in `n`, at rate `share`."""
    if not 0 < share < 1:  # a wanted precision of 1e-17 makes it 1
        return float(share <= 0 or n_errors >= n)
    logs = math.log(share), math.log1p(-share)
    log_orders = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        for k in range(n_errors + 1)
    )
    return math.fsum(
        math.exp(log_order + k * logs[0] + (n - k) * logs[1])
        for k, log_order in enumerate(log_orders)
    )


def _level(n_tried: int) -> float:
    """Return the level at which each of `n_tried` heads is tested (Bonferroni)."""
    return (1 - CONFIDENCE) / n_tried


def fewest_decided(wanted: float, n_errors: int = 0, n_tried: int = 1) -> int:
    """Return the fewest decisions that certify a precision below 1 with some errors."""

    def shows(n: int) -> bool:
        return _at_most(n_errors, n, 1 - wanted) <= _level(n_tried)

    most = n_errors + 1
    while not shows(most):
        most *= 2
    return bisect.bisect_left(range(most), True, lo=n_errors + 1, key=shows)


def _lower_bound(n_errors: int, n: int, n_tried: int) -> float:
    """Return the lower bound of the share of right decisions (Clopper-Pearson)."""
    low, high = 0.0, 1.0  # bounds of the share of errors
    if n_errors == n:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(n_errors, n, middle) > _level(n_tried):
            low = middle
        else:
            high = middle
    return 1 - high


def certify(
    validation: Validation,
    wanted: float,
    decision: Literal["trust", "distrust"],
    n_tried: int = 1,
) -> Threshold:
    """Certify the threshold that decides the most answers at a wanted precision.

    This is fixed-sequence testing (Learn then Test, arXiv 2110.01052) on growing sets,
    of sizes fixed beforehand, such as the 52, 67, ... most probable answers. Each set
    is tested at the full level by the exact binomial bound (Clopper and Pearson); the
    first to fail ends the sequence, and the last to pass gives the threshold. That lies
    just above the next answer, so that the trusted answers are a random draw of those
    beyond it. Answers of equal P are tested in order of raw score: labels chose where
    the steps of an isotonic map end, and tests there would often pass by chance. To
    distrust an answer is to trust, with probability 1 - P, that it is wrong. Only
    answers beyond one half take part. A precision of 1 is never certified.

    The best of `n_tried` heads on these answers has fewer errors there by chance. So
    the level is divided by their number, and the promise holds whichever is chosen.
    """
    sign = 1 if decision == "trust" else -1  # of P, so that the surest come first
    least = 0.5 if decision == "trust" else np.nextafter(-0.5, 0)
    p, errors = sign * validation.p_correct, validation.labels == (sign < 0)
    n, n_beyond = len(p), int((p >= least).sum())
    order = np.argsort(validation.p_correct, kind="stable")[::-sign]
    p = np.append(p[order], -np.inf)
    n_errors = np.append(0, np.cumsum(errors[order]))
    errors_at_start = _ERRORS_AT_START if wanted < 1 else ()
    starts = [fewest_decided(wanted, e, n_tried) for e in errors_at_start]
    start = next((m for m in starts if m <= n_beyond / 2), min(starts, default=n + 1))
    counts = [*range(start, n_beyond, max(1, n // _N_STEPS)), n_beyond]
    threshold, m, tested = None, 0, 0
    for count in counts if n_beyond >= start else ():
        if _at_most(int(n_errors[count]), count, 1 - wanted) > _level(n_tried):
            if threshold is None:
                m = tested = count
            break
        # Answers of equal P are decided together or not at all.
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
        low=_lower_bound(int(n_errors[tested]), tested, n_tried),
        n=n,
        n_tried=n_tried,
    )


def certified(validation: Validation, wanted: float, n_tried: int = 1) -> Thresholds:
    """Certify both thresholds at a wanted precision; see `certify`."""
    if not 0 < wanted <= 1:
        raise ValueError(f"precision: expected a share in (0, 1], got {wanted}")
    return Thresholds(
        certify(validation, wanted, "trust", n_tried),
        certify(validation, wanted, "distrust", n_tried),
    )
