"""What a server charges, what was spent, and where to stop."""

import dataclasses
import math
import threading

_MILLION = 1_000_000


class SpendingCapReached(ValueError):
    """The next request might cost more than is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """What a server charges, and where to stop.

    Attributes:
      prompt: per million prompt tokens, in any currency.
      new: per million generated tokens, in the same one.
      cap: the most that may be spent, by earlier processes too; None for no cap.
    """

    prompt: float = 0.0
    new: float = 0.0
    cap: float | None = None

    def __post_init__(self) -> None:
        """Refuse prices that are none.

        Raises:
          ValueError: a number is negative or not finite, or a cap can never be reached.
        """
        for name in ("prompt", "new", "cap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
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
        return (self.prompt * n_prompt + self.new * n_new) / _MILLION


class Account:
    """What has been spent, and what may still be; safe to share between threads."""

    def __init__(self, prices: Prices, earlier: float = 0.0) -> None:
        """Start with what earlier processes have spent."""
        self._prices = prices
        self._lock = threading.Lock()
        self._spent = earlier
        self._reserved = 0.0

    @property
    def spent(self) -> float:
        """Return what finished requests cost, those of earlier processes included."""
        return self._spent

    def reserve(self, n_prompt: int, n_new: int) -> float:
        """Set aside the most that one request can cost.

        Raises:
          SpendingCapReached: with it the cap might be crossed.
        """
        most = self._prices.cost(n_prompt, n_new)
        with self._lock:
            cap = self._prices.cap
            if cap is not None and self._spent + self._reserved + most > cap:
                raise SpendingCapReached(
                    f"the spending cap of {cap:g} is reached: {self._spent:.6g} is "
                    "spent (by earlier processes too), "
                    f"{self._reserved:.6g} is under way and the next request may cost "
                    f"{most:.6g}; what was answered is kept, so the same line with a "
                    "higher cap continues"
                )
            self._reserved += most
        return most

    def book(self, reserved: float, n_prompt: int, n_new: int) -> None:
        """Replace a reservation by what the request did cost."""
        with self._lock:
            self._reserved -= reserved
            self._spent += self._prices.cost(n_prompt, n_new)

    def release(self, reserved: float) -> None:
        """Give back a reservation of a request that surely cost nothing."""
        with self._lock:
            self._reserved -= reserved
