"""How far two raters agree beyond chance: Cohen's kappa with a bootstrap interval."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two raters agree on the same items.

    Attributes:
      n: items that both rated.
      n_agree: of them, rated alike.
      kappa: in [-1, 1], or None where it is undefined; then `reason` says why.
      ci_low: lower end of the 95 % percentile bootstrap interval, or None.
      ci_high: upper end, or None.
      n_bootstrap: resamples drawn.
      n_undefined: resamples without a kappa (one class only); not in the interval.
      reason: why there is no kappa, or None.
    """

    n: int
    n_agree: int
    kappa: float | None
    ci_low: float | None
    ci_high: float | None
    n_bootstrap: int
    n_undefined: int
    reason: str | None

    @property
    def rate(self) -> float | None:
        """Return the share of items rated alike, or None without items."""
        return self.n_agree / self.n if self.n else None

    def in_words(self) -> str:
        """Return one line for a person."""
        if self.rate is None:
            return "nothing to compare"
        line = f"{self.n_agree} of {self.n} agree ({100 * self.rate:.1f} %)"
        if self.kappa is None:
            return f"{line}, kappa undefined: {self.reason}"
        line += f", kappa {self.kappa:.3f}"
        if self.ci_low is None:
            return line
        return f"{line} [{self.ci_low:.3f}, {self.ci_high:.3f}]"


def kappa_of(cells: np.ndarray) -> np.ndarray:
    """Return Cohen's kappa of two-by-two tables (Cohen 1960).

    Args:
      cells: `[..., 4]` counts: both yes, only the first, only the second, both no.

    Returns:
      `[...]` float64; NaN where both raters put everything into one class.
    """
    both, first, second, neither = np.moveaxis(np.asarray(cells, np.float64), -1, 0)
    n = both + first + second + neither
    chance = (both + first) * (both + second) + (neither + second) * (neither + first)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (n * (both + neither) - chance) / (n * n - chance)


def agreement(
    first: Sequence[bool],
    second: Sequence[bool],
    *,
    n_bootstrap: int = 10_000,
    seed: int = 0,
) -> Agreement:
    """Compare two raters.

    Args:
      first: one rating per item.
      second: of the same items, in the same order.
      n_bootstrap: resamples of the items. Drawn as counts of the four cells, which has
        the same distribution as drawing the items one by one.
      seed: of the resamples.

    Raises:
      ValueError: the raters rated different numbers of items.
    """
    if len(first) != len(second):
        raise ValueError(
            f"two raters are compared on the same items, found {len(first)} ratings "
            f"and {len(second)}"
        )
    n = len(first)
    a, b = np.array(first, dtype=bool), np.array(second, dtype=bool)
    cells = np.array([(a & b).sum(), (a & ~b).sum(), (~a & b).sum(), (~a & ~b).sum()])
    kappa = float(kappa_of(cells)) if n else float("nan")
    if np.isnan(kappa):
        low = high = None
        n_undefined, n_drawn = 0, 0
        reason = "both raters put every item into one class" if n else "no items"
    else:
        draws = np.random.default_rng(seed).multinomial(n, cells / n, size=n_bootstrap)
        resampled, n_drawn, reason = kappa_of(draws), n_bootstrap, None
        n_undefined = int(np.isnan(resampled).sum())
        defined = resampled[~np.isnan(resampled)]
        low, high = (
            np.quantile(defined, (0.025, 0.975)).tolist()
            if len(defined)
            else (None, None)
        )
    return Agreement(
        n=n,
        n_agree=int(cells[0] + cells[3]),
        kappa=None if np.isnan(kappa) else kappa,
        ci_low=low,
        ci_high=high,
        n_bootstrap=n_drawn,
        n_undefined=n_undefined,
        reason=reason,
    )
