"""What a detector has seen, and from which probability on an answer is trusted.

A probability learned on one kind of question says little about another kind. So the
detector keeps where its signals lay and in which scripts its texts were written, and
the threshold from which on a wanted precision is certified on validation answers.
"""

import collections
import dataclasses
import functools
import math
import unicodedata
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from beatrice.jaxprobe.families import FamilyDims, Features

QUANTILES = (0.001, 0.999)  # of a channel over training tokens: its range
FLAGGED = 0.001  # share of validation answers that a family's limit would flag
MOST_TOKENS = 1 << 14  # read for the ranges: 16 of them lie beyond either end
_CHANNELS_AT_ONCE = 512  # sorted together, to bound memory
_LEAST_SHARE = 0.001  # of the letters; a script with fewer was not learned


class Scope(NamedTuple):
    """Where the signals of one pass lay in training.

    Attributes:
      low: `[d_total]` float32, the 0.1 % quantile of each channel over training tokens.
      high: `[d_total]` float32, the 99.9 % quantile.
      limits: `[n_families]` float32: one validation answer in a thousand had a larger
        share of a family's values beyond `low` and `high`.
    """

    low: np.ndarray
    high: np.ndarray
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

    Args:
      features: of `n_examples` answers, as they are read (not standardised).
      dims: channels of the pass.
      low: `[d_total]`.
      high: `[d_total]`.

    Returns:
      `[n_examples, n_families]` in [0, 1]; a value that is no number lies outside, and
      an answer without tokens has none there.
    """
    n_outside = np.zeros((features.n_examples, dims.n_families))
    n_values = np.zeros_like(n_outside)
    for span, (tokens, mask) in enumerate(
        zip(features.tokens, features.masks, strict=True)
    ):
        x, read = np.asarray(tokens), _is_read(dims, span, features.n_spans)
        outside = ~((low <= x) & (x <= high)) & np.asarray(mask)[..., None] & read
        n_tokens = np.asarray(mask).sum(axis=1)
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

    Both are found on answers at even distances, of some 16,000 tokens.

    Args:
      read: returns the features of rows of the store.
      dims: channels of the pass.
      lengths: `[n_rows]` tokens that are read.
      train: rows; at least one.
      validation: rows; at least one.
    """
    features = read(_some(train, lengths))
    low, high = np.zeros((2, dims.total), np.float32)
    for first in range(0, dims.total, _CHANNELS_AT_ONCE):
        channels = slice(first, first + _CHANNELS_AT_ONCE)
        values = []
        for span, (tokens, mask) in enumerate(
            zip(features.tokens, features.masks, strict=True)
        ):
            x = np.asarray(tokens)[np.asarray(mask)][:, channels]
            values.append(
                np.where(_is_read(dims, span, features.n_spans)[channels], x, np.nan)
            )
        low[channels], high[channels] = np.nanquantile(
            np.concatenate(values), QUANTILES, axis=0
        )
    shares = share_outside(read(_some(validation, lengths)), dims, low, high)
    limits = np.quantile(shares, 1 - FLAGGED, axis=0).astype(np.float32)
    return Scope(low, high, limits)


@functools.lru_cache(maxsize=1 << 14)
def _script(letter: str) -> str:
    """The script in a letter's Unicode name, as in "CYRILLIC SMALL LETTER A"."""
    return unicodedata.name(letter, "UNNAMED").split(" ")[0]


def count_scripts(text: str) -> collections.Counter[str]:
    """Return how many letters of each script a text has.

    A script is not a language: French passes where English was learned.
    """
    if text.isascii():
        return collections.Counter({"LATIN": sum(map(str.isalpha, text))})
    return collections.Counter(_script(letter) for letter in text if letter.isalpha())


