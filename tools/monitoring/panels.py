"""Panels of the dashboard, row by row: titles, descriptions and queries."""

from __future__ import annotations

from tools.monitoring.panel import Panel, Row, Unit
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
from tools.monitoring.speculation_panels import ACCEPTED, DRAFTED, SPECULATION

FIRST_TOKEN = "time_to_first_token_seconds"


def _stat(title: str, meaning: str, expr: str, unit: Unit = "short") -> Panel:
    return Panel(title, meaning, (Query(expr, title),), unit, "stat")


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
            "Requests finished per second by reason, where each choice counts as one; errors "
            "of calls by gRPC status code.",
            (
                Query(
                    rate("request_success_total", "finished_reason", 'finished_reason!="error"'),
                    "{{finished_reason}}",
                ),
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
            "Replicas, targets and draft models lost within the last hour, and moves among draft "
            "workers.",
            (
                Query(f"increase({series('fleet_replicas_lost_total')}[1h])", "replicas"),
                Query(f"sum(increase({series('target_restarts_total')}[1h]))", "targets"),
                Query(
                    f"sum(increase({series('draft_worker_restarts_total')}[1h]))", "draft models"
                ),
                Query(f"sum(increase({series('draft_worker_moves_total')}[1h]))", "moves"),
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
