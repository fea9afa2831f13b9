"""Alerts of Prometheus; docs/runbook.md documents what to do about each.

No alert fires for an idle service, nor while a replica or the control plane restarts: each alert
waits long enough for automatic recovery. Aggregations are by `namespace` and `service`, too, which
Prometheus adds on Kubernetes, since several releases may serve one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RUNBOOK = "docs/runbook.md"

Severity = Literal["warning", "critical"]


@dataclass(frozen=True)
class Alert:
    """Alerting rule of Prometheus. holds_for: how long `expr` must be true before it fires."""

    name: str
    expr: str
    holds_for: str
    severity: Severity
    summary: str

    @property
    def runbook(self) -> str:
        """Return the link to the section of the runbook, whose heading is the name of the alert."""
        return f"{RUNBOOK}#{self.name.lower()}"


ALERTS = (
    Alert(
        "SpecdecAcceptanceLow",
        """
        sum by (namespace, service, model_name) (
          rate(specdec:spec_decode_num_accepted_tokens_total[10m])
        )
          / sum by (namespace, service, model_name) (
            rate(specdec:spec_decode_num_draft_tokens_total[10m])
          ) < 0.2
        and sum by (namespace, service, model_name) (
          rate(specdec:spec_decode_num_draft_tokens_total[10m])
        ) > 1
        """,
        "15m",
        "warning",
        "Only {{ $value | humanizePercentage }} of the draft tokens of {{ $labels.model_name }} "
        "are accepted.",
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
        '{{ $value | printf "%.2f" }} times the tokens per second without drafts.',
    ),
    Alert(
        "SpecdecStepsSlowerThanProfiled",
        """
        specdec:decode_step_profile_error > 1.3
        and rate(specdec:generation_tokens_total[5m]) > 0
        """,
        "10m",
        "warning",
        "Decode steps of replica {{ $labels.replica }} of {{ $labels.model_name }} take "
        '{{ $value | printf "%.2f" }} times the seconds of the profile of its start.',
    ),
    Alert(
        "SpecdecKvCacheNearlyFull",
        "specdec:kv_cache_usage_perc > 0.95",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the KV cache of replica {{ $labels.replica }} of "
        "{{ $labels.model_name }} is in use.",
    ),
    Alert(
        "SpecdecRequestsFailing",
        """
        sum by (namespace, service, model_name, code) (
          rate(specdec:request_failure_total{code=~"INTERNAL|RESOURCE_EXHAUSTED"}[5m])
        )
          / on (namespace, service, model_name) group_left ()
        (
          sum by (namespace, service, model_name) (
            rate(specdec:e2e_request_latency_seconds_count[5m])
          )
            + sum by (namespace, service, model_name) (rate(specdec:request_failure_total[5m]))
        ) > 0.05
        """,
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model_name }} end in "
        "{{ $labels.code }}.",
    ),
    Alert(
        "SpecdecQueueLong",
        # The level, not the growth: a full queue stops growing and rejects further requests.
        "specdec:num_requests_waiting > 10",
        "10m",
        "warning",
        "More than ten requests have waited on replica {{ $labels.replica }} of "
        "{{ $labels.model_name }} for ten minutes: {{ $value }} now.",
    ),
    Alert(
        "SpecdecTimeToFirstTokenHigh",
        """
        histogram_quantile(
          0.95,
          sum by (namespace, service, model_name, le) (
            rate(specdec:time_to_first_token_seconds_bucket[5m])
          )
        ) > 5
        """,
        "10m",
        "warning",
        "The 95th percentile of the time to first token of {{ $labels.model_name }} is "
        "{{ $value | humanizeDuration }}.",
    ),
    Alert(
        "SpecdecDraftWorkerAway",
        "specdec:draft_worker_up == 0",
        "5m",
        "warning",
        "The draft worker of replica {{ $labels.replica }} of {{ $labels.model_name }} has been "
        "down for five minutes.",
    ),
    Alert(
        "SpecdecReplicaMissing",
        "specdec:fleet_replicas_ready < specdec:fleet_replicas_expected",
        "5m",
        "critical",
        "Ready replicas of {{ $labels.model_name }}: {{ $value }}, fewer than configured.",
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
        "Replicas or models of {{ $labels.model_name }} failed {{ $value | humanize }} times in 15 "
        "minutes.",
    ),
    Alert(
        "SpecdecAuditFailed",
        'increase(specdec:audits_total{outcome="impossible"}[1h]) > 0',
        "0m",
        "critical",
        "Replica {{ $labels.replica }} of {{ $labels.model_name }} gave answers that its model "
        "does not sample again.",
    ),
    Alert(
        "SpecdecReplicasDisagree",
        """
        max by (namespace, service, model_name) (specdec:speculation_control_version)
          - min by (namespace, service, model_name) (specdec:speculation_control_version) > 0
        """,
        "2m",
        "warning",
        "Replicas of {{ $labels.model_name }} apply different versions of the operator settings.",
    ),
    Alert(
        "SpecdecControlPlaneUnreachable",
        # Through Serve's ingress, each scrape may reach a different replica.
        "max by (namespace, service, model_name) (specdec:control_plane_up) == 0",
        "2m",
        "critical",
        "The control plane does not respond to the replicas of {{ $labels.model_name }}.",
    ),
    Alert(
        "SpecdecFleetUnreachable",
        'up{job="specdec"} == 0',
        "5m",
        "critical",
        "Scrapes of /metrics at {{ $labels.instance }} fail, so most other alerts have no data.",
    ),
    Alert(
        "SpecdecUnreachable",
        'up{job="specdec-replica"} == 0',
        "2m",
        "critical",
        "Nothing responds at {{ $labels.instance }}.",
    ),
    Alert(
        "SpecdecNotScraped",
        'absent(up{job="specdec"}) or absent(up{job="specdec-replica"})',
        "5m",
        "critical",
        "Prometheus has no target with the job {{ $labels.job }}, so other alerts have no data.",
    ),
)
