"""Reports from the metrics of this service, of vLLM and of SGLang."""

import math
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from cluster.api.endpoint_picker.reports import (
    OUTPUT_TOKENS,
    EndpointReport,
    expected_output_tokens,
    metric_names,
    parse_report,
)
from cluster.control.replica_scaler import Totals
from cluster.observability.prometheus_text import expose, replica_families
from specdec.types.reports.fleet import ReplicaReport, ReplicaStatus
from specdec.types.reports.service_curve import ServiceCurve
from specdec.types.reports.stats import AdaptersInUse, Counts

CURVE = ServiceCurve((1, 16), (100.0, 25.0), 5000.0)
HUGE = {
    **dict.fromkeys(("requests_received_total", "prompt_tokens_total"), 1e308),
    "request_success_total": 1e308,
}

VLLM = """
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="200",engine="1"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters="c"} 20.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 10.0
vllm:time_to_first_token_seconds_bucket{le="0.1"} 5.0
"""

SGLANG = """
sglang:num_running_reqs{model_name="m"} 2.0
sglang:num_queue_reqs{model_name="m"} 5.0
sglang:token_usage{model_name="m"} 0.5
sglang:cache_config_info{page_size="64",num_pages="10"} 1.0
"""


def test_vllms_engines_are_added():
    assert parse_report(VLLM) == EndpointReport(
        num_running=7,
        num_waiting=1,
        kv_cache_usage=0.75,
        cache_tokens=4800,
        adapters=frozenset("abc"),
        max_adapters=4,
        num_decoding=7,
    )


def test_sglangs_names():
    expected = EndpointReport(2, 5, 0.5, 640, num_decoding=2)
    assert parse_report(SGLANG) == expected
    assert parse_report(SGLANG + VLLM) == parse_report(VLLM), "one server's names alone are read"


@pytest.mark.parametrize("aliases", ["none", "all"])
def test_this_services_own_metrics(aliases):
    report = ReplicaReport(
        "r",
        is_ready=True,
        num_running=5,
        num_waiting=2,
        num_decoding=3,
        kv_cache_usage=0.25,
        block_size=16,
        num_kv_blocks=10,
        max_loras=2,
        adapters_in_use=AdaptersInUse(("a",), ("b",), ("a", "b", "c")),
        service_curve=CURVE,
        counts=Counts(
            num_requests=9,
            num_prompt_tokens=1000,
            num_cached_tokens=300,
            num_generated_tokens=500,
            ended={"stop": 3, "abort": 1},
        ),
    )
    families = replica_families(
        "m",
        ReplicaStatus(report, 1.0, 0.0),
        is_connected=True,
        names=metric_names(has_objective=True),
        aliases=aliases,
    )
    text = expose(families, "").body.decode()
    loaded = frozenset("abc")
    expected = EndpointReport(5, 2, 0.25, 160, frozenset("ab"), 2, True, loaded | {"m"}, loaded)
    expected = replace(expected, num_decoding=3, curve=CURVE)
    expected = replace(expected, totals=Totals(9, 700, 500, 3 + 1))
    expected = replace(expected, output_tokens=expected_output_tokens(500, 3))
    assert parse_report(text) == expected


@pytest.mark.parametrize("rate", ["-1", "0", "1e999"])
def test_a_curve_that_is_none_is_left_out(rate):
    text = f'specdec:expected_stream_tokens_per_second{{streams="1"}} {rate}\n'
    text += "specdec:expected_prompt_tokens_per_second 5\nspecdec:num_requests_running 1\n"
    assert parse_report(text).curve is None


def test_a_server_without_adapters_names_its_model():
    text = 'specdec:num_requests_running{model_name="m"} 1\n'
    assert parse_report(text).models == {"m"}
    former = text + 'specdec:lora_requests_info{max_lora="2",running_lora_adapters="a"} 1\n'
    assert parse_report(former).models is None, "of a version that does not name all adapters"
    assert parse_report(text.replace("specdec", "vllm")).models is None


@pytest.mark.parametrize(
    "text", ["", "<html>", "vllm:num_requests_waiting 1", "vllm:num_requests_running NaN", "\0"]
)
def test_a_text_without_the_number_of_requests_is_refused(text):
    with pytest.raises(ValueError):
        parse_report(text)


