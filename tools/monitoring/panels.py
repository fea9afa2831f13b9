"""The panels of the dashboard, row by row: what they ask and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
DRAFTS = "spec_decode_num_drafts_total"
ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos_total"
DRAFTED_BY = "spec_decode_num_draft_tokens_by_method_total"
ACCEPTED_BY = "spec_decode_num_accepted_tokens_by_method_total"
FIRST_TOKEN = "time_to_first_token_seconds"


@dataclass(frozen=True)
class Panel:
    """One panel. most: where its axis ends; None where that follows the values."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    kind: Kind = "lines"
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels that belong together."""

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
            "Requests that arrived a second, over all replicas and the last ten seconds.",
            series("fleet_requests_per_second"),
            "reqps",
        ),
        _stat(
            "Throughput", "Tokens generated a second.", rate("generation_tokens_total"), "tokens/s"
        ),
        _stat(
            "First token, p95",
            "Of twenty requests, nineteen had their first token within this time.",
            quantile(0.95, FIRST_TOKEN),
            "s",
        ),
        _stat(
            "Acceptance",
            "Share of the draft tokens that became output.",
            ratio(ACCEPTED, DRAFTED),
            "percentunit",
        ),
        _stat(
            "Speed-up",
            "Tokens a second over those without drafts, as estimated, mean over the replicas.",
            f"avg({series('speculation_estimated_speedup')})",
            "x",
        ),
        _stat("Replicas ready", "Replicas that answer requests.", series("fleet_replicas_ready")),
    ),
)

TRAFFIC = Row(
    "Traffic and latency",
    (
        Panel(
            "Ends of requests",
            "Requests that ended a second, by why; errors by gRPC status code.",
            (
                Query(rate("request_success_total", "finished_reason"), "{{finished_reason}}"),
                Query(rate("request_failure_total", "code"), "{{code}}"),
            ),
            "reqps",
        ),
        Panel(
            "Tokens",
            "Prompt tokens that came, those the prefix cache had, and tokens generated.",
            (
                Query(rate("prompt_tokens_total"), "prompt"),
                Query(rate("prompt_tokens_cached_total"), "prompt, cached"),
                Query(rate("generation_tokens_total"), "generated"),
            ),
            "tokens/s",
        ),
        Panel(
            "Time to first token",
            "From a request's arrival to its first token, queue included.",
            quantiles(FIRST_TOKEN),
            "s",
        ),
        Panel(
            "Inter-token latency",
            "Between two steps that brought tokens to a choice; with drafts, several tokens each.",
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
            "Phases of a request",
            "Mean time in the queue, from there to the first token, and from that to the last.",
            (
                Query(mean("request_queue_time_seconds"), "queue"),
                Query(mean("request_prefill_time_seconds"), "prefill"),
                Query(mean("request_decode_time_seconds"), "decode"),
            ),
            "s",
            "stacked",
        ),
        Panel(
            "Length of prompts",
            "Tokens of a request's prompt.",
            quantiles("request_prompt_tokens"),
        ),
        Panel(
            "Length of answers",
            "Tokens generated for a request, all its choices together.",
            quantiles("request_generation_tokens"),
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        Panel(
            "Mode in force",
            "Replicas by mode, with the rule that holds; and those that draft at this moment.",
            (
                Query(total("speculation_mode", "mode"), "mode {{mode}}"),
                Query(total("speculation_in_force"), "drafting"),
            ),
        ),
        Panel(
            "Chosen draft tokens",
            "Draft tokens of a sequence in the latest step, by replica.",
            (Query(series("speculation_chosen_tokens"), "{{replica}}"),),
        ),
        Panel(
            "Steps by number of draft tokens",
            "How many steps a second went with each number, 0 included.",
            (Query(rate("speculation_steps_total", "num_draft_tokens"), "{{num_draft_tokens}}"),),
            "steps/s",
            "stacked",
        ),
        Panel(
            "Decisions by reason",
            "Why steps drafted as much as they did; docs/control.md lists the reasons.",
            (Query(rate("speculation_decisions_total", "reason"), "{{reason}}"),),
            "steps/s",
            "stacked",
        ),
        Panel(
            "Acceptance rate by method",
            "Share of the draft tokens that became output, by what made the draft.",
            (Query(ratio(ACCEPTED_BY, DRAFTED_BY, "method"), "{{method}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Acceptance by position",
            "Share of all drafts that were accepted up to there; 0 is the first position.",
            (Query(_share_of_drafts(ACCEPTED_AT, "position"), "{{position}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Mean acceptance length",
            "Tokens that a draft yields, the target's own included.",
            (Query(f"1 + {ratio(ACCEPTED, DRAFTS)}", "tokens"),),
        ),
        Panel(
            "Draft tokens",
            "Draft tokens verified a second, by what came of them.",
            (
                Query(rate(ACCEPTED), "accepted"),
                Query(rate("spec_decode_num_rejected_tokens_total"), "rejected"),
            ),
            "tokens/s",
            "stacked",
        ),
        Panel(
            "Estimated speed-up",
            "Tokens a second over those without drafts; below 1 drafting costs. docs/metrics.md "
            "says how it is estimated.",
            (Query(series("speculation_estimated_speedup"), "{{replica}}"),),
            "x",
        ),
        Panel(
            "Goodput",
            "Tokens a second that the cost table and acceptance promise, beside what came.",
            (
                Query(total("goodput_tokens_per_second"), "expected"),
                Query(rate("generation_tokens_total"), "generated"),
            ),
            "tokens/s",
        ),
        Panel(
            "Work beside drafts",
            "Text that the draft model ran to catch up, and guesses of lookahead decoding.",
            (
                Query(rate("spec_decode_num_catch_up_tokens_total"), "catch-up"),
                Query(rate("spec_decode_num_lookahead_tokens_total"), "lookahead"),
            ),
            "tokens/s",
        ),
        Panel(
            "Control version",
            "What operators have set last, and what each replica goes by.",
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
            "Decoding, running with those in prefill, and waiting.",
            (
                Query(total("num_requests_decoding"), "decoding"),
                Query(total("num_requests_running"), "running"),
                Query(total("num_requests_waiting"), "waiting"),
            ),
        ),
        Panel(
            "Batch size",
            "Choices of requests that a step brought tokens to.",
            quantiles("batch_size"),
        ),
        Panel(
            "KV cache",
            "Part of the KV blocks in use, by replica.",
            (Query(series("kv_cache_usage_perc"), "{{replica}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Cached prompts",
            "Share of prompt tokens whose KV the prefix cache had.",
            (Query(ratio("prompt_tokens_cached_total", "prompt_tokens_total"), "cached"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Drafting",
            "What a step waited for its drafts.",
            quantiles("draft_time_seconds"),
            "s",
        ),
        Panel(
            "Verification",
            "From handing the target a step to having its answer.",
            quantiles("verify_time_seconds"),
            "s",
        ),
        Panel(
            "Steps",
            "Forward passes of the target, and parts of prompts that left more to do.",
            (
                Query(rate("engine_steps_total"), "steps"),
                Query(rate("prefill_chunks_total"), "prefill chunks"),
            ),
            "steps/s",
        ),
        Panel(
            "Preemptions",
            "Requests that gave up their KV blocks, a second.",
            (Query(rate("num_preemptions_total"), "preemptions"),),
            "reqps",
        ),
    ),
)

FAILURES = Row(
    "What can break",
    (
        Panel(
            "Replicas",
            "Those that answer requests, and those that there have to be at any load.",
            (
                Query(series("fleet_replicas_ready"), "ready"),
                Query(series("fleet_replicas_expected"), "expected"),
            ),
        ),
        Panel(
            "Losses",
            "Replicas, targets and draft models that were lost, in the hour before.",
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
            "1 while a replica's draft model has a worker; empty without a draft model.",
            (Query(series("draft_worker_up"), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Control plane",
            "1 while the control plane answers the replica that was scraped.",
            (Query(series("control_plane_up"), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Age of reports",
            "Up to 30 s at rest, about a second under load.",
            (Query(series("replica_report_age_seconds"), "{{replica}}"),),
            "s",
        ),
        Panel(
            "Uptime",
            "Since each replica's process began to serve.",
            (Query(series("replica_uptime_seconds"), "{{replica}}"),),
            "s",
        ),
        Panel(
            "Readiness",
            "1 while a replica answers requests.",
            (Query(series("replica_ready"), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Arrivals",
            "Requests that come, each choice counted as one, by replica.",
            (Query(rate("requests_received_total", "replica"), "{{replica}}"),),
            "reqps",
        ),
    ),
)

ROWS = (SERVICE, TRAFFIC, SPECULATION, STEPS, FAILURES)
