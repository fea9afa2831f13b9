"""The choice of a Router among draft workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_NOMINAL_STEP_S = 0.01
"""Seconds of draft time a step of a Router that has not drafted yet."""

_BETTER_RATIO = 0.8
_NUM_LOOKS = 3
_HOLD_S = 10.0


@dataclass(frozen=True)
class Drafter:
    """A draft worker as one Router sees it, which may have a seat there.

    num_others: other Routers with a seat. share: part of the device's time that these leave, at
    least an even one. round_trip_s: to its node.
    """

    name: str
    num_others: int
    share: float
    round_trip_s: float

    def cost_s(self, step_s: float) -> float:
        """Return the seconds that a step waits for its drafts at the measured load.

        step_s: draft time of a step, on an idle device.
        """
        return (step_s or _NOMINAL_STEP_S) / self.share + self.round_trip_s

    def expected_cost_s(self, step_s: float) -> float:
        """Return the same where all with a seat draft as much.

        Routers that start together, or have lost a worker together, are not measured yet.
        """
        return (step_s or _NOMINAL_STEP_S) * (1 + self.num_others) + self.round_trip_s


def by_expected_cost(drafters: Iterable[Drafter], step_s: float = 0.0) -> list[Drafter]:
    """Return the drafters for a Router without a seat, the best first."""
    return sorted(drafters, key=lambda each: (each.expected_cost_s(step_s), each.name))


class MovePolicy:
    """Decides when a Router leaves its drafter for a cheaper one.

    That costs some steps of drafts, while the new one catches up. Another drafter must therefore be
    cheaper by a fifth in three looks in a row, and the last move some time ago.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic, in seconds."""
        self._clock = clock
        self._num_better = 0  # looks in a row
        self._seated_at_s = -math.inf

    def record_seat(self) -> None:
        """Record that the Router has a new seat."""
        self._num_better, self._seated_at_s = 0, self._clock()

    def better(self, own: Drafter, others: Iterable[Drafter], step_s: float) -> Drafter | None:
        """Return the drafter to move to, once a look; None to stay. step_s: see Drafter."""
        best = min(others, key=lambda each: (each.cost_s(step_s), each.name), default=own)
        is_better = best.cost_s(step_s) < _BETTER_RATIO * own.cost_s(step_s)
        self._num_better = self._num_better + 1 if is_better else 0
        is_held = self._clock() - self._seated_at_s < _HOLD_S
        return None if self._num_better < _NUM_LOOKS or is_held else best
