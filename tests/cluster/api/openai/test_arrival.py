# Modules: cluster.replica.arrival
"""Requests over HTTP from their arrival until the engine has them."""

import asyncio
import math
import time

import pytest

from cluster.api.openai import generation
from cluster.replica.orders import AbortOrder
from specdec.engine.metrics.metrics import ABORTED, REQUEST_DURATION
from specdec.types.errors import OverloadedError
from specdec.types.request import Caller

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "Ask the baker"}]
CHATS = [
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 2, "n": 3, "request_id": "mine"}, 3),
    ("/v1/responses", {"input": "Ask the baker", "max_output_tokens": 2}, 1),
    ("/v1/messages", {"messages": USER, "max_tokens": 2}, 1),
]
TEXT = {"prompt": "The river", "max_tokens": 2}
TWO = {"text": ["The river", "The rain"], "sampling_params": {"max_new_tokens": 2, "n": 2}}
COMPLETIONS = [
    ("/v1/completions", {**TEXT, "n": 8, "request_id": "mine"}, 8),
    ("/v1/completions", {**TEXT, "prompt": ["The river"] * 5, "n": 2, "request_id": "mine"}, 10),
    ("/generate", {"text": "The river", "rid": "mine", "sampling_params": {"n": 4}}, 4),
    ("/generate", {**TWO, "rid": "mine"}, 4),
    ("/generate", {**TWO, "rid": ["other", "mine"]}, 4),
]
DOORS = [
    *((*each, "chat") for each in CHATS),
    *((*each, "text_completion") for each in COMPLETIONS),
]
NAMED = [each for each in DOORS if {"request_id", "rid"} & each[1].keys()]


@pytest.fixture
def measured(router, monkeypatch):
    """Return the measurements of requests, in the order in which they were made."""
    found, begin = [], router._instrumentation.begin
    monkeypatch.setattr(
        router._instrumentation, "begin", lambda *a, **k: found.append(begin(*a, **k)) or found[-1]
    )
    return found


def durations(router):
    """Return the number of measured requests by operation and error."""
    found = router.metrics.server_latencies.get(REQUEST_DURATION, {})
    return {
        (operation, error): sum(each.counts)
        for operation, by_error in found.items()
        for error, each in by_error.items()
    }


@pytest.mark.parametrize(("path", "body", "num_choices", "operation"), DOORS)
async def test_a_request_is_measured_from_its_arrival_and_by_its_operation(
    http, router, measured, monkeypatch, path, body, num_choices, operation
):
    """Templates and tokenizers may take long."""
    prepared_at, before = [], durations(router)
    for name in ("encode", "encode_chat"):
        encode = getattr(router.text, name)

        async def record(*arguments, encode=encode, **options):
            encoded = await encode(*arguments, **options)
            prepared_at.append(time.perf_counter())
            return encoded

        monkeypatch.setattr(router.text, name, record)
    assert (await http.post(path, json=body)).status_code == 200
    assert max(each.arrived_at for each in measured) < prepared_at[0]
    key = operation, ""
    assert durations(router) == {**before, key: before.get(key, 0) + len(measured)}


@pytest.mark.parametrize(("path", "body", "num_choices", "operation"), DOORS)
async def test_a_request_that_is_refused_while_it_is_prepared_is_measured(
    http, router, monkeypatch, path, body, num_choices, operation
):
    def refuse(num_choices=1):
        raise OverloadedError("full")

    monkeypatch.setattr(router.running_engine().thread, "require_room", refuse)
    key, before = (operation, "OverloadedError"), durations(router)
    num_before = router.metrics.num_refused
    assert (await http.post(path, json=body)).status_code == 429
    assert router.metrics.num_refused == num_before + num_choices
    assert durations(router) == {**before, key: before.get(key, 0) + 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**TEXT, "model": "x"}),
        ("/generate", {"text": ["a", "b"], "lora_path": ["", "x"]}),
    ],
)
async def test_a_request_of_another_application_is_not_measured(http, router, measured, path, body):
    assert (await http.post(path, json=body)).status_code == 404
    assert not measured


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1}),
        ("/generate", {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 1}}),
    ],
)
async def test_of_several_prompts_the_first_alone_may_expire(http, router, monkeypatch, path, body):
    """It begins first; after that, what others have computed would be lost."""
    thread, waits = router.running_engine().thread, []
    generate = thread.generate

    def recorded(request, *args, **options):
        waits.append(request.queue_deadline_s < math.inf)
        return generate(request, *args, **options)

    monkeypatch.setattr(thread, "generate", recorded)
    assert (await http.post(path, json=body)).status_code == 200
    assert waits == [True, False, False]


async def test_all_choices_are_admitted_together(http, router, monkeypatch):
    """More than ever fit are no demand, also where not even one fits now."""
    asked = []
    monkeypatch.setattr(router.running_engine().thread, "require_room", asked.append)
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert asked[0] == 4


@pytest.mark.parametrize(("path", "body", "num_choices", "operation"), NAMED)
async def test_a_request_is_ended_while_its_prompt_is_encoded(
    http, router, monkeypatch, path, body, num_choices, operation
):
    num_before, is_encoding = router.metrics.num_refused, asyncio.Event()
    num_aborted = router.metrics.ended[ABORTED]

    async def encode(*_, **__):
        is_encoding.set()
        await asyncio.sleep(60)

    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(router.text, name, encode)
    running = asyncio.create_task(http.post(path, json=body))
    await is_encoding.wait()
    assert (await http.post("/abort_request", json={"rid": "mine"})).status_code == 200
    assert (await asyncio.wait_for(running, 5)).status_code == 499
    assert router.metrics.num_refused == num_before + num_choices
    assert router.metrics.ended[ABORTED] == num_aborted + num_choices


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "num_choices", "operation"), NAMED)
async def test_a_request_is_ended_between_its_preparation_and_its_stream(
    http, router, monkeypatch, path, body, num_choices, operation, stream
):
    make_outputs = generation._outputs

    def make_and_abort(*arguments):
        outputs = make_outputs(*arguments)
        router.abort(AbortOrder("", Caller(), is_for_all=True))
        return outputs

    monkeypatch.setattr(generation, "_outputs", make_and_abort)
    assert (await http.post(path, json={**body, "stream": stream})).status_code == 499
    assert router.running_engine().thread.num_streams == 0


async def test_the_deadline_of_a_preparation_is_no_abort(http, router, monkeypatch):
    before, num_aborted = durations(router), router.metrics.ended[ABORTED]
    num_requests = router.metrics.num_refused
    monkeypatch.setattr(router.text, "encode", lambda *_, **__: asyncio.sleep(60))
    headers = {"x-request-timeout-s": "0.01"}
    assert (await http.post("/v1/completions", json=TEXT, headers=headers)).status_code == 504
    assert router.metrics.ended[ABORTED] == num_aborted
    assert router.metrics.num_refused == num_requests + 1
    key = "text_completion", "DeadlineExceededError"
    assert durations(router) == {**before, key: before.get(key, 0) + 1}
