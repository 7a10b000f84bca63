"""How many clients a round's cohort was drawn from, as it was seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

from tfdp_fl.flower import answers


@dataclasses.dataclass(frozen=True)
class Population:
    """Whom a round's clients were drawn from.

    Attributes:
      available: how many clients were connected; None if the client manager
        does not tell.
      drawn_from: N, of whom the client manager itself drew exactly the clients
        of the round, in one call of `sample` and nobody twice; None if that was
        not seen.
    """

    available: int | None
    drawn_from: int | None


class WatchedManager:
    """A client manager whose drawing is watched; all else is its own.

    Clients come and go while a strategy samples. Counted are those who were
    there both before and after: never more than were drawn from, and a smaller
    N costs more.
    """

    def __init__(self, manager: Any):
        self._manager = manager
        self._drawn: list[tuple[list[Any], int]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":
            raise AttributeError(name)
        return getattr(self._manager, name)

    def __len__(self) -> int:
        return len(self._manager)

    def _class_of_it(self) -> type:
        return type(self._manager)

    # A strategy may ask what it was given.
    __class__: Any = property(_class_of_it)

    def sample(self, *args: Any, **kwargs: Any) -> list[Any]:
        """As the manager's own, whose arguments these are."""
        names = ("num_clients", "min_num_clients", "criterion")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        wait_for = getattr(self._manager, "wait_for", None)
        needed = given.get("min_num_clients") or given.get("num_clients")
        if callable(wait_for) and needed:
            # As `sample` does, or those who come meanwhile would not count.
            wait_for(needed)
        before = self._eligible(given.get("criterion"))
        clients = self._manager.sample(*args, **kwargs)
        after = self._eligible(given.get("criterion"))
        if isinstance(before, set) and isinstance(after, set):
            count = len(before & after)
        else:
            # Both are numbers: a manager tells names, or it does not.
            count = min(int(cast(int, before)), int(cast(int, after)))
        self._drawn.append((list(clients), max(count, len(clients))))
        return clients

    def population(self, chosen: Sequence[Any]) -> Population:
        """Returns what is known of how these clients were chosen."""
        drawn_from = None
        if len(self._drawn) == 1:
            clients, count = self._drawn[0]
            names = {answers.name_of(each) or id(each) for each in chosen}
            if len(names) == len(chosen) and (
                sorted(map(id, clients)) == sorted(map(id, chosen))
            ):
                drawn_from = count
        available = int(self._manager.num_available())
        return Population(max(available, len(chosen)), drawn_from)

    def _eligible(self, criterion: Any) -> set[Any] | int:
        """Returns the names of those who may be drawn, or their number."""
        everybody = getattr(self._manager, "all", None)
        clients = everybody() if callable(everybody) else None
        if not isinstance(clients, dict):
            # How many of them a criterion lets through cannot be told.
            return 0 if criterion is not None else self._manager.num_available()
        return {
            name
            for name, client in list(clients.items())
            if criterion is None or criterion.select(client)
        }


def watched(manager: Any) -> WatchedManager | None:
    """Returns the manager under watch; None if it is none of Flower's shape."""
    for method in ("num_available", "sample"):
        if not callable(getattr(manager, method, None)):
            return None
    return WatchedManager(manager)


class WatchedGrid:
    """A grid whose list of nodes is watched; all else is its own.

    Nodes come and go. What a strategy was told last is what it draws from.

    Attributes:
      connected: how many nodes there were when it was told last.
    """

    def __init__(
        self,
        grid: Any,
        eligible: Callable[[Sequence[int]], list[int]] | None = None,
    ):
        """Watches a grid.

        Args:
          grid: the grid.
          eligible: returns those of some nodes that may be drawn; None: all.
        """
        self._grid = grid
        self._eligible = eligible
        self._listed: list[int] | None = None
        self.connected = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_grid":
            raise AttributeError(name)
        return getattr(self._grid, name)

    def _class_of_it(self) -> type:
        return type(self._grid)

    # A strategy may ask what it was given.
    __class__: Any = property(_class_of_it)

    def get_node_ids(self) -> list[int]:
        """As the grid's own; of these, the eligible ones."""
        nodes = list(self._grid.get_node_ids())
        self.connected = len(nodes)
        self._listed = nodes if self._eligible is None else self._eligible(nodes)
        return list(self._listed)

    def population(
        self, chosen: Sequence[int], uniformly: bool, at_most: int
    ) -> Population:
        """Returns what is known of how these nodes were chosen.

        Args:
          chosen: the nodes that are sent a message.
          uniformly: whether the strategy is known to draw uniformly, without
            replacement, from the nodes it was told of last.
          at_most: N, as the user says it.
        """
        listed = frozenset(self._listed or ())
        drawn = (
            uniformly and len(set(chosen)) == len(chosen) and listed.issuperset(chosen)
        )
        return Population(
            max(len(listed), len(chosen)),
            min(len(listed), at_most) if drawn else None,
        )
