"""What a detector has seen, and from which probability on an answer is trusted.

A probability learned on one kind of question says little about another kind. So the
detector keeps where its signals lay and in which scripts its texts were written, and
the threshold at which validation answers had a wanted precision.
"""

import collections
import dataclasses
import functools
import unicodedata
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
    """The lowest P(correct) at which the trusted answers have a wanted precision.

    All on validation answers, which the probabilities were fitted on too: on other
    questions expect a little less. The interval is of sampling alone.

    Attributes:
      wanted: share of the trusted answers that shall be correct.
      p_correct: answers with at least this are trusted; None where no threshold
        reaches the wanted precision.
      precision: share of the trusted that are correct; of the best threshold where
        none reaches.
      low: Wilson's 95 % interval of it.
      high: its upper end.
      coverage: share of all answers that are trusted.
      n: validation answers.
    """

    wanted: float
    p_correct: float | None
    precision: float
    low: float
    high: float
    coverage: float
    n: int

    def in_words(self) -> str:
        """Say what it is, in a sentence's part."""
        reached = (
            f"precision {self.precision:.3f} [{self.low:.3f}, {self.high:.3f}] at "
            f"coverage {self.coverage:.3f} of {self.n} validation answers"
        )
        if self.p_correct is None:
            return f"no P reaches precision {self.wanted:g}; the best has {reached}"
        return f"P >= {self.p_correct:.4f} for precision {self.wanted:g}: {reached}"


def choose_threshold(
    p_correct: np.ndarray, labels: np.ndarray, wanted: float
) -> Threshold:
    """Choose the threshold that trusts most answers at a wanted precision.

    Args:
      p_correct: `[n]` calibrated probabilities; at least one.
      labels: `[n]` bool.
      wanted: in (0, 1].
    """
    order = np.argsort(-p_correct, kind="stable")
    p, hits = p_correct[order], np.cumsum(labels[order])
    # Equal probabilities are trusted together: a threshold ends a group of them.
    ends = np.flatnonzero(np.append(p[1:] < p[:-1], True))
    precision = hits[ends] / (ends + 1)
    reached = np.flatnonzero(precision >= wanted)
    chosen = reached[-1] if len(reached) else int(precision.argmax())
    n_trusted, n_hits = int(ends[chosen] + 1), int(hits[ends[chosen]])
    interval = binomtest(n_hits, n_trusted).proportion_ci(0.95, method="wilson")
    return Threshold(
        wanted=wanted,
        p_correct=float(p[ends[chosen]]) if len(reached) else None,
        precision=n_hits / n_trusted,
        low=float(interval.low),
        high=float(interval.high),
        coverage=n_trusted / len(p),
        n=len(p),
    )
