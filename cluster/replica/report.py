"""The decisions of an engine as a replica reports them to the ControlPlane."""

from __future__ import annotations

from datetime import datetime, timedelta

from specdec.types.fleet import DecisionNews
from specdec.types.stats import EngineStats

_MAX_CHANGES = 32
"""A report is small and sent every second; a decision holds for a second at least."""


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
