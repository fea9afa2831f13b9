"""Panels of the dashboard, row by row: titles, descriptions and queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.engine.metrics.metric_definitions import FORMER_REASON
from tools.monitoring.queries import (
    Query,
    mean,
    quantile,
    quantiles,
    rate,
    ratio,
    series,
    total,
)

Unit = Literal["short", "percentunit", "s", "reqps", "tokens/s", "steps/s", "x"]
Kind = Literal["stat", "lines", "stacked"]

DRAFTED, ACCEPTED = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
AHEAD_HITS = "spec_decode_ahead_hits_total"
AHEAD_MISSES = "spec_decode_ahead_misses_total"
DRAFTS = "spec_decode_num_drafts_total"
ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos_total"
DRAFTED_BY = "spec_decode_num_draft_tokens_by_method_total"
ACCEPTED_BY = "spec_decode_num_accepted_tokens_by_method_total"
DRAFTS_OF = "spec_decode_num_drafts_by_version_total"
DRAFTED_OF = "spec_decode_num_draft_tokens_by_version_total"
_DECISIONS = rate("speculation_decisions_total", "reason", f'reason!="{FORMER_REASON}"')
ACCEPTED_OF = "spec_decode_num_accepted_tokens_by_version_total"
DRAFTS_WITH = "spec_decode_num_drafts_by_adapter_total"
DRAFTED_WITH = "spec_decode_num_draft_tokens_by_adapter_total"
ACCEPTED_WITH = "spec_decode_num_accepted_tokens_by_adapter_total"
FIRST_TOKEN = "time_to_first_token_seconds"


@dataclass(frozen=True)
class Panel:
    """Panel of the dashboard. most: the maximum of its axis; None adapts it to the values."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    kind: Kind = "lines"
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """Row of related panels."""

    title: str
    panels: tuple[Panel, ...]


def _stat(title: str, meaning: str, expr: str, unit: Unit = "short") -> Panel:
    return Panel(title, meaning, (Query(expr, title),), unit, "stat")


def _share_of_drafts(part: str, by: str) -> str:
    return f"{rate(part, by)} / on () group_left () {rate(DRAFTS)}"


SERVICE = Row(
    "Service",
    (
        _stat(
            "Requests",
            "Requests received per second, over all replicas and the last ten seconds.",
            series("fleet_requests_per_second"),
            "reqps",
        ),
        _stat(
            "Throughput",
            "Tokens generated per second.",
            rate("generation_tokens_total"),
            "tokens/s",
        ),
        _stat(
            "Time to first token, p95",
            "95 % of the requests received their first token within this time.",
            quantile(0.95, FIRST_TOKEN),
            "s",
        ),
        _stat(
            "Acceptance",
            "Accepted draft tokens divided by all draft tokens.",
            ratio(ACCEPTED, DRAFTED),
            "percentunit",
        ),
        _stat(
            "Speed-up",
            "Estimated tokens per second relative to no drafts; mean over the replicas.",
            f"avg({series('speculation_estimated_speedup')})",
            "x",
        ),
        _stat(
            "Replicas ready",
            "Replicas that are ready to serve requests.",
            series("fleet_replicas_ready"),
        ),
    ),
)

