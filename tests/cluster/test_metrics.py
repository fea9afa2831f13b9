"""The metrics: by the parser that Prometheus' own client has, after runs worked out by hand."""

import asyncio
import re
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from grpc import StatusCode
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from cluster.engine_loop import EngineLoop
from cluster.http import make_app
from cluster.metrics import Metrics
from cluster.request_observer import RequestObserver
from cluster.servicers import InferenceServicer
from protos.specdec.v1 import inference_pb2 as pb
from specdec.finish_reason import FinishReason
from specdec.request_output import RequestOutput
from specdec.stats import SpeculationStats
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config, make_engine, request

PROMPT = [11, 12, 13, 14, 11, 12]
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "metrics.md"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


class Replica:
    """An engine whose drafts of 3 tokens are right in the first 2, its loop and its metrics."""

    def __init__(self, directory):
        self.target = HashTarget(block_size=4, vocab_size=383)
        engine = make_engine(directory, engine_config(3), self.target, ScriptedProposer(self.draft))
        self.metrics = Metrics("tiny", "r1", lambda: self.loop.last_stats)
        self.loop = EngineLoop(engine, observe_batch=self.metrics.batch_size.observe)

    def draft(self, tokens, count):
        truth = self.target.continuation(tokens, count)
        return [token if i < 2 else token + 1 for i, token in enumerate(truth)]

    def generate(self, each):
        return self.loop.generate(each, RequestObserver(each.request_id, self.metrics))

    async def finish(self, each):
        return [output async for output in self.generate(each)]


@pytest.fixture
async def replica(tiny_model_dir):
    replica = Replica(tiny_model_dir)
    yield replica
    await replica.loop.close()


def output(finish_reason, choice=0, is_last=None):
    is_last = finish_reason is not None if is_last is None else is_last
    stats = SpeculationStats(2, 6, 3)
    return RequestOutput(
        "r", (5,), "text", finish_reason, 12, 5, stats, choice=choice, is_last=is_last
    )


def families(metrics):
    return {each.name: each for each in parse_text(metrics.expose("").body.decode())}


def values(metrics):
    """Every sample by its name and the labels that tell it from its siblings."""
    return {
        (sample.name.removeprefix("specdec:"), *own_labels(sample)): sample.value
        for family in families(metrics).values()
        for sample in family.samples
    }


def own_labels(sample):
    assert (sample.labels["model_name"], sample.labels["replica"]) == ("tiny", "r1")
    return [value for name, value in sample.labels.items() if name not in ("model_name", "replica")]


