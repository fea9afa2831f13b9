"""Requests of a client as its engine counts them."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from specdec.engine.engine_thread import EngineThread
from specdec.engine.metrics.metrics import Metrics
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.types.errors import SpecdecError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.specdec.engine.test_engine_thread import PROMPT, NanTarget, tokens_of
from tests.specdec.engines import HashTarget, engine_config, make_engine, request


@pytest.fixture
async def loop(tiny_model_dir):
    target = HashTarget(block_size=4, vocab_size=383)
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target))
    yield loop
    await loop.close()


async def counted(loop, *requests):
    """Run requests; return how many are received, and how many ends there are by reason."""
    metrics = Metrics()

    async def run(each):
        measured = RequestMetrics(each.request_id, metrics)
        measured.on_queued(each.params, each.seed)
        outputs = loop.generate(each, measured)
        with suppress(SpecdecError):
            [_ async for _ in outputs]

    await asyncio.gather(*map(run, requests))
    counts = metrics.counts.plus(loop.last_stats.counts)
    return counts.num_requests, {reason: count for reason, count in counts.ended.items() if count}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, {"length": 1})),
        ({"params": SamplingParams(n=2, max_tokens=1)}, (2, {"length": 2})),
        ({"prompt": ()}, (0, {})),
        ({"queue_deadline_s": 0.0}, (1, {"error": 1})),
    ],
    ids=["complete", "choices", "invalid", "expired"],
)
async def test_a_request_that_the_engine_refuses_is_not_received(loop, changes, expected):
    assert await counted(loop, replace(request("r", PROMPT, max_tokens=2), **changes)) == expected


async def test_a_request_without_room_is_received(loop, monkeypatch):
    monkeypatch.setattr(EngineThread, "num_sequences", 1000)
    assert await counted(loop, request("r", PROMPT)) == (1, {})


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_request_that_fails_has_ended_with_all_its_choices(tiny_model_dir, num_choices):
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(), NanTarget()))
    requests = [request(f"r{index}", [11 + index, 12]) for index in range(2)]
    failing = replace(requests[1], params=replace(requests[1].params, n=num_choices))
    counts = await counted(loop, requests[0], failing)
    assert counts == (1 + num_choices, {"length": 1, "error": num_choices})
    await tokens_of(loop, request("of no client", PROMPT))
    assert loop.last_stats.counts.num_requests == 1 + num_choices
    await loop.close()
