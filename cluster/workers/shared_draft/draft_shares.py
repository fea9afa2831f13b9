"""Fair division of a draft device's time among the Routers that share it.

Start-time fair queueing (Goyal et al. 1996) by measured seconds: of the Routers that wait, the one
that has used least goes first. A Router that was idle gets no credit for that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

_HORIZON_S = 1.0
"""Time constant of the measured use, by which drafts ahead are planned."""

_LEAST_USE = 0.01
"""Part of the time below which a Router does not count as one that uses the device."""

_NEW_WEIGHT = 0.2


@dataclass(frozen=True)
class SeatUse:
    """Use of a worker by the Router with a seat.

    recent: part of the last seconds. step_s: mean seconds of the drafts that a step waits for; of
    drafts ahead if none waits, 0 without any.
    """

    recent: float
    step_s: float


def share_beside(uses: Iterable[SeatUse]) -> float:
    """Return the part of a worker's time that Routers leave to another, at least an even share."""
    used = [each.recent for each in uses]
    num_active = sum(each > _LEAST_USE for each in used)
    return max(1 / (1 + num_active), 1 - sum(used))


class Waiting(NamedTuple):
    """A Router with a message. is_urgent: whether a step of its target waits for the answer."""

    router: int
    is_urgent: bool


@dataclass
class _Use:
    """Use of the device by one Router.

    virtual_s: seconds, and at least what was due when it last began to wait. recent_s: seconds,
    decayed since at_s. typical_s, urgent_s: means of its work that no step waits for, and of that
    which one does.
    """

    virtual_s: float = 0.0
    recent_s: float = 0.0
    at_s: float = 0.0
    typical_s: float = 0.0
    urgent_s: float = 0.0

    def recent(self, now_s: float) -> float:
        """Return the part of the last seconds in which it has used the device."""
        return self.recent_s * self.decay(now_s) / _HORIZON_S

    def decay(self, now_s: float) -> float:
        """Return the factor by which what was measured until `at_s` counts now."""
        return math.exp((self.at_s - now_s) / _HORIZON_S)


class DraftShares:
    """Decides whose message is executed next, and which drafts ahead pause for that of another.

    Deterministic: the same calls at the same times give the same order.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic, in seconds."""
        self._clock = clock
        self._uses: dict[int, _Use] = {}
        self._virtual_s = 0.0  # of the work that was begun last

    def join(self, router: int) -> None:
        """Add a Router; it begins with what the others have used."""
        self._uses[router] = _Use(self._virtual_s, at_s=self._clock())

    def leave(self, router: int) -> None:
        """Remove a Router."""
        del self._uses[router]

    def wait(self, router: int) -> None:
        """Record that a Router without a message has one now."""
        use = self._uses[router]
        use.virtual_s = max(use.virtual_s, self._virtual_s)

    def first(self, waiting: Iterable[Waiting]) -> int:
        """Return the Router whose message is next, of one or more; of equal ones the first."""
        router = min(waiting, key=self._due_s).router
        self._virtual_s = max(self._virtual_s, self._uses[router].virtual_s)
        return router

    def record(self, router: int, seconds: float, *, is_urgent: bool) -> None:
        """Record the seconds that the work of a Router has taken."""
        use, now_s = self._uses[router], self._clock()
        decay, use.at_s = use.decay(now_s), now_s
        use.recent_s = use.recent_s * decay + seconds
        use.virtual_s += seconds
        if is_urgent:
            use.urgent_s = _mean(use.urgent_s, seconds)
        else:
            use.typical_s = _mean(use.typical_s, seconds)

    def due_before(self, router: int, seconds: float, waiting: Iterable[Waiting]) -> int | None:
        """Return whose work is due before the rest of a Router's drafts ahead; None for its own.

        seconds: for which these run already. Work that no target waits for lets them run for as
        long as it usually takes itself, so that short drafts of several Routers run in turn.
        """
        due_s = self._uses[router].virtual_s + seconds
        earlier = [
            each
            for each in waiting
            if each.router != router
            and self._due_s(each) < due_s
            and (each.is_urgent or seconds >= self._uses[each.router].typical_s)
        ]
        return self.first(earlier) if earlier else None

    def uses(self) -> dict[int, SeatUse]:
        """Return the use by each Router. From any thread, as `share`."""
        now_s, uses = self._clock(), tuple(self._uses.items())  # atomic
        return {
            each: SeatUse(use.recent(now_s), use.urgent_s or use.typical_s) for each, use in uses
        }

    def share(self, router: int) -> float:
        """Return the part of the device's time that the others leave to a Router."""
        return share_beside(use for each, use in self.uses().items() if each != router)

    def _due_s(self, each: Waiting) -> float:
        """Return when work is due by virtual time; for a step, earlier by the time that it takes.

        So that goes first, unless its Router has used more than the others by then.
        """
        use = self._uses[each.router]
        return use.virtual_s - (use.urgent_s if each.is_urgent else 0.0)


def _mean(known: float, seconds: float) -> float:
    """Return a mean in which recent work counts most."""
    return (1 - _NEW_WEIGHT) * (known or seconds) + _NEW_WEIGHT * seconds
