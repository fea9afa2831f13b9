"""Common behaviour of the endpoints that generate: errors, deadlines, request ids."""

import json
import re
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.api.base.errors import TARGET_FAILED_MESSAGE
from cluster.replica.replica_router import ReplicaRouter
from specdec.engine.engine_thread import EngineThread
from specdec.types.errors import TargetFailedError

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "Ask the baker"}]
CHAT = ("/v1/chat/completions", {"messages": USER})
COMPLETION = ("/v1/completions", {"prompt": "The river"})
RESPONSE = ("/v1/responses", {"input": "Ask the baker"})
ALL = pytest.mark.parametrize(
    ("path", "body"), [CHAT, COMPLETION, RESPONSE], ids=["chat", "completion", "response"]
)


@pytest.fixture
def breaking(router, monkeypatch):
    """Lose the model after its first output."""

    async def generate(call, **options):
        generation = await ReplicaRouter.generate(router, call, **options)

        async def outputs():
            async with aclosing(generation.outputs) as real:
                yield await anext(real)
            raise TargetFailedError("secret")

        return replace(generation, outputs=outputs())

    monkeypatch.setattr(router, "generate", generate)


async def num_received(router):
    stats = await router.running_engine().thread.stats()
    return stats.counts.num_requests + router.metrics.num_refused


def num_failures(router):
    return router.metrics.failed.get("UNAVAILABLE", 0)


@ALL
async def test_a_failed_answer_is_an_error(http, router, breaking, path, body):
    before = num_failures(router)
    response = await http.post(path, json=body)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == TARGET_FAILED_MESSAGE
    assert num_failures(router) == before + 1


@ALL
async def test_a_failed_stream_ends_with_an_error_event(http, router, breaking, path, body):
    before = num_failures(router)
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    if path == RESPONSE[0]:
        last = json.loads(data[-1])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        error = last["response"]["error"]
    else:
        assert data[-1] == "[DONE]"
        error = json.loads(data[-2])["error"]
    assert (error["message"], error["code"]) == (TARGET_FAILED_MESSAGE, "service_unavailable")
    assert "secret" not in response.text
    assert num_failures(router) == before + 1


@ALL
async def test_a_deadline_ends_an_answer(http, router, path, body):
    headers, before = {"x-request-timeout-s": "0.000001"}, await num_received(router)
    response = await http.post(path, json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert await num_received(router) == before + 1


@ALL
async def test_the_answer_has_the_request_id(http, path, body):
    headers = {"x-request-id": "mine"}
    limit = {"max_output_tokens": 1} if path == RESPONSE[0] else {"max_tokens": 1}
    response = await http.post(path, json={**body, **limit}, headers=headers)
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"].endswith("mine")


@ALL
async def test_demand_is_what_a_full_queue_refuses_too(http, router, monkeypatch, path, body):
    limit = {"max_output_tokens": 1} if path == RESPONSE[0] else {"max_tokens": 1}

    async def status(path, **body):
        status_code = (await http.post(path, json=body)).status_code
        return status_code, await num_received(router) - before

    before = await num_received(router)
    assert await status(path, **body, **limit) == (200, 1)
    assert await status(path, **body, temperature=-1) == (400, 1)
    assert await status(path, **body, model="other") == (404, 1)
    monkeypatch.setattr(EngineThread, "num_sequences", 1000)
    assert await status(path, **body, **limit) == (429, 2)
    assert await status(path, **body, **limit, stream=True) == (429, 3)
    assert await status("/tokenize", prompt="The river") == (429, 3), "it generates nothing"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": "2"}),
        ("/v1/chat/completions", {"messages": USER, "logprobs": "yes"}),
        ("/v1/chat/completions", {"messages": USER, "prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "token_ids": [1]}),
        ("/v1/responses", {"input": "a", "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "prompt": {"id": "a"}}),
        ("/v1/messages", {"messages": USER, "max_tokens": 2, "stop": "a"}),
        ("/generate", {"text": "a", "max_tokens": 2}),
        ("/tokenize", {"prompt": "a", "text": "a"}),
    ],
)
async def test_the_error_of_an_invalid_field_has_the_name_that_was_sent(http, path, body):
    """The engine's field of that name has another one in the API, which was named instead."""
    response = await http.post(path, json=body)
    (*_, field) = body
    assert response.status_code == 400
    assert field in re.split(r"[ ']", response.json()["error"]["message"].split(";")[0])


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/embeddings", "serve an embedding model with another engine"),
        ("/score", "use /v1/completions with echo, logprobs and max_tokens 0"),
        ("/v1/score", "serve a cross-encoder with another engine"),
        ("/rerank", "serve a cross-encoder with another engine"),
        ("/v1/rerank", "serve a cross-encoder with another engine"),
        ("/v2/rerank", "serve a cross-encoder with another engine"),
    ],
)
async def test_what_a_causal_model_cannot_serve_is_refused_plainly(http, path, instead):
    response = await http.post(path, json={"input": "a"})
    assert (response.status_code, response.headers["x-should-retry"]) == (501, "false")
    assert instead in response.json()["error"]["message"]