@pytest.mark.parametrize(
    "line",
    [
        'vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1',
        'vllm:cache_config_info{block_size="-5",num_gpu_blocks="7"} 1',
        'vllm:lora_requests_info{max_lora="x"} 1',
        "vllm:kv_cache_usage_perc -Inf",
        "vllm:num_requests_waiting -3",
        "vllm:expected_prompt_tokens_per_second 0",
        'vllm:expected_stream_tokens_per_second{streams="1"} 7',
    ],
)
def test_values_that_make_no_sense_are_left_out(line):
    report = parse_report(f"vllm:num_requests_running 1\n{line}\n")
    most = report.max_adapters
    assert report == EndpointReport(num_running=1, max_adapters=most, num_decoding=1)


def test_bounds_hold_for_any_number_of_samples():
    engine = 'vllm:num_requests_running{{engine="{}"}} 1\n'
    assert parse_report("".join(map(engine.format, range(10_000)))).num_running <= 256
    large = 'vllm:num_requests_running{{engine="{}"}} 1e308\n'
    assert parse_report(large.format(0) + large.format(1)).num_running == 2 * 2**20
    counts = "".join(f"specdec:{name} {value}\n" for name, value in HUGE.items())
    totals = parse_report(f"{counts}specdec:num_requests_running 1").totals
    assert all(map(math.isfinite, totals))
    huge = 'vllm:cache_config_info{block_size="999999999",num_gpu_blocks="999999999"} 1'
    assert parse_report(f"{huge}\nvllm:num_requests_running 1").cache_tokens == 2**22


def test_the_names_are_those_that_a_scrape_selects():
    names = metric_names(has_objective=False)
    assert "specdec:num_requests_running" in names
    assert "sglang:num_queue_reqs" in names


def test_without_an_objective_nothing_more_is_read():
    assert not any("expected" in each for each in metric_names(has_objective=False))
    text = "specdec:requests_received_total 5\nspecdec:num_requests_running 1\n"
    assert parse_report(text).totals.num_requests == 5
    assert parse_report(text, has_objective=False).totals is None


def test_a_python_client_exposes_the_samples_that_are_selected():
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "x", registry=registry).set(3)
    Counter("vllm:generation_tokens", "x", registry=registry).inc(77)
    Counter("vllm:request_success", "x", registry=registry).inc(2)
    selected = registry.restricted_registry(metric_names(has_objective=True))
    for each in (registry, selected):
        report = parse_report(generate_latest(each).decode())
        assert report.output_tokens == expected_output_tokens(77, 2)


def ended_text(server, **numbers):
    """Return metrics with 32,000 generated tokens, and requests by the reason of their end."""
    lines = [f"{server}:num_requests_running 1", f"{server}:generation_tokens_total 32000"]
    for reason, number in numbers.items():
        lines.append(f'{server}:request_success_total{{finished_reason="{reason}"}} {number}')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("server", "reason"), [("specdec", "abort"), ("vllm", "abort"), ("vllm", "error")]
)
def test_an_aborted_output_counts_by_its_tokens_but_not_as_an_end(server, reason):
    report = parse_report(ended_text(server, stop=70, length=20, **{reason: 500}))
    assert report.output_tokens == expected_output_tokens(32_000, 90)


@pytest.mark.parametrize("server", ["specdec", "vllm"])
def test_outputs_that_run_count_before_one_has_ended(server):
    report = parse_report(ended_text(server, stop=0, abort=0))
    assert report.output_tokens == expected_output_tokens(32_000, 0)
    assert parse_report(ended_text(server)).output_tokens == OUTPUT_TOKENS, "ends are not counted"


def test_outputs_that_run_count_for_the_expected_length():
    """Requests of 100 tokens end before those of 500."""
    assert expected_output_tokens(16 * 100 * 2, 16) > 200
    assert expected_output_tokens(16 * 600, 32) == pytest.approx(291, abs=1)
    assert expected_output_tokens(10_000 * 600, 20_000) == pytest.approx(300, rel=0.01)
    assert expected_output_tokens(0, 0) == OUTPUT_TOKENS
