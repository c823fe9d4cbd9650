"""What a server charges, what was spent, and where to stop."""

import dataclasses
import math
import threading


class SpendingCapReached(ValueError):
    """The next request might cost more than is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """What a server charges, in any one currency, and where to stop."""

    prompt: float = 0.0  # per million prompt tokens
    new: float = 0.0  # per million generated tokens
    cap: float | None = None  # the most that may be spent, by earlier processes too

    def __post_init__(self) -> None:
        """Refuse negative or infinite numbers, and a cap that is never reached."""
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(
                    f"price {name!r}: expected a finite number of at least 0, "
                    f"found {value!r}"
                )
        if self.cap is not None and self.prompt == self.new == 0:
            raise ValueError(
                "a spending cap needs prices, or nothing ever counts towards it; give "
                "the price per million prompt tokens and per million new tokens"
            )

    def cost(self, n_prompt: int, n_new: int) -> float:
        """Return the cost of so many tokens."""
        return (self.prompt * n_prompt + self.new * n_new) / 1_000_000


class Account:
    """What has been spent, and what may still be; safe to share between threads.

    Attributes:
      spent: on finished requests, those of earlier processes included.
    """

    def __init__(self, prices: Prices, earlier: float = 0.0) -> None:
        """Start with what earlier processes have spent."""
        self._prices = prices
        self._lock = threading.Lock()
        self.spent = earlier
        self._reserved = 0.0

    def reserve(self, n_prompt: int, n_new: int) -> float:
        """Set aside the most that one request can cost.

        Raises:
          SpendingCapReached: with it the cap might be crossed.
        """
        most = self._prices.cost(n_prompt, n_new)
        with self._lock:
            cap = self._prices.cap
            if cap is not None and self.spent + self._reserved + most > cap:
                raise SpendingCapReached(
                    f"the spending cap of {cap:g} is reached: {self.spent:.6g} is "
                    "spent (by earlier processes too), "
                    f"{self._reserved:.6g} is under way and the next request may cost "
                    f"{most:.6g}; what was answered is kept, so the same line with a "
                    "higher cap continues"
                )
            self._reserved += most
        return most

    def book(self, reserved: float, n_prompt: int, n_new: int) -> None:
        """Replace a reservation by what the request did cost; 0 tokens for nothing."""
        with self._lock:
            self._reserved -= reserved
            self.spent += self._prices.cost(n_prompt, n_new)
