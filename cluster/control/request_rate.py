"""How many requests arrive a second, over all replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0


class ArrivalRate:
    """Arrivals over the last ten seconds, from counters that replicas report."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, int] = {}
        self._arrivals: deque[tuple[float, int]] = deque()

    def report(self, replica_id: str, num_requests: int) -> None:
        """A replica says how many have come to it since it started.

        What came before its first report is not known to be recent, and does not count.
        """
        new = num_requests - self._known.get(replica_id, num_requests)
        self._known[replica_id] = num_requests
        if new > 0:
            self._arrivals.append((self._clock(), new))

    def forget(self, replica_id: str) -> None:
        """A replica has ended; what came to it stays counted."""
        self._known.pop(replica_id, None)

    def per_s(self) -> float:
        """Requests a second."""
        begin_s = self._clock() - WINDOW_S
        while self._arrivals and self._arrivals[0][0] <= begin_s:
            self._arrivals.popleft()
        return sum(count for _, count in self._arrivals) / WINDOW_S
