# Modules: cluster.observability.metric_aliases, cluster.observability.metric_definitions
"""Metric definitions and their text, read by the parsers of Prometheus' client."""

import math
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cluster.observability.metric_definitions import (
    CONNECTION_METRICS,
    FLEET_METRICS,
    REPLICA_METRICS,
    FleetView,
)
from cluster.observability.prometheus_text import expose, fleet_families, replica_families
from specdec.client import (
    Counts,
    FleetStatistics,
    HistogramCounts,
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
    SpeculationState,
)
from specdec.engine.metrics.metrics import CHAT, SERVER_LATENCIES, Metrics
from specdec.types.control import SpeculationControl
from specdec.types.reports.fleet import MemoryUse
from specdec.types.reports.service_curve import ServiceCurve
from specdec.types.reports.stats import AdaptersInUse, AheadCounts, SpeculationStats
from tests.cluster.scraped import OPEN_METRICS, families, open_families, samples

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "metrics.md"
DEFINITIONS = (*REPLICA_METRICS, *FLEET_METRICS, *CONNECTION_METRICS)
CONTROL = SpeculationControl("auto", threshold=32, num_speculative_tokens=3)
STATE = SpeculationState(CONTROL, CONTROL, CONTROL, (), 4, None, "", "")

OPERATIONS = Metrics()
OPERATIONS.observe_operation(CHAT, dict.fromkeys(SERVER_LATENCIES, 0.5))

FULL = ReplicaReport(
    "full",
    is_ready=True,
    num_running=5,
    num_waiting=2,
    num_decoding=4,
    kv_cache_usage=0.25,
    is_speculation_on=True,
    speculation_version=4,
    num_chosen_tokens=3,
    decision_reason="goodput",
    estimated_speedup=1.5,
    estimated_tokens_per_s=120.0,
    profile_error=1.6,
    head_probe_acceptance=0.75,
    drafter_version=2,
    service_curve=ServiceCurve((1, 16), (100.0, 25.0), 5000.0),
    mode="auto",
    is_draft_worker_up=False,
    memory=MemoryUse(10, 100, 30, 80, 20),
    block_size=16,
    num_kv_blocks=400,
    num_snapshots=4,
    state_bytes=36_000,
    max_loras=2,
    adapters_in_use=AdaptersInUse(("chat", "sql"), (), ("chat", "code", "sql")),
    at_s=1.7e9,
    counts=Counts(
        num_requests=9,
        num_prompt_tokens=60,
        num_cached_tokens=16,
        num_saved_states=6,
        num_resumed_tokens=24,
        num_stateless_tokens=8,
        speculation=SpeculationStats(3, 8, 6),
        accepted_by_position=(3, 3, 0),
        drafted_by_position=(3, 3, 2),
        decisions={"goodput": 7, "probe": 1},
        decided_lengths=(1, 0, 0, 7),
        measured_s={"3": 0.5},
        profiled_s={"3": 0.25},
        spent_s=0.75,
        undrafted_s=1.5,
        num_drafted_steps=2,
        reached_by_position=(3, 2, 1),
        drafted_by_method={"ngram": (1, 1), "draft_model": (2, 2, 2)},
        accepted_by_method={"ngram": (1, 0), "draft_model": (2, 2, 1)},
        ended={"length": 2, "stop": 0, "abort": 1},
        failed={"INTERNAL": 1},
        histograms=Metrics().histograms | {"batch_size": HistogramCounts((1.0, 2.0), (3, 0, 1), 9)},
        drafts_by_version={"2": SpeculationStats(2, 6, 5)},
        tokens_by_adapter={"sql": 7},
        drafts_by_adapter={"sql": SpeculationStats(1, 3, 2)},
        num_drafter_rollbacks=1,
        num_catch_up_tokens=33,
        ahead=AheadCounts({"0": 5, "2": 1}, {"0": 3}, 40, 12, 0.5),
        num_target_restarts=1,
        num_draft_restarts=2,
        num_receipts=5,
        audits={"equal": 4, "impossible": 1},
        num_audited_tokens=70,
        server_latencies=OPERATIONS.server_latencies,
    ),
)
LOADING = ReplicaReport("loading", is_ready=False, reason="the model is loading")