TRAFFIC = Row(
    "Traffic and latency",
    (
        Panel(
            "Finished requests",
            "Requests finished per second, by finish reason; errors by gRPC status code.",
            (
                Query(rate("request_success_total", "finished_reason"), "{{finished_reason}}"),
                Query(rate("request_failure_total", "code"), "{{code}}"),
            ),
            "reqps",
        ),
        Panel(
            "Tokens",
            "Prompt tokens, prompt tokens found in the prefix cache, and generated tokens.",
            (
                Query(rate("prompt_tokens_total"), "prompt"),
                Query(rate("prompt_tokens_cached_total"), "prompt, cached"),
                Query(rate("generation_tokens_total"), "generated"),
            ),
            "tokens/s",
        ),
        Panel(
            "Time to first token",
            "From the arrival of a request to its first token, including the queue.",
            quantiles(FIRST_TOKEN),
            "s",
        ),
        Panel(
            "Inter-token latency",
            "Between two steps that produced tokens for a choice; with drafts, several per step.",
            quantiles("inter_token_latency_seconds"),
            "s",
        ),
        Panel(
            "Request latency",
            "From arrival to the last token.",
            quantiles("e2e_request_latency_seconds"),
            "s",
        ),
        Panel(
            "Request phases",
            "Mean time in the queue, from the first step to the first token, and to the last.",
            (
                Query(mean("request_queue_time_seconds"), "queue"),
                Query(mean("request_prefill_time_seconds"), "prefill"),
                Query(mean("request_decode_time_seconds"), "decode"),
            ),
            "s",
            "stacked",
        ),
        Panel(
            "Prompt length",
            "Prompt tokens per request.",
            quantiles("request_prompt_tokens"),
        ),
        Panel(
            "Output length",
            "Generated tokens per request, over all its choices.",
            quantiles("request_generation_tokens"),
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        Panel(
            "Mode in force",
            "Number of replicas per mode, including the active rule, and of those that draft now.",
            (
                Query(total("speculation_mode", "mode"), "mode {{mode}}"),
                Query(total("speculation_in_force"), "drafting"),
            ),
        ),
        Panel(
            "Chosen draft tokens",
            "Draft tokens per sequence in the latest step, by replica.",
            (Query(series("speculation_chosen_tokens"), "{{replica}}"),),
        ),
        Panel(
            "Steps by draft length",
            "Steps per second with each draft length, including 0.",
            (Query(rate("speculation_steps_total", "num_draft_tokens"), "{{num_draft_tokens}}"),),
            "steps/s",
            "stacked",
        ),
        Panel(
            "Decisions by reason",
            "Reasons for the draft length; docs/control.md lists them.",
            (Query(rate("speculation_decisions_total", "reason"), "{{reason}}"),),
            "steps/s",
            "stacked",
        ),
        Panel(
            "Acceptance rate by method",
            "Accepted draft tokens divided by all draft tokens, by speculation method.",
            (Query(ratio(ACCEPTED_BY, DRAFTED_BY, "method"), "{{method}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Acceptance rate by version",
            "Accepted draft tokens divided by all draft tokens of a draft head, by its version.",
            (Query(ratio(ACCEPTED_OF, DRAFTED_OF, "version"), "{{version}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Acceptance length by version",
            "Tokens per draft of a draft head, including the target's own token, by its version.",
            (Query(f"1 + {ratio(ACCEPTED_OF, DRAFTS_OF, 'version')}", "{{version}}"),),
        ),
        Panel(
            "Acceptance rate by adapter",
            "Fraction of the draft tokens accepted, of requests with a LoRA adapter.",
            (Query(ratio(ACCEPTED_WITH, DRAFTED_WITH, "adapter"), "{{adapter}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Acceptance length by adapter",
            "Tokens per draft, including the target's own token, of requests with a LoRA adapter.",
            (Query(f"1 + {ratio(ACCEPTED_WITH, DRAFTS_WITH, 'adapter')}", "{{adapter}}"),),
        ),
        Panel(
            "Acceptance by position",
            "Fraction of all drafts accepted at each position; 0 is the first position.",
            (Query(_share_of_drafts(ACCEPTED_AT, "position"), "{{position}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Head probe",
            "Acceptance of a draft head's first tokens in the probe at start-up; below 40 % the "
            "head was probably misread, or belongs to another target.",
            (Query(series("speculation_head_probe_acceptance"), "{{replica}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Acceptance length",
            "Tokens per draft, including the target's own token.",
            (Query(f"1 + {ratio(ACCEPTED, DRAFTS)}", "tokens"),),
        ),
        Panel(
            "Draft tokens",
            "Draft tokens verified per second, by result.",
            (
                Query(rate(ACCEPTED), "accepted"),
                Query(rate("spec_decode_num_rejected_tokens_total"), "rejected"),
            ),
            "tokens/s",
            "stacked",
        ),
        Panel(
            "Estimated speed-up",
            "Tokens per second relative to no drafts; below 1, drafting is slower. docs/metrics.md "
            "documents the estimate.",
            (Query(series("speculation_estimated_speedup"), "{{replica}}"),),
            "x",
        ),
        Panel(
            "Goodput",
            "Tokens per second expected from the cost table and acceptance, and actual ones.",
            (
                Query(total("goodput_tokens_per_second"), "expected"),
                Query(rate("generation_tokens_total"), "generated"),
            ),
            "tokens/s",
        ),
        Panel(
            "Catch-up and lookahead tokens",
            "Text that the draft model processed to catch up, and guesses of lookahead decoding.",
            (
                Query(rate("spec_decode_num_catch_up_tokens_total"), "catch-up"),
                Query(rate("spec_decode_num_lookahead_tokens_total"), "lookahead"),
            ),
            "tokens/s",
        ),
        Panel(
            "Late drafts",
            "Steps that went on without drafts because the draft worker was slow.",
            (Query(rate("spec_decode_num_late_drafts_total"), "late"),),
            "steps/s",
        ),
        Panel(
            "Drafts made ahead",
            "Part of the rows whose next draft was made ahead and in time; part of these draft "
            "tokens that the target verified; part of the draft device's time that they took.",
            (
                Query(f"{rate(AHEAD_HITS)} / ({rate(AHEAD_HITS)} + {rate(AHEAD_MISSES)})", "hits"),
                Query(
                    ratio(
                        "spec_decode_num_ahead_tokens_used_total",
                        "spec_decode_num_ahead_tokens_total",
                    ),
                    "used tokens",
                ),
                Query(rate("spec_decode_ahead_busy_seconds_total"), "draft device"),
            ),
            "percentunit",
        ),
        Panel(
            "Control version",
            "Latest version of the operator settings, and the version each replica applies.",
            (
                Query(series("fleet_control_version"), "set"),
                Query(series("speculation_control_version"), "{{replica}}"),
            ),
        ),
    ),
)

STEPS = Row(
    "Steps and memory",
    (
        Panel(
            "Requests in the engine",
            "Decoding; running, including prefill; and waiting.",
            (
                Query(total("num_requests_decoding"), "decoding"),
                Query(total("num_requests_running"), "running"),
                Query(total("num_requests_waiting"), "waiting"),
            ),
        ),
        Panel(
            "Batch size",
            "Choices of requests that received tokens from a step.",
            quantiles("batch_size"),
        ),
        Panel(
            "KV cache",
            "Fraction of the KV blocks in use, by replica.",
            (Query(series("kv_cache_usage_perc"), "{{replica}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Cached prompts",
            "Fraction of prompt tokens found in the prefix cache.",
            (Query(ratio("prompt_tokens_cached_total", "prompt_tokens_total"), "cached"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Draft time",
            "Time that a step waited for its drafts.",
            quantiles("draft_time_seconds"),
            "s",
        ),
        Panel(
            "Verification time",
            "From sending a step to the target to receiving its result.",
            quantiles("verify_time_seconds"),
            "s",
        ),
        Panel(
            "Steps",
            "Forward passes of the target, those sent before the previous one had ended, and "
            "prompt chunks other than the last of a prompt.",
            (
                Query(rate("engine_steps_total"), "steps"),
                Query(rate("engine_steps_ahead_total"), "begun ahead"),
                Query(rate("prefill_chunks_total"), "prefill chunks"),
            ),
            "steps/s",
        ),
        Panel(
            "Preemptions",
            "Preempted requests per second, whose KV blocks were released.",
            (Query(rate("num_preemptions_total"), "preemptions"),),
            "reqps",
        ),
    ),
)

FAILURES = Row(
    "Failures",
    (
        Panel(
            "Replicas",
            "Replicas that are ready, and replicas required at any load.",
            (
                Query(series("fleet_replicas_ready"), "ready"),
                Query(series("fleet_replicas_expected"), "expected"),
            ),
        ),
        Panel(
            "Restarts and losses",
            "Replicas, targets and draft models lost within the last hour.",
            (
                Query(f"increase({series('fleet_replicas_lost_total')}[1h])", "replicas"),
                Query(f"sum(increase({series('target_restarts_total')}[1h]))", "targets"),
                Query(
                    f"sum(increase({series('draft_worker_restarts_total')}[1h]))", "draft models"
                ),
            ),
        ),
        Panel(
            "Draft worker",
            "1 while the draft worker of a replica is running; empty without a draft model.",
            (Query(series("draft_worker_up"), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Control plane",
            "1 while the control plane responds to the scraped replica.",
            (Query(series("control_plane_up"), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Report age",
            "Normally up to 30 s when idle, and about one second under load.",
            (Query(series("replica_report_age_seconds"), "{{replica}}"),),
            "s",
        ),
        Panel(
            "Uptime",
            "Time since the process of each replica started to serve.",
            (Query(series("replica_uptime_seconds"), "{{replica}}"),),
            "s",
        ),
        Panel(
            "Readiness",
            "1 while a replica is ready to serve requests.",
            (Query(series("replica_ready"), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Received requests",
            "Requests received per second by replica; each choice counts as one.",
            (Query(rate("requests_received_total", "replica"), "{{replica}}"),),
            "reqps",
        ),
    ),
)

ROWS = (SERVICE, TRAFFIC, SPECULATION, STEPS, FAILURES)
