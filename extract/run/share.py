"""Which part of a stage's work is this process's, where several share it.

Processes need not meet: each does the parts that `Share.mine` gives it, and whoever
finds that no part is missing joins them (`extract.run.stages.do_share`).
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Share:
    """One process's share of the work; by default all of it.

    Attributes:
      rank: from 0.
      world_size: number of processes.
      source: the variables or the option that say so, for messages; empty for a process
        that works alone.
    """

    rank: int = 0
    world_size: int = 1
    source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check that the rank is one of the world's."""
        if not 0 <= self.rank < self.world_size:
            where = f"{self.source}: " if self.source else ""
            raise ValueError(
                f"{where}rank {self.rank} of {self.world_size} workers; ranks are 0 to "
                "workers - 1 without gaps"
            )

    @property
    def is_whole(self) -> bool:
        """Return whether this process does all the work."""
        return self.world_size == 1

    def mine(
        self, items: Iterable[Item], cost: Callable[[Item], float] | None = None
    ) -> list[Item]:
        """Return the items of this share, in their order.

        The shares of all ranks are disjoint and hold every item.

        Args:
          items: of the whole work, equal in all processes.
          cost: of an item, in any unit; then the shares have about equal sums (the
            most expensive item first, each to the share that has least so far), else
            about equal counts (`items[rank::world_size]`).
        """
        items = list(items)
        if cost is None:
            return items[self.rank :: self.world_size]
        costs = [cost(item) for item in items]
        loads = [0.0] * self.world_size
        places = []
        for place in sorted(range(len(items)), key=lambda place: -costs[place]):
            least = loads.index(min(loads))
            loads[least] += costs[place]
            if least == self.rank:
                places.append(place)
        return [items[place] for place in sorted(places)]
