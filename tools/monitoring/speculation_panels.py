"""Panels of speculation: what is drafted and accepted, what it gains, and why."""

from __future__ import annotations

from specdec.engine.metrics.metric_definitions import FORMER_REASON
from tools.monitoring.panel import Panel, Row
from tools.monitoring.queries import Query, rate, ratio, series, total

DRAFTED, ACCEPTED = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
AHEAD_HITS = "spec_decode_ahead_hits_total"
AHEAD_MISSES = "spec_decode_ahead_misses_total"
DRAFTS = "spec_decode_num_drafts_total"
ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos_total"
REACHED_AT = "spec_decode_num_reached_tokens_per_pos_total"
DRAFTED_BY = "spec_decode_num_draft_tokens_by_method_total"
ACCEPTED_BY = "spec_decode_num_accepted_tokens_by_method_total"
DRAFTS_OF = "spec_decode_num_drafts_by_version_total"
DRAFTED_OF = "spec_decode_num_draft_tokens_by_version_total"
ACCEPTED_OF = "spec_decode_num_accepted_tokens_by_version_total"
DRAFTS_WITH = "spec_decode_num_drafts_by_adapter_total"
DRAFTED_WITH = "spec_decode_num_draft_tokens_by_adapter_total"
ACCEPTED_WITH = "spec_decode_num_accepted_tokens_by_adapter_total"


def _share_of_drafts(part: str, by: str) -> str:
    return f"{rate(part, by)} / on () group_left () {rate(DRAFTS)}"


_DECISIONS = rate("speculation_decisions_total", "reason", f'reason!="{FORMER_REASON}"')

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
            (Query(_DECISIONS, "{{reason}}"),),
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
            "Conditional acceptance by position",
            "Of the draft tokens whose predecessors were all accepted, the fraction accepted too.",
            (Query(ratio(ACCEPTED_AT, REACHED_AT, "position"), "{{position}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Steps with drafts",
            "Fraction of the target's forward passes that verified a draft.",
            (Query(ratio("spec_decode_num_drafted_steps_total", "engine_steps_total"), "steps"),),
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
            "Tokens per second relative to no drafts, of all steps and of the last decision; below "
            "1, drafting is slower. docs/metrics.md documents the estimates.",
            (
                Query(ratio("decode_undrafted_seconds_total", "decode_spent_seconds_total"), "all"),
                Query(series("speculation_estimated_speedup"), "{{replica}}"),
            ),
            "x",
        ),
        Panel(
            "Step time over profile",
            "Seconds of decode steps, as the policy corrects its table, over those of the profile "
            "of the start; above 1.3 something else uses the device.",
            (Query(series("decode_step_profile_error"), "{{replica}}"),),
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
