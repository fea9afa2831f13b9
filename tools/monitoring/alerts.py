"""What is worth waking somebody for, or looking at in the morning; docs/runbook.md says what to do.

No alert goes off for an idle service, nor for the seconds in which a replica or the control plane
is made again: whatever heals by itself is given the time for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RUNBOOK = "docs/runbook.md"

Severity = Literal["warning", "critical"]


@dataclass(frozen=True)
class Alert:
    """A rule of Prometheus. holds_for: how long `expr` must yield something before it goes off."""

    name: str
    expr: str
    holds_for: str
    severity: Severity
    summary: str

    @property
    def runbook(self) -> str:
        """Where it says what to do: each alert has a heading of its name."""
        return f"{RUNBOOK}#{self.name.lower()}"


ALERTS = (
    Alert(
        "SpecdecAcceptanceLow",
        """
        sum by (model_name) (rate(specdec:spec_decode_num_accepted_tokens_total[10m]))
          / sum by (model_name) (rate(specdec:spec_decode_num_draft_tokens_total[10m])) < 0.2
        and sum by (model_name) (rate(specdec:spec_decode_num_draft_tokens_total[10m])) > 1
        """,
        "15m",
        "warning",
        "Only {{ $value | humanizePercentage }} of the draft tokens of {{ $labels.model_name }} "
        "become output.",
    ),
    Alert(
        "SpecdecSpeculationSlower",
        """
        specdec:speculation_estimated_speedup < 0.95
        and rate(specdec:generation_tokens_total[5m]) > 0
        """,
        "10m",
        "warning",
        "Drafting makes replica {{ $labels.replica }} of {{ $labels.model_name }} slower: "
        '{{ $value | printf "%.2f" }} times the tokens a second without it.',
    ),
    Alert(
        "SpecdecKvCacheNearlyFull",
        "specdec:kv_cache_usage_perc > 0.95",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the KV cache of replica {{ $labels.replica }} of "
        "{{ $labels.model_name }} is taken.",
    ),
    Alert(
        "SpecdecRequestsFailing",
        """
        sum by (model_name, code) (
          rate(specdec:request_failure_total{code=~"INTERNAL|RESOURCE_EXHAUSTED"}[5m])
        )
          / on (model_name) group_left ()
        (
          sum by (model_name) (rate(specdec:request_success_total[5m]))
            + sum by (model_name) (rate(specdec:request_failure_total[5m]))
        ) > 0.05
        """,
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model_name }} end in "
        "{{ $labels.code }}.",
    ),
    Alert(
        "SpecdecQueueLong",
        # By its level: a queue that is full grows no more, and what it has no room for is refused.
        "specdec:num_requests_waiting > 10",
        "10m",
        "warning",
        "For ten minutes requests have waited on replica {{ $labels.replica }} of "
        "{{ $labels.model_name }}: {{ $value }} do now.",
    ),
    Alert(
        "SpecdecTimeToFirstTokenHigh",
        """
        histogram_quantile(
          0.95,
          sum by (model_name, le) (rate(specdec:time_to_first_token_seconds_bucket[5m]))
        ) > 5
        """,
        "10m",
        "warning",
        "One request in twenty to {{ $labels.model_name }} waits "
        "{{ $value | humanizeDuration }} or longer for its first token.",
    ),
    Alert(
        "SpecdecDraftWorkerAway",
        "specdec:draft_worker_up == 0",
        "5m",
        "warning",
        "Replica {{ $labels.replica }} of {{ $labels.model_name }} has gone without its draft "
        "model for five minutes.",
    ),
    Alert(
        "SpecdecReplicaMissing",
        "specdec:fleet_replicas_ready < specdec:fleet_replicas_expected",
        "5m",
        "critical",
        "Replicas of {{ $labels.model_name }} that answer requests: {{ $value }}, fewer than there "
        "have to be.",
    ),
    Alert(
        "SpecdecCrashLoop",
        """
        increase(specdec:fleet_replicas_lost_total[15m]) > 2
        or increase(specdec:target_restarts_total[15m]) > 2
        or increase(specdec:draft_worker_restarts_total[15m]) > 2
        """,
        "0m",
        "critical",
        "Replicas or models of {{ $labels.model_name }} are made again and again: "
        "{{ $value | humanize }} times in 15 minutes.",
    ),
    Alert(
        "SpecdecReplicasDisagree",
        """
        max by (model_name) (specdec:speculation_control_version)
          - min by (model_name) (specdec:speculation_control_version) > 0
        """,
        "2m",
        "warning",
        "Replicas of {{ $labels.model_name }} go by different versions of what operators have set.",
    ),
    Alert(
        "SpecdecControlPlaneUnreachable",
        # Behind Serve's ingress each scrape may come to another replica.
        "max by (model_name) (specdec:control_plane_up) == 0",
        "2m",
        "critical",
        "The control plane does not answer the replicas of {{ $labels.model_name }}.",
    ),
    Alert(
        "SpecdecFleetUnreachable",
        'up{job="specdec"} == 0',
        "5m",
        "critical",
        "{{ $labels.instance }} does not tell of the service, so most other alerts are blind.",
    ),
    Alert(
        "SpecdecUnreachable",
        'up{job="specdec-replica"} == 0',
        "2m",
        "critical",
        "Nothing answers at {{ $labels.instance }}.",
    ),
)