def fleet_of(*reports, num_expected=2):
    replicas = tuple(ReplicaStatus(each, uptime_s=60.0, age_s=0.5) for each in reports)
    fleet = FleetStatistics(
        datetime(2026, 1, 2, tzinfo=UTC),
        ServiceStatus(replicas, STATE, num_lost_replicas=3),
        requests_per_s=2.5,
        totals=Counts(),
        replicas_needed=3,
    )
    return FleetView(fleet, num_expected)


def fleet_text(*reports):
    return expose(fleet_families({"m": fleet_of(*reports)}), "").body.decode()


def test_the_documentation_lists_exactly_the_defined_metrics():
    rows = re.findall(
        r"^\| `(specdec:\w+)(?:\{([\w, ]+)\})?` \| (\w+) \|",
        DOCUMENTATION.read_text(),
        re.MULTILINE,
    )
    documented = [(name, type_, tuple(re.findall(r"\w+", labels))) for name, labels, type_ in rows]
    assert documented == [(each.exposed_name, each.type, each.labels) for each in DEFINITIONS]


def test_names_are_unique():
    assert len({each.name for each in DEFINITIONS}) == len(DEFINITIONS)


def test_every_metric_is_exposed_with_its_type():
    """A report with a value for every field gives every metric a series."""
    status = ReplicaStatus(FULL, 60.0, 0.0)
    text = (
        fleet_text(FULL)
        + expose(replica_families("m", status, is_connected=True), "").body.decode()
    )
    exposed = {name: each.type for name, each in families(text).items() if each.samples}
    assert exposed == {each.name: each.type for each in DEFINITIONS}


def test_every_series_has_the_documented_labels_and_no_other():
    labels = {each.name: set(each.labels) for each in DEFINITIONS}
    for name, family in families(fleet_text(FULL)).items():
        about = {"model_name"} if name.startswith("fleet_") else {"model_name", "replica"}
        bucket = {"le"} if family.type == "histogram" else set()
        for sample in family.samples:
            assert set(sample.labels) - bucket == labels[name] | about, sample