async def test_counts_of_a_hand_worked_run(replica):
    await replica.finish(request("r", PROMPT, max_tokens=10))
    # The prompt yields a token; drafts of 3, 3 and 2 (no more fit) yield 3 each.
    expected = {
        "prompt_tokens_total": 6,
        "prompt_tokens_cached_total": 0,
        "generation_tokens_total": 10,
        "engine_steps_total": 4,
        "num_preemptions_total": 0,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_accepted_tokens_total": 6,
        "num_requests_running": 0,
        "num_requests_decoding": 0,
        "num_requests_waiting": 0,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_count": 1,
        "batch_size_count": 4,
        "batch_size_sum": 4,
    }
    found = values(replica.metrics)
    assert {name: found[(name,)] for name in expected} == expected
    per_position = [
        found["spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)
    ]
    assert per_position == [3, 3, 0]
    ends = {key[1]: value for key, value in found.items() if key[0] == "request_success_total"}
    assert ends == {"length": 1, "stop": 0, "abort": 0}


async def test_guesses_of_lookahead_are_counted_apart_from_drafts(replica):
    await replica.finish(request("r", PROMPT, max_tokens=10))
    stats = replace(await replica.loop.stats(), num_lookahead_tokens=7)
    found = values(Metrics("tiny", "r1", lambda: stats))
    assert found["spec_decode_num_lookahead_tokens_total",] == 7
    assert found["spec_decode_num_draft_tokens_total",] == 8


async def test_a_request_that_runs_and_one_that_is_left(replica):
    collect = replica.target.collect

    def slow_collect():
        time.sleep(0.01)  # so that it still runs when it is looked at
        return collect()

    replica.target.collect = slow_collect
    async with aclosing(replica.generate(request("r", PROMPT, max_tokens=100))) as outputs:
        await anext(outputs)
        found = values(replica.metrics)
        assert found["num_requests_running",] == 1
        assert 0 < found["kv_cache_usage_perc",] < 0.5
    await replica.loop.stats()  # the abort comes before it
    found = values(replica.metrics)
    assert found["request_success_total", "abort"] == 1
    assert (found["num_requests_running",], found["e2e_request_latency_seconds_count",]) == (0, 0)


async def test_a_scrape_waits_for_no_step(replica):
    """The engine's thread hangs in a step, as on a slow forward pass; the scrape returns."""
    stepping = asyncio.Event()
    loop = asyncio.get_running_loop()
    gate = asyncio.run_coroutine_threadsafe
    collect = replica.target.collect

    def slow_collect():
        loop.call_soon_threadsafe(stepping.set)
        gate(asyncio.sleep(0.3), loop).result()
        return collect()

    replica.target.collect = slow_collect
    running = asyncio.create_task(replica.finish(request("r", PROMPT, max_tokens=1)))
    await stepping.wait()
    assert values(replica.metrics)["generation_tokens_total",] == 0
    assert not running.done()
    await running


def test_latencies_by_the_clock():
    metrics = Metrics("tiny", "r1", lambda: None)
    observer = RequestObserver("r", metrics, clock=lambda: 100.0)
    for at, finish_reason in [(100.5, None), (100.75, None), (102.0, FinishReason.STOP)]:
        observer.on_output(output(finish_reason), at)
    found = values(metrics)
    assert found["time_to_first_token_seconds_sum",] == 0.5
    assert found["inter_token_latency_seconds_sum",] == 1.5
    assert found["inter_token_latency_seconds_bucket", "0.3"] == 1
    assert found["e2e_request_latency_seconds_sum",] == 2.0


def test_a_request_of_several_choices_is_one_and_each_choice_has_pauses_of_its_own():
    metrics = Metrics("tiny", "r1", lambda: None)
    observer = RequestObserver("r", metrics, clock=lambda: 100.0)
    observer.on_output(output(None), 100.5)
    observer.on_output(output(None, choice=1), 101.0)
    observer.on_output(output(FinishReason.STOP, is_last=False), 101.5)
    observer.on_output(output(FinishReason.LENGTH, choice=1), 103.0)
    found = values(metrics)
    assert found["time_to_first_token_seconds_sum",] == 0.5
    assert found["inter_token_latency_seconds_count",] == 2
    assert found["inter_token_latency_seconds_sum",] == 3.0
    assert found["e2e_request_latency_seconds_sum",] == 3.0
    assert found["request_success_total", "length"] == 1
    assert found["request_success_total", "stop"] == 0


async def test_failures_are_counted_by_their_code():
    metrics = Metrics("tiny", "r1", lambda: None)
    context = SimpleNamespace(
        set_code=lambda _: None, set_details=lambda _: None, set_trailing_metadata=lambda _: None
    )
    servicer = InferenceServicer(SimpleNamespace(metrics=metrics, generate=None))
    for _ in range(2):
        await servicer.Generate(pb.GenerateRequest(), context)
    assert values(metrics)["request_failure_total", "INVALID_ARGUMENT"] == 2


async def test_every_metric_is_documented_with_its_type_and_every_documented_one_exists(replica):
    await replica.finish(request("r", PROMPT))
    replica.metrics.count_failure(StatusCode.RESOURCE_EXHAUSTED)
    rows = re.findall(r"^\| `specdec:(\w+)` \| (\w+) \|", DOCUMENTATION.read_text(), re.MULTILINE)
    served = {
        family.name.removeprefix("specdec:") + "_total" * (family.type == "counter"): family.type
        for family in families(replica.metrics).values()
        if not family.name.endswith("_created")
    }
    assert dict(rows) == served


async def test_labels_stay_as_they_are_however_many_requests_come(replica):
    await replica.finish(request("first", PROMPT, max_tokens=30))
    keys = values(replica.metrics).keys()
    await asyncio.gather(
        *(replica.finish(request(f"r{i}", [11 + i] * (i + 3), max_tokens=20)) for i in range(5))
    )
    assert values(replica.metrics).keys() == keys


def test_over_http_in_both_formats():
    router = SimpleNamespace(metrics=Metrics("m", "r", lambda: None))
    client = TestClient(make_app(lambda: router, lambda: None))
    plain = client.get("/metrics")
    assert plain.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain")
    assert "specdec:batch_size" in {family.name for family in parse_text(plain.text)}
    opened = client.get("/metrics", headers={"accept": OPEN_METRICS})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert "specdec:batch_size" in {family.name for family in parse_open(opened.text)}


async def test_steps_that_are_told_together_count_each(replica):
    outputs = await replica.finish(replace(request("r", PROMPT, max_tokens=10), stream_interval=6))
    # One token, then drafts of 3, 3 and 2 that yield 3 each: the first two are told together.
    assert [(len(each.token_ids), each.num_steps) for each in outputs] == [(1, 1), (6, 2), (3, 1)]
    found = values(replica.metrics)
    assert found[("inter_token_latency_seconds_count",)] == 3
    assert found[("batch_size_count",)] == 4


def test_histograms_as_plain_numbers():
    metrics = Metrics("tiny", "r1", lambda: None)
    for size in (1, 2, 2, 3, 5000):
        metrics.batch_size.observe(size)
    counts = metrics.histogram_counts()["batch_size"]
    assert counts.bounds[:3] == (1, 2, 4)
    assert counts.counts[:3] == (1, 2, 1)
    assert (counts.counts[-1], sum(counts.counts), counts.total) == (1, 5, 5008)
