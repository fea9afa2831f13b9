"""How much of a replica the present load takes, in requests, for the autoscaler to judge."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_WINDOW_S = 10.0


class ReplicaLoad:
    """Open requests; or the share of its capacity that a replica uses, where that tells more.

    With little to do a replica speculates, answers sooner, and has few requests open. Were those
    alone to decide, a replica would seem to be one too many, be given up, and be missed at once:
    the others would shed their drafts and fill their queues until it came back. So the rate of
    tokens counts too, against the most that the replica could make with as many requests as it is
    meant to have, drafts or none: a replica that makes half of that is half full.
    """

    def __init__(self, target_requests: float, clock: Callable[[], float]) -> None:
        """target_requests: how many open requests a replica is meant to have at most."""
        self._target_requests = target_requests
        self._clock = clock
        self._made: deque[tuple[float, int]] = deque()

    def requests(
        self, num_open: int, num_generated_tokens: int, capacity_tokens_per_s: float | None
    ) -> float:
        """The load in requests, to be asked every few seconds.

        num_generated_tokens: since the replica started. capacity_tokens_per_s: None where it is not
        known, and open requests have to do.
        """
        rate = self._rate(num_generated_tokens)
        if not capacity_tokens_per_s:
            return float(num_open)
        return max(float(num_open), self._target_requests * rate / capacity_tokens_per_s)

    def _rate(self, num_tokens: int) -> float:
        """Tokens a second over the last ten seconds; 0 at first."""
        now_s = self._clock()
        self._made.append((now_s, num_tokens))
        while len(self._made) > 2 and self._made[1][0] <= now_s - _WINDOW_S:
            self._made.popleft()
        since_s, before = self._made[0]
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0
