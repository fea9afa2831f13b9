"""Reports of a replica: its load to the autoscaler, its decisions to the ControlPlane."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta

from specdec.types.reports.fleet import DecisionNews
from specdec.types.reports.stats import EngineStats

_WINDOW_S = 10.0
_MAX_CHANGES = 32
"""A report is small and sent every second; a decision holds for a second at least."""


class ReplicaLoad:
    """The larger of open requests and used capacity.

    At low load a replica speculates, answers sooner and has few open requests. By those alone the
    autoscaler would remove a replica that is needed: the others would stop drafting and fill their
    queues until it is added again. So the token rate counts too, relative to the capacity with the
    target number of requests: a replica that generates half of that has half the target load.
    """

    def __init__(self, target_requests: float, clock: Callable[[], float]) -> None:
        """target_requests: the intended maximum of open requests per replica."""
        self.target_requests = target_requests
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
        return max(float(num_open), self.target_requests * rate / capacity_tokens_per_s)

    def _rate(self, num_tokens: int) -> float:
        """Return tokens per second over the last ten seconds; 0 at first."""
        now_s = self._clock()
        self._made.append((now_s, num_tokens))
        while len(self._made) > 2 and self._made[1][0] <= now_s - _WINDOW_S:
            self._made.popleft()
        since_s, before = self._made[0]
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0


def decision_news(stats: EngineStats, now_s: float, now: datetime) -> tuple[DecisionNews, ...]:
    """Return the latest changes. now_s, now: the same moment by policy clock and wall clock."""
    return tuple(
        DecisionNews(
            _moment(now, now_s - change.at_s),
            change.num_draft_tokens,
            change.reason.value,
            change.num_decoding,
        )
        for change in stats.decision_changes[-_MAX_CHANGES:]
    )


def _moment(now: datetime, age_s: float) -> datetime:
    """Round to tenths of a second, so that the same change has the same time in the next report."""
    at = now - timedelta(seconds=age_s)
    return at.replace(microsecond=at.microsecond // 100_000 * 100_000)
