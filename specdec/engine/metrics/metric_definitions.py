"""The metrics of an engine: name, type, labels, meaning and source.

Names, types and labels are vLLM's where it has the metric, with our own prefix. A service exposes
them for each replica, `LLM.get_metrics` for its engine. A counter is defined here and counted in a
field of `Counts`; no other file lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from specdec.engine.metrics.metrics import HISTOGRAMS
from specdec.types.control import SPECULATION_MODES
from specdec.types.drafts.draft_decision import DecisionReason
from specdec.types.reports.stats import Counts, EngineReport, HistogramCounts

PREFIX = "specdec:"
VLLM_PREFIX = "vllm:"
MODEL_LABEL = "model_name"

FORMER_REASON = "drafter_away"
"""Until 0.2, DRAFTER_UNAVAILABLE is counted under its former name too, for queries that have it."""

MetricType = Literal["gauge", "counter", "histogram"]
Source = TypeVar("Source")

Read = str | Callable[[Any], Any]
"""How a metric is read: a function, or the dotted name of an attribute."""


@dataclass(frozen=True)
class Reading:
    """One value of a metric. labels: values of the metric's own labels, in order."""

    value: float | HistogramCounts
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricSpec(Generic[Source]):
    """Definition of one metric. read: returns its values; none where they are unknown.

    name: without the prefix and, for a counter, without `_total`. labels: in addition to the model
    and, in a service, the replica. prefix: of an alias, another engine's. model_labels: further
    ones with the name of the served model.
    """

    name: str
    type: MetricType
    meaning: str
    read: Callable[[Source], Iterable[Reading]]
    labels: tuple[str, ...] = ()
    prefix: str = PREFIX
    model_labels: tuple[str, ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name in queries; a histogram's series add _bucket, _sum and _count."""
        return self.family_name + ("_total" if self.type == "counter" else "")

    @property
    def family_name(self) -> str:
        """The name with its prefix."""
        return self.prefix + self.name


def gauge(name: str, meaning: str, read: Read) -> MetricSpec[Any]:
    """Define a gauge; no series where it is None."""
    value = _reader(read)

    def readings(source: Any) -> Iterable[Reading]:
        return () if (found := value(source)) is None else (Reading(found),)

    return MetricSpec(name, "gauge", meaning, readings)


def counter(name: str, meaning: str, read: Read) -> MetricSpec[EngineReport]:
    """Define a counter, read from a report's `counts`."""
    value = _reader(read)
    return MetricSpec(name, "counter", meaning, lambda report: (Reading(value(report.counts)),))


def counters(name: str, meaning: str, label: str, read: Read) -> MetricSpec[EngineReport]:
    """Define a counter with one label, read as a mapping from a report's `counts`."""
    by_label = _reader(read)

    def readings(report: EngineReport) -> Iterable[Reading]:
        return (Reading(count, (value,)) for value, count in by_label(report.counts).items())

    return MetricSpec(name, "counter", meaning, readings, (label,))


def by_method(name: str, meaning: str, read: Read) -> MetricSpec[EngineReport]:
    """Define a counter by method and position, read from a report's `counts`."""
    positions_by_method = _reader(read)

    def readings(report: EngineReport) -> Iterable[Reading]:
        for method, by_position in positions_by_method(report.counts).items():
            for position, count in enumerate(by_position):
                yield Reading(count, (method, str(position)))

    return MetricSpec(name, "counter", meaning, readings, ("method", "position"))


def drafts_by(label: str, read: str, meaning: str) -> MetricSpec[EngineReport]:
    """Define a counter of the drafts of each "version" or "adapter"; read: a field of theirs."""
    drafts = attrgetter(f"drafts_by_{label}")

    def read_all(counts: Counts) -> dict[str, float]:
        return {name: getattr(each, read) for name, each in drafts(counts).items()}

    return counters(f"spec_decode_{read}_by_{label}", meaning, label, read_all)


def _histogram(name: str, meaning: str) -> MetricSpec[EngineReport]:
    """Define the report's histogram of that name; no series before it has one."""

    def readings(report: EngineReport) -> Iterable[Reading]:
        counts = report.counts.histograms.get(name)
        return () if counts is None else (Reading(counts),)

    return MetricSpec(name, "histogram", meaning, readings)


def _info(
    name: str,
    meaning: str,
    value: Callable[[EngineReport], float],
    **labels: Callable[[EngineReport], object],
) -> MetricSpec[Any]:
    """Define a gauge whose labels are facts; no series where one of them is None."""

    def readings(report: EngineReport) -> Iterable[Reading]:
        values = [read(report) for read in labels.values()]
        return () if None in values else (Reading(value(report), tuple(map(str, values))),)

    return MetricSpec(name, "gauge", meaning, readings, tuple(labels))


def _reader(read: Read) -> Callable[[Any], Any]:
    return attrgetter(read) if isinstance(read, str) else read


def _modes(report: EngineReport) -> Iterable[Reading]:
    return (Reading(report.mode == each, (each,)) for each in SPECULATION_MODES if report.mode)


def _by_streams(report: EngineReport) -> Iterable[Reading]:
    if (curve := report.service_curve) is not None:
        for count, rate in zip(curve.num_streams, curve.stream_tokens_per_s, strict=True):
            yield Reading(rate, (str(count),))


def _indexed(values: Iterable[int]) -> dict[str, float]:
    return {str(index): value for index, value in enumerate(values)}


def _reasons(counts: Counts) -> dict[str, float]:
    by_reason = {each.value: counts.decisions.get(each.value, 0) for each in DecisionReason}
    return {**by_reason, FORMER_REASON: by_reason[DecisionReason.DRAFTER_UNAVAILABLE]}


ENGINE_METRICS: tuple[MetricSpec[EngineReport], ...] = (
    # Load.
    gauge("num_requests_running", "Running requests; each choice counts as one.", "num_running"),
    gauge("num_requests_decoding", "Running requests past their prompt.", "num_decoding"),
    gauge("num_requests_waiting", "Queued requests; each choice counts as one.", "num_waiting"),
    gauge("kv_cache_usage_perc", "Part of the KV blocks in use, from 0 to 1.", "kv_cache_usage"),
    _info(
        "cache_config_info",
        "1, with the size of the KV cache in its labels.",
        lambda report: 1,
        block_size=lambda report: report.block_size or None,
        num_gpu_blocks=lambda report: report.num_kv_blocks or None,
    ),
    gauge("state_snapshots", "Snapshots of states of recurrent layers.", "num_snapshots"),
    gauge("state_bytes", "Bytes of states of running requests and of snapshots.", "state_bytes"),
    _info(
        "lora_requests_info",
        "When the adapters of running and of queued requests were those in its labels.",
        lambda report: report.at_s,
        max_lora=lambda report: report.max_loras or None,
        running_lora_adapters=lambda report: ",".join(report.adapters_in_use.running),
        waiting_lora_adapters=lambda report: ",".join(report.adapters_in_use.waiting),
        loaded_lora_adapters=lambda report: ",".join(report.adapters_in_use.loaded),
    ),
    # Requests and tokens.
    counter("requests_received", "Received requests; each choice counts as one.", "num_requests"),
    counters(
        "request_success",
        "Ended requests; each choice counts as one.",
        "finished_reason",
        "ended",
    ),
    counter("engine_steps", "Forward passes of the target.", "num_steps"),
    counter(
        "engine_steps_ahead", "Steps begun before the previous one had ended.", "num_steps_ahead"
    ),
    counter("prompt_tokens", "Prompt tokens, counted for each choice.", "num_prompt_tokens"),
    counter("prompt_tokens_cached", "Prompt tokens with cached KV.", "num_cached_tokens"),
    counter("state_snapshots_saved", "Snapshots of states that were taken.", "num_saved_states"),
    counter("state_resumed_tokens", "Tokens not computed for a snapshot.", "num_resumed_tokens"),
    counter(
        "state_recomputed_tokens",
        "Tokens with cached KV computed again, for want of a snapshot after them.",
        "num_stateless_tokens",
    ),
    counter("generation_tokens", "Generated tokens.", "num_generated_tokens"),
    counters(
        "generation_tokens_by_adapter",
        "Generated tokens with a LoRA adapter.",
        "adapter",
        "tokens_by_adapter",
    ),
    counter("prefill_chunks", "Chunks before the last one of a prompt.", "num_prefill_chunks"),
    counter("num_preemptions", "Requests preempted and recomputed.", "num_preemptions"),
    # Receipts.
    counter("receipts_issued", "Signed receipts of answers.", "num_receipts"),
    counters("audits", "Audited answers by outcome.", "outcome", "audits"),
    counter("audited_tokens", "Tokens that audits compared.", "num_audited_tokens"),
    # Latencies and sizes.
    *(_histogram(name, meaning) for name, (meaning, _) in HISTOGRAMS.items()),
    # Drafts.
    counter(
        "spec_decode_num_drafts",
        "Verified drafts of speculative decoding.",
        "speculation.num_drafts",
    ),
    counter(
        "spec_decode_num_draft_tokens", "Verified draft tokens.", "speculation.num_draft_tokens"
    ),
    counter(
        "spec_decode_num_accepted_tokens",
        "Accepted draft tokens.",
        "speculation.num_accepted_tokens",
    ),
    counter(
        "spec_decode_num_rejected_tokens",
        "Rejected draft tokens.",
        lambda c: c.speculation.num_draft_tokens - c.speculation.num_accepted_tokens,
    ),
    counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by their position in the draft, from 0.",
        "position",
        lambda c: _indexed(c.accepted_by_position),
    ),
    by_method(
        "spec_decode_num_draft_tokens_by_method", "Verified draft tokens.", "drafted_by_method"
    ),
    by_method(
        "spec_decode_num_accepted_tokens_by_method", "Accepted draft tokens.", "accepted_by_method"
    ),
    drafts_by("version", "num_drafts", "Verified drafts."),
    drafts_by("version", "num_draft_tokens", "Verified draft tokens."),
    drafts_by("version", "num_accepted_tokens", "Accepted draft tokens."),
    drafts_by("adapter", "num_drafts", "Verified drafts."),
    drafts_by("adapter", "num_draft_tokens", "Verified draft tokens."),
    drafts_by("adapter", "num_accepted_tokens", "Accepted draft tokens."),
    gauge("drafter_version", "Version of the draft head in use.", "drafter_version"),
    counter(
        "drafter_rollbacks",
        "Versions of the draft head that were replaced for their acceptance.",
        "num_drafter_rollbacks",
    ),
    counter(
        "spec_decode_num_drafted_steps",
        "Forward passes of the target that verified a draft.",
        "num_drafted_steps",
    ),
    counters(
        "spec_decode_num_reached_tokens_per_pos",
        "Draft tokens by position of which all earlier ones of the draft were accepted.",
        "position",
        lambda c: _indexed(c.reached_by_position),
    ),
    counter("spec_decode_num_lookahead_tokens", "Lookahead tokens run.", "num_lookahead_tokens"),
    counter(
        "spec_decode_num_catch_up_tokens",
        "Catch-up tokens of the draft model.",
        "num_catch_up_tokens",
    ),
    counter(
        "spec_decode_num_late_drafts",
        "Steps that did not wait for a slow draft worker.",
        "num_late_drafts",
    ),
    counters(
        "spec_decode_ahead_hits",
        "Rows whose next draft was made ahead and in time, by accepted drafts.",
        "num_accepted",
        "ahead.hits",
    ),
    counters(
        "spec_decode_ahead_misses",
        "Rows whose next draft was not among those made ahead, by accepted drafts.",
        "num_accepted",
        "ahead.misses",
    ),
    counter("spec_decode_num_ahead_tokens", "Draft tokens made ahead.", "ahead.num_tokens"),
    counter(
        "spec_decode_num_ahead_tokens_used",
        "Draft tokens made ahead that the target verified.",
        "ahead.num_used_tokens",
    ),
    counter(
        "spec_decode_ahead_busy_seconds",
        "Seconds of the draft model's passes for drafts ahead.",
        "ahead.busy_s",
    ),
    # Control of speculation.
    MetricSpec("speculation_mode", "gauge", "1 for the mode in force, else 0.", _modes, ("mode",)),
    gauge("speculation_in_force", "1 while requests draft by default.", "is_speculation_on"),
    gauge("speculation_chosen_tokens", "Draft tokens of a sequence.", "num_chosen_tokens"),
    counters(
        "speculation_steps",
        "Steps by their draft length.",
        "num_draft_tokens",
        lambda c: _indexed(c.decided_lengths),
    ),
    counters("speculation_decisions", "Steps by the reason of their decision.", "reason", _reasons),
    counters(
        "decode_step_seconds",
        "Seconds of decode steps, as measured.",
        "num_draft_tokens",
        "measured_s",
    ),
    counters(
        "decode_step_profiled_seconds",
        "Seconds of the same steps, by the profile of the start.",
        "num_draft_tokens",
        "profiled_s",
    ),
    gauge(
        "decode_step_profile_error",
        "Seconds of the latest kind of decode steps, over those of the profile of the start.",
        "profile_error",
    ),
    counter("decode_spent_seconds", "Seconds of decode steps, with waiting for drafts.", "spent_s"),
    counter(
        "decode_undrafted_seconds",
        "Estimated seconds of the tokens of the same steps without drafts.",
        "undrafted_s",
    ),
    gauge(
        "speculation_estimated_speedup", "Estimated speedup over no drafts.", "estimated_speedup"
    ),
    gauge(
        "speculation_head_probe_acceptance",
        "Acceptance of a head's first draft token at start-up, from 0 to 1.",
        "head_probe_acceptance",
    ),
    gauge("goodput_tokens_per_second", "Estimated tokens per second.", "estimated_tokens_per_s"),
    MetricSpec(
        "expected_stream_tokens_per_second",
        "gauge",
        "Expected tokens per second of each of a number of running streams.",
        _by_streams,
        ("streams",),
    ),
    gauge(
        "expected_prompt_tokens_per_second",
        "Expected prompt tokens per second, cached ones aside.",
        lambda report: report.service_curve and report.service_curve.prompt_tokens_per_s,
    ),
)

VLLM_NAMES = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("request_success", "prompt_tokens", "generation_tokens", "num_preemptions"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
        *("request_inference_time_seconds", "request_time_per_output_token_seconds"),
        *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
        *("iteration_tokens_total", "cache_config_info", "lora_requests_info"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
    }
)
"""Metrics that vLLM has too, with the same name, type and meaning."""