def scripts_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the scripts of at least one in a thousand letters, in order of names."""
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(count_scripts(text))
    least = _LEAST_SHARE * counts.total()
    return tuple(sorted(s for s, n in counts.items() if n and n >= least))


LEAST_ANSWERS = 10  # right, and wrong, in training and in validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """On how many answers a head rests, and how sure it is that it can tell.

    Attributes:
      train: right and wrong answers that it was trained on, one a question each.
      validation: likewise those that it was calibrated on.
      auroc: 95 % interval of its validation AUROC (`metrics.auroc_interval`).
    """

    train: tuple[int, int]
    validation: tuple[int, int]
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
_MANY = 400  # questions from which on the sequence starts where one error is allowed
_N_STEPS = 40  # of the sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
    """The lowest P(correct) at which a wanted precision is certified.

    The precision of answers like those of validation, one a question, is at least
    `wanted` with a confidence of 90 %: in nine of ten draws of the validation answers
    the promise is true.

    Attributes:
      wanted: share of the trusted answers that shall be correct.
      p_correct: answers with at least this are trusted; None where no threshold
        holds the wanted precision.
      n_trusted: validation answers that are trusted; of the first threshold that was
        tested where none holds.
      n_wrong: of them.
      low: exact lower bound of the precision, with the same confidence.
      n: validation answers that count, one a question.
    """

    wanted: float
    p_correct: float | None
    n_trusted: int
    n_wrong: int
    low: float
    n: int

    @property
    def precision(self) -> float:
        """Share of the trusted validation answers that are correct; NaN of none."""
        return 1 - self.n_wrong / self.n_trusted if self.n_trusted else float("nan")

    @property
    def coverage(self) -> float:
        """Share of the validation answers that are trusted."""
        return self.n_trusted / self.n if self.p_correct is not None else 0.0

    def in_words(self) -> str:
        """Say what it is, in a sentence's part."""
        promise = f"precision {self.wanted:g} with {CONFIDENCE:.0%} confidence"
        if self.wanted >= 1:
            return f"no P holds {promise}: no number of answers would show it"
        if self.p_correct is None:
            least, seen = fewest_trusted(self.wanted), f"{self.n} were seen"
            if self.n_trusted >= least:
                seen = f"{self.n_wrong} of the first {self.n_trusted} are wrong"
            return (
                f"no P holds {promise}: {least} trusted validation answers without an "
                f"error would show it, and {seen}"
            )
        return (
            f"P >= {self.p_correct:.4f} for {promise}: {self.n_wrong} of "
            f"{self.n_trusted} trusted validation answers are wrong (precision "
            f"{self.precision:.3f}, at least {self.low:.3f}), at coverage "
            f"{self.coverage:.3f} of {self.n}"
        )


def fewest_trusted(wanted: float, n_wrong: int = 0) -> int:
    """Return how many trusted answers certify a precision with some of them wrong.

    Args:
      wanted: below 1.
      n_wrong: of the trusted answers.
    """
    n, wrong = n_wrong + 1, 1 - wanted

    def p_at_most() -> float:
        """Return the binomial probability of at most so many wrong ones of `n`."""
        terms = (
            math.comb(n, k) * wrong**k * wanted ** (n - k) for k in range(n_wrong + 1)
        )
        return sum(terms)

    while p_at_most() > 1 - CONFIDENCE:
        n += 1
    return n


def choose_threshold(
    p_correct: np.ndarray,
    labels: np.ndarray,
    wanted: float,
    questions: np.ndarray | None = None,
) -> Threshold:
    """Certify the threshold that trusts most answers at a wanted precision.

    Fixed-sequence testing (Learn then Test, arXiv 2110.01052) of the 22, 27, ... most
    probable answers, the counts fixed beforehand: each is tested at the full level by
    the exact binomial bound (Clopper and Pearson), the first that fails ends the
    sequence, and the last that passed is the threshold. It lies just above the next
    answer, so that the trusted ones are a free draw of what lies beyond it.

    Args:
      p_correct: `[n]` calibrated probabilities; at least one.
      labels: `[n]` bool.
      wanted: in (0, 1]; 1 is never certified.
      questions: `[n]` names. The first answer to each counts: others to the same
        question are no new evidence. None takes all.
    """
    from scipy.stats import beta, binom

    if questions is not None:
        first = np.sort(np.unique(questions, return_index=True)[1])
        p_correct, labels = p_correct[first], labels[first]
    n = len(p_correct)
    order = np.argsort(-p_correct, kind="stable")
    p = np.append(p_correct[order], -np.inf)
    n_wrong = np.append(0, np.cumsum(~labels[order]))
    counts, start = range(0), 0
    if wanted < 1:
        start = fewest_trusted(wanted, int(n >= _MANY))
        counts = range(start, n + 1, max(1, n // _N_STEPS))
    threshold, trusted, tested = None, 0, 0
    for count in counts:
        # Equal probabilities are trusted together, or not at all.
        m = int(np.searchsorted(-p[:-1], -p[count]))
        if m < start:
            continue
        tested = tested or m
        if binom.cdf(n_wrong[m], m, 1 - wanted) > 1 - CONFIDENCE:
            break
        threshold, trusted = float(max(np.nextafter(p[count], 1), 0)), m
    m = trusted or tested
    e = int(n_wrong[m])
    return Threshold(
        wanted=wanted,
        p_correct=threshold,
        n_trusted=m,
        n_wrong=e,
        low=float(beta.ppf(1 - CONFIDENCE, m - e, e + 1)) if m > e else 0.0,
        n=n,
    )
