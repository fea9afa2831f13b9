"""Counts of runs worked out by hand, from the engine through the control plane to the text."""

import asyncio
import threading
import time

import pytest

from cluster.api.http import metrics
from specdec.client import Counts, ReplicaReport
from specdec.types.reports.stats import SpeculationStats
from tests.cluster.replica_on_hash_target import REPLICA, running_replica
from tests.cluster.scraped import OPEN_METRICS, open_families, samples
from tests.waiting import eventually


@pytest.fixture
async def replica(tiny_model_dir, tmp_path, monkeypatch):
    """A replica whose scrapes query the control plane each time, without the cache."""
    monkeypatch.setattr(metrics, "_CACHED_S", 0.0)
    async with running_replica(tiny_model_dir, tmp_path) as replica:
        yield replica


async def scrape(replica, path="/metrics"):
    response = await replica.http.get(path)
    assert response.status_code == 200
    return samples(response.text, REPLICA)


@pytest.mark.parametrize("path", ["/metrics", "/metrics/replica"])
async def test_counts_of_a_hand_worked_run(replica, path):
    await replica.router.apply_speculation(await replica.link.speculation())
    await replica.generate(max_tokens=10)
    # The prompt yields a token; drafts of 3, 3 and 2 (no more fit) yield 3 each.
    expected = {
        ("requests_received_total",): 1,
        ("prompt_tokens_total",): 6,
        ("prompt_tokens_cached_total",): 0,
        ("generation_tokens_total",): 10,
        ("engine_steps_total",): 4,
        ("engine_steps_ahead_total",): 0,
        ("prefill_chunks_total",): 0,
        ("num_preemptions_total",): 0,
        ("spec_decode_num_drafts_total",): 3,
        ("spec_decode_num_draft_tokens_total",): 8,
        ("spec_decode_num_accepted_tokens_total",): 6,
        ("spec_decode_num_rejected_tokens_total",): 2,
        ("spec_decode_num_drafted_steps_total",): 3,
        ("spec_decode_num_reached_tokens_per_pos_total", "0"): 3,
        ("spec_decode_num_reached_tokens_per_pos_total", "1"): 3,
        ("spec_decode_num_reached_tokens_per_pos_total", "2"): 2,
        ("spec_decode_num_lookahead_tokens_total",): 0,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 3,
        ("spec_decode_num_accepted_tokens_per_pos_total", "1"): 3,
        ("spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
        ("spec_decode_num_draft_tokens_by_method_total", "ngram", "0"): 3,
        ("spec_decode_num_draft_tokens_by_method_total", "ngram", "2"): 2,
        ("spec_decode_num_accepted_tokens_by_method_total", "ngram", "1"): 3,
        ("spec_decode_num_accepted_tokens_by_method_total", "ngram", "2"): 0,
        ("speculation_decisions_total", "operator"): 3,
        ("speculation_decisions_total", "goodput"): 0,
        ("speculation_steps_total", "3"): 3,
        ("speculation_steps_total", "0"): 0,
        ("speculation_chosen_tokens",): 3,
        ("speculation_mode", "on"): 1,
        ("speculation_mode", "auto"): 0,
        ("speculation_in_force",): 1,
        ("speculation_control_version",): 0,
        ("num_requests_running",): 0,
        ("num_requests_decoding",): 0,
        ("num_requests_waiting",): 0,
        ("kv_cache_usage_perc",): 0,
        ("request_success_total", "length"): 1,
        ("request_success_total", "stop"): 0,
        ("request_success_total", "abort"): 0,
        ("time_to_first_token_seconds_count",): 1,
        ("inter_token_latency_seconds_count",): 3,
        ("e2e_request_latency_seconds_count",): 1,
        ("request_queue_time_seconds_count",): 1,
        ("request_prefill_time_seconds_count",): 1,
        ("request_decode_time_seconds_count",): 1,
        ("request_prompt_tokens_sum",): 6,
        ("request_generation_tokens_sum",): 10,
        ("batch_size_count",): 4,
        ("batch_size_sum",): 4,
        ("draft_time_seconds_count",): 3,
        ("verify_time_seconds_count",): 4,
        ("replica_ready",): 1,
    }
    found = await scrape(replica, path)
    assert {key: found.get(key) for key in expected} == expected
    assert found["request_queue_time_seconds_sum",] + found[
        "request_prefill_time_seconds_sum",
    ] == pytest.approx(found["time_to_first_token_seconds_sum",])


async def test_counts_of_a_second_run_are_added(replica):
    await replica.generate(max_tokens=10)
    replica.num_right = 3
    await replica.generate(max_tokens=9)  # a token; drafts of 3 that yield 4 each
    found = await scrape(replica)
    assert found["spec_decode_num_drafts_total",] == 3 + 2
    assert found["spec_decode_num_accepted_tokens_total",] == 6 + 6
    assert found["spec_decode_num_rejected_tokens_total",] == 2
    assert found["generation_tokens_total",] == 19
    assert found["prompt_tokens_cached_total",] == 4  # one full block of the same prompt


async def test_a_running_and_an_aborted_request(replica):
    gate, collect = threading.Semaphore(3), replica.target.collect

    def collect_at_gate():
        assert gate.acquire(timeout=30)
        time.sleep(0.02)  # the age of the statistics that a scrape reads
        return collect()

    replica.target.collect = collect_at_gate
    running = asyncio.create_task(replica.generate(max_tokens=100))
    while not (await scrape(replica))["generation_tokens_total",]:
        await asyncio.sleep(0.01)
    found = await scrape(replica)
    assert found["num_requests_running",] == 1
    assert 0 < found["kv_cache_usage_perc",] < 0.5
    running.cancel()
    await asyncio.wait([running])
    gate.release(100)
    await replica.loop.stats()  # the abort comes before it
    found = await scrape(replica)
    assert found["request_success_total", "abort"] == 1
    assert (found["num_requests_running",], found["e2e_request_latency_seconds_count",]) == (0, 0)


async def test_a_scrape_waits_for_no_step(replica):
    """The engine's thread hangs in a step, as on a slow forward pass; the scrape returns."""
    is_stepping, may_end, collect = threading.Event(), threading.Event(), replica.target.collect

    def slow_collect():
        is_stepping.set()
        assert may_end.wait(30)
        return collect()

    replica.target.collect = slow_collect
    running = asyncio.create_task(replica.generate(max_tokens=1))
    await eventually(is_stepping.is_set)
    assert (await scrape(replica, "/metrics/replica"))["generation_tokens_total",] == 0
    assert (await scrape(replica))["generation_tokens_total",] == 0
    assert not running.done()
    may_end.set()
    await running


async def test_scrapes_within_a_second_share_one_answer(replica, monkeypatch):
    monkeypatch.setattr(metrics, "_CACHED_S", 60.0)
    asked = []
    fresh_fleet = replica.link.fresh_fleet

    async def ask():
        asked.append(await fresh_fleet())
        return asked[-1]

    monkeypatch.setattr(replica.link, "fresh_fleet", ask)
    leaving = asyncio.create_task(scrape(replica))
    await asyncio.sleep(0)
    found = asyncio.gather(*(scrape(replica) for _ in range(5)))
    leaving.cancel()
    assert len({each["replica_uptime_seconds",] for each in await found}) == 1
    assert len(asked) == 1
    await replica.generate(max_tokens=10)
    monkeypatch.setattr(metrics, "_CACHED_S", 0.0)
    assert (await scrape(replica))["generation_tokens_total",] == 10
    assert len(asked) == 2


async def test_a_scrape_has_one_deadline_for_both_calls(replica, monkeypatch):
    monkeypatch.setattr(metrics, "_DEADLINE_S", 0.1)
    replica.plane.plane = None  # each call would wait for 0.3 s
    response = await replica.http.get("/metrics")
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert message == "the control plane did not answer within 0.1 s; try again later"


async def test_any_router_reports_every_replica(replica):
    other = ReplicaReport("r2", is_ready=True, counts=Counts(speculation=SpeculationStats(1, 5, 4)))
    await replica.plane.plane.report(other, uptime_s=9.0)
    await replica.generate(max_tokens=10)
    text = (await replica.http.get("/metrics")).text
    assert samples(text, "r1")["spec_decode_num_accepted_tokens_total",] == 6
    assert samples(text, "r2")["spec_decode_num_accepted_tokens_total",] == 4
    fleet = samples(text, None)
    assert (fleet["fleet_replicas_ready",], fleet["fleet_replicas_expected",]) == (2, 1)
    assert samples((await replica.http.get("/metrics/replica")).text, "r2") == {}


async def test_without_the_control_plane_a_replica_still_reports_itself(replica):
    assert (await scrape(replica, "/metrics/replica"))["control_plane_up",] == 0, "not called yet"
    await replica.link.speculation()
    assert (await scrape(replica, "/metrics/replica"))["control_plane_up",] == 1
    replica.plane.plane = None
    response = await replica.http.get("/metrics")
    assert response.status_code == 503
    assert "the control plane does not answer" in response.json()["error"]["message"]
    found = await scrape(replica, "/metrics/replica")
    assert (found["control_plane_up",], found["replica_ready",]) == (0, 1)


async def test_the_number_of_labels_does_not_grow_with_requests(replica):
    await replica.generate(max_tokens=30)
    keys = (await scrape(replica)).keys()
    await asyncio.gather(*(replica.generate(max_tokens=20, seed=i) for i in range(5)))
    assert (await scrape(replica)).keys() == keys


async def test_a_refused_call_is_counted_by_its_code(replica):
    await replica.refuse()
    assert (await scrape(replica))["request_failure_total", "INVALID_ARGUMENT"] == 1


@pytest.mark.parametrize("path", ["/metrics", "/metrics/replica"])
async def test_openmetrics_where_the_scraper_asks_for_it(replica, path):
    response = await replica.http.get(path, headers={"accept": OPEN_METRICS})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert "batch_size" in open_families(response.text)
    response = await replica.http.get(path, headers={"accept": "text/plain"})
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_a_scraper_selects_metrics_of_a_replica_by_name(replica):
    """Those of the connection too; unknown names and buckets have no effect."""
    names = ["specdec:num_requests_running", "specdec:control_plane_up", "unknown"]
    response = await replica.http.get("/metrics/replica", params={"name[]": names})
    assert set(samples(response.text, REPLICA)) == {
        ("num_requests_running",),
        ("control_plane_up",),
    }
