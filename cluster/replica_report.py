"""What a Router tells the ControlPlane of its engine, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypedDict

from cluster.metrics import Metrics
from specdec.client import Counts, DecisionNews
from specdec.stats import EngineStats

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


@dataclass(frozen=True)
class ModelCounts:
    """How often each model was made again, and what the draft model has run to catch up."""

    num_target_restarts: int = 0
    num_draft_restarts: int = 0
    num_catch_up_tokens: int = 0


def counts_of(
    stats: EngineStats, num_requests: int, metrics: Metrics, models: ModelCounts
) -> Counts:
    """What the replica has done since it started."""
    return Counts(
        num_requests=num_requests,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_steps=stats.num_steps,
        speculation=stats.speculation,
        accepted_by_position=stats.accepted_by_position,
        drafted_by_position=stats.drafted_by_position,
        drafted_by_method=stats.drafted_by_method,
        accepted_by_method=stats.accepted_by_method,
        decisions={reason.value: count for reason, count in stats.decisions.items()},
        decided_lengths=stats.decided_lengths,
        histograms=metrics.histograms,
        ended=metrics.ended,
        failed=metrics.failed,
        num_cached_tokens=stats.num_cached_tokens,
        num_prefill_chunks=stats.num_prefill_chunks,
        num_preemptions=stats.num_preemptions,
        num_lookahead_tokens=stats.num_lookahead_tokens,
        num_catch_up_tokens=models.num_catch_up_tokens,
        num_target_restarts=models.num_target_restarts,
        num_draft_restarts=models.num_draft_restarts,
    )


def _moment(now: datetime, age_s: float) -> datetime:
    """In tenths of a second, so that the same change is told alike a second later, mostly."""
    at = now - timedelta(seconds=age_s)
    return at.replace(microsecond=at.microsecond // 100_000 * 100_000)