def test_the_hand_worked_values_of_a_report():
    found = samples(fleet_text(FULL), "full")
    expected = {
        ("num_requests_running",): 5,
        ("num_requests_waiting",): 2,
        ("num_requests_decoding",): 4,
        ("kv_cache_usage_perc",): 0.25,
        ("requests_received_total",): 9,
        ("request_success_total", "length"): 2,
        ("request_success_total", "abort"): 1,
        ("request_success_total", "stop"): 0,
        ("request_failure_total", "INTERNAL"): 1,
        ("batch_size_bucket", "1.0"): 3,
        ("batch_size_bucket", "2.0"): 3,
        ("batch_size_bucket", "+Inf"): 4,
        ("batch_size_count",): 4,
        ("batch_size_sum",): 9,
        ("spec_decode_num_drafts_total",): 3,
        ("spec_decode_num_draft_tokens_total",): 8,
        ("spec_decode_num_accepted_tokens_total",): 6,
        ("spec_decode_num_rejected_tokens_total",): 2,
        ("spec_decode_num_accepted_tokens_per_pos_total", "1"): 3,
        ("spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
        ("spec_decode_num_draft_tokens_by_method_total", "draft_model", "2"): 2,
        ("spec_decode_num_accepted_tokens_by_method_total", "draft_model", "2"): 1,
        ("spec_decode_num_accepted_tokens_by_method_total", "ngram", "1"): 0,
        ("spec_decode_num_catch_up_tokens_total",): 33,
        ("spec_decode_num_drafts_by_version_total", "2"): 2,
        ("generation_tokens_by_adapter_total", "sql"): 7,
        ("spec_decode_num_accepted_tokens_by_adapter_total", "sql"): 2,
        ("spec_decode_num_draft_tokens_by_version_total", "2"): 6,
        ("spec_decode_num_accepted_tokens_by_version_total", "2"): 5,
        ("spec_decode_ahead_hits_total", "0"): 5,
        ("spec_decode_ahead_hits_total", "2"): 1,
        ("spec_decode_ahead_misses_total", "0"): 3,
        ("spec_decode_num_ahead_tokens_total",): 40,
        ("spec_decode_num_ahead_tokens_used_total",): 12,
        ("spec_decode_ahead_busy_seconds_total",): 0.5,
        ("drafter_version",): 2,
        ("drafter_rollbacks_total",): 1,
        ("speculation_mode", "auto"): 1,
        ("speculation_mode", "on"): 0,
        ("speculation_mode", "off"): 0,
        ("speculation_in_force",): 1,
        ("speculation_control_version",): 4,
        ("speculation_chosen_tokens",): 3,
        ("speculation_steps_total", "3"): 7,
        ("speculation_steps_total", "0"): 1,
        ("decode_step_seconds_total", "3"): 0.5,
        ("decode_step_profiled_seconds_total", "3"): 0.25,
        ("decode_step_profile_error",): 1.6,
        ("decode_spent_seconds_total",): 0.75,
        ("decode_undrafted_seconds_total",): 1.5,
        ("spec_decode_num_drafted_steps_total",): 2,
        ("spec_decode_num_reached_tokens_per_pos_total", "1"): 2,
        ("replica_resident_memory_bytes",): 10,
        ("node_memory_bytes",): 100,
        ("node_memory_used_bytes",): 30,
        ("gpu_memory_bytes",): 80,
        ("gpu_memory_used_bytes",): 20,
        ("speculation_decisions_total", "goodput"): 7,
        ("speculation_decisions_total", "threshold"): 0,
        ("speculation_estimated_speedup",): 1.5,
        ("goodput_tokens_per_second",): 120,
        ("speculation_head_probe_acceptance",): 0.75,
        ("state_snapshots",): 4,
        ("state_bytes",): 36_000,
        ("state_snapshots_saved_total",): 6,
        ("state_resumed_tokens_total",): 24,
        ("state_recomputed_tokens_total",): 8,
        ("replica_ready",): 1,
        ("draft_worker_up",): 0,
        ("draft_worker_restarts_total",): 2,
        ("target_restarts_total",): 1,
        ("replica_uptime_seconds",): 60,
        ("replica_report_age_seconds",): 0.5,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_unknown_values_have_no_series():
    found = {key[0] for key in samples(fleet_text(LOADING), "loading")}
    unknown = ("speculation_mode", "speculation_control_version", "draft_worker_up")
    assert found.isdisjoint((*unknown, "speculation_estimated_speedup", "batch_size_count"))
    assert samples(fleet_text(LOADING), "loading")["replica_ready",] == 0


def test_replicas_have_labels_and_the_fleet_has_separate_series():
    text = fleet_text(FULL, LOADING)
    assert samples(text, "full")["generation_tokens_total",] == 0
    assert samples(text, "loading")["num_requests_running",] == 0
    assert samples(text, None) == {
        ("fleet_replicas_ready",): 1,
        ("fleet_replicas_expected",): 2,
        ("fleet_replicas_needed",): 3,
        ("fleet_replicas_lost_total",): 3,
        ("fleet_requests_per_second",): 2.5,
        ("fleet_control_version",): 4,
    }


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_replica_reports_whether_the_control_plane_answers(is_connected):
    status = ReplicaStatus(FULL, uptime_s=60.0, age_s=0.0)
    text = expose(replica_families("m", status, is_connected=is_connected), "").body.decode()
    assert samples(text, "full")["control_plane_up",] == is_connected
    assert samples(text, "full")["num_requests_running",] == 5
    assert samples(text, None) == {}


def test_both_formats_have_the_same_samples():
    made = fleet_families({"m": fleet_of(FULL, LOADING)})
    plain, opened = expose(made, "text/plain"), expose(made, OPEN_METRICS)
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    assert opened.content_type.startswith("application/openmetrics-text")
    by_text, by_open = families(plain.body.decode()), open_families(opened.body.decode())
    assert by_text.keys() == by_open.keys()
    for name, family in by_text.items():
        assert family.samples == by_open[name].samples, name


VLLM_DASHBOARD = [
    "e2e_request_latency_seconds_bucket",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "request_time_per_output_token_seconds_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_inference_time_seconds_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "iteration_tokens_total_bucket",
    "cache_config_info",
    "lora_requests_info",
]


SGLANG_DASHBOARD = [
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "cache_hit_rate",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "spec_accept_length",
    "spec_accept_rate",
]


# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics
OTEL_BOUNDS = {
    "gen_ai_server_request_duration_seconds": tuple(0.01 * 2**power for power in range(14)),
    "gen_ai_server_time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
}
PREFIXES = {"none": set(), "vllm": {"vllm"}, "sglang": {"sglang"}, "otel": set(OTEL_BOUNDS)}
PREFIXES["all"] = set().union(*PREFIXES.values())


def exposed_names(**options):
    made = fleet_families({"m": fleet_of(FULL)}, **options)
    lines = expose(made, "").body.decode().splitlines()
    return {re.split(r"[ {]", line)[0] for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(("aliases", "prefixes"), PREFIXES.items())
def test_aliases_are_exposed_beside_our_names_on_request(aliases, prefixes):
    names, ours = exposed_names(aliases=aliases), exposed_names()
    assert ours <= names
    series = re.compile(r"_(bucket|count|sum)$")
    assert {series.sub("", name).split(":")[0] for name in names - ours} == prefixes
    of_engine = {"vllm": VLLM_DASHBOARD, "sglang": SGLANG_DASHBOARD}
    engines = prefixes & of_engine.keys()
    assert {f"{engine}:{name}" for engine in engines for name in of_engine[engine]} <= names


def test_metrics_of_opentelemetry_have_its_attributes_and_bucket_boundaries():
    families = fleet_families({"m": fleet_of(FULL)}, aliases="otel")
    made = {each.name: each.samples for each in families if each.name in OTEL_BOUNDS}
    for name, bounds in OTEL_BOUNDS.items():
        buckets = [each for each in made[name] if each.name == f"{name}_bucket"]
        assert [float(each.labels.pop("le")) for each in buckets] == [*bounds, math.inf]
        assert buckets[0].labels == {
            "model_name": "m",
            "replica": "full",
            "gen_ai_operation_name": "chat",
            "gen_ai_provider_name": "specdec",
            "gen_ai_request_model": "m",
            "gen_ai_response_model": "m",
            "error_type": "",
        }


def test_aliases_have_the_values_of_our_metrics():
    status = ReplicaStatus(FULL, 60.0, 0.0)
    made = replica_families("m", status, is_connected=True, aliases="all")
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in made
        for sample in family.samples
    }
    about = ("m", "full")
    assert values["vllm:prefix_cache_queries_total", *about] == 60
    assert values["vllm:prefix_cache_hits_total", *about] == 16
    assert values["vllm:cache_config_info", *about, "16", "400"] == 1
    assert values["vllm:lora_requests_info", *about, "2", "chat,sql", "", "chat,code,sql"] == 1.7e9
    assert values["vllm:spec_decode_num_drafts_total", *about] == 3
    assert values["sglang:num_running_reqs", *about] == 5
    assert values["sglang:spec_accept_length", *about] == 3.0
    assert values["sglang:spec_accept_rate", *about] == 0.75


def test_a_search_for_speculative_finds_something():
    text = expose(fleet_families({"m": fleet_of(FULL)}), "").body.decode()
    assert any("speculative" in line for line in text.splitlines())


def test_metrics_of_vllm_dashboards_exist_with_our_prefix():
    found = {key[0] for key in samples(fleet_text(FULL), "full")}
    assert [name for name in VLLM_DASHBOARD if name not in found] == []
