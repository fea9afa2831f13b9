"""Load of a replica in requests, for the autoscaler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_WINDOW_S = 10.0


class ReplicaLoad:
    """The larger of open requests and used capacity.

    At low load a replica speculates, answers sooner and has few open requests. By those alone the
    autoscaler would remove a replica that is needed: the others would stop drafting and fill their
    queues until it is added again. So the token rate counts too, relative to the capacity with the
    target number of requests: a replica that generates half of that has half the target load.
    """

    def __init__(self, target_requests: float, clock: Callable[[], float]) -> None:
        """target_requests: the intended maximum of open requests per replica."""
        self._target_requests = target_requests
        self._clock = clock
        self._made: deque[tuple[float, int]] = deque()

    def requests(
        self, num_open: int, num_generated_tokens: int, capacity_tokens_per_s: float | None
    ) -> float:
        """Return the load in requests; call it every few seconds.

        num_generated_tokens: since the replica started. capacity_tokens_per_s: None where unknown,
        in which case only open requests count.
        """
        rate = self._rate(num_generated_tokens)
        if not capacity_tokens_per_s:
            return float(num_open)
        return max(float(num_open), self._target_requests * rate / capacity_tokens_per_s)

    def _rate(self, num_tokens: int) -> float:
        """Return tokens per second over the last ten seconds; 0 at first."""
        now_s = self._clock()
        self._made.append((now_s, num_tokens))
        while len(self._made) > 2 and self._made[1][0] <= now_s - _WINDOW_S:
            self._made.popleft()
        since_s, before = self._made[0]
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0
