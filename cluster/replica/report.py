"""What a Router tells the ControlPlane of its engine, as plain numbers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypedDict

from specdec.types.fleet import DecisionNews
from specdec.types.stats import EngineStats

_MOST_CHANGES = 32
"""A report is small, and comes every second; a decision holds for a second at least."""


class DecisionFields(TypedDict):
    """The part of a ReplicaReport that is about decisions."""

    num_chosen_tokens: int
    decision_reason: str
    decision_changes: tuple[DecisionNews, ...]


def decision_fields(stats: EngineStats, now_s: float, now: datetime) -> DecisionFields:
    """now_s, now: the same moment by the policy's clock and by the wall's."""
    decision = stats.decision if stats.decisions else None
    changes = tuple(
        DecisionNews(
            _moment(now, now_s - change.at_s),
            change.num_draft_tokens,
            change.reason.value,
            change.num_decoding,
        )
        for change in stats.decision_changes[-_MOST_CHANGES:]
    )
    return DecisionFields(
        num_chosen_tokens=decision.num_draft_tokens if decision else 0,
        decision_reason=decision.reason.value if decision else "",
        decision_changes=changes,
    )


def _moment(now: datetime, age_s: float) -> datetime:
    """In tenths of a second, so that the same change is told alike a second later, mostly."""
    at = now - timedelta(seconds=age_s)
    return at.replace(microsecond=at.microsecond // 100_000 * 100_000)
