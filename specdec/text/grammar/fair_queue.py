"""Queue of work that is fair among callers."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from specdec.types.errors import OverloadedError

Item = TypeVar("Item", bound=Hashable)


@dataclass(eq=False)
class _Caller(Generic[Item]):
    """The items of one caller. since: the lowest number has waited longest for its turn."""

    since: int
    waiting: deque[Item] = field(default_factory=deque)
    num_running: int = 0

    @property
    def num_open(self) -> int:
        return len(self.waiting) + self.num_running


class FairQueue(Generic[Item]):
    """Waiting and running items by caller. Not thread-safe.

    The caller with the fewest running items is next, and of those the one that has waited longest
    since it came or its last item ended. So an item of a caller that has no other one waits until
    one running item ends, however many another caller has queued; and a caller with many items is
    not starved, neither by others that add one at a time nor by new ones that keep coming: those
    are served before it only while its own items run, for the time of one compilation.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._callers: dict[Hashable, _Caller[Item]] = {}  # with items that wait or run
        self._sharers: dict[Item, list[_Caller[Item]]] = {}  # of each waiting item
        self._runs_for: dict[Item, _Caller[Item]] = {}

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._sharers)

    def num_open(self, caller: Hashable) -> int:
        """Return the number of items of a caller that wait or run."""
        known = self._callers.get(caller)
        return 0 if known is None else known.num_open

    def put(self, item: Item, caller: Hashable, max_open: float) -> bool:
        """Queue an item for a caller; return whether it is new.

        One that already waits, for another caller, runs as soon as it is the turn of either; one
        that runs is left alone. Raises OverloadedError if `max_open` items of the caller wait or
        run.
        """
        if item in self._runs_for:
            return False
        known = self._callers.get(caller) or _Caller(next(self._numbers))
        if item in known.waiting:
            return False
        if known.num_open >= max_open:
            count = f"{known.num_open} grammars of this client wait or are compiled"
            raise OverloadedError(f"structured_output: {count} (limit {max_open})")
        self._callers[caller] = known
        known.waiting.append(item)
        sharers = self._sharers.setdefault(item, [])
        sharers.append(known)
        return len(sharers) == 1

    def take(self) -> Item:
        """Remove and return the next item, which runs until `finish`. There must be one."""
        waiting = (each for each in self._callers.values() if each.waiting)
        caller = min(waiting, key=lambda each: (each.num_running, each.since))
        item = caller.waiting[0]
        caller.num_running += 1
        self.discard(item)
        self._runs_for[item] = caller
        return item

    def discard(self, item: Item) -> bool:
        """Remove an item; return whether it was waiting."""
        sharers = self._sharers.pop(item, [])
        for sharer in sharers:
            sharer.waiting.remove(item)
        self._forget_idle()
        return bool(sharers)

    def finish(self, item: Item) -> None:
        """Record the end of a running item."""
        caller = self._runs_for.pop(item)
        caller.num_running -= 1
        caller.since = next(self._numbers)
        self._forget_idle()

    def _forget_idle(self) -> None:
        self._callers = {name: each for name, each in self._callers.items() if each.num_open}
