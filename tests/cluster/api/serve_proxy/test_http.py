"""What Serve's HTTP proxies send in place of the proxy's own endings."""

import json

import httpx
import pytest

from cluster.api.serve_proxy.http import EndStreams
from tests.cluster.http_server import running_server

PART = b'data: {"choices": []}\n\n'
START = {"type": "http.response.start", "status": 200}
STREAM = {**START, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}


def proxy(*messages):
    """Stand for Serve's proxy, whose response ends early where its replica is lost."""

    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return EndStreams(app)


def body(content, *, more_body):
    return {"type": "http.response.body", "body": content, "more_body": more_body}


async def post(app, path="/v1/completions"):
    async with running_server(app) as port, httpx.AsyncClient() as http:
        return await http.post(f"http://127.0.0.1:{port}{path}", content=b"{}")


@pytest.mark.parametrize("path", ["/v1/completions", "/of-an-application/v1/chat/completions"])
async def test_the_stream_of_a_lost_replica_ends_with_an_error_event(path):
    answer = await post(proxy(STREAM, body(PART, more_body=True)), path)
    first, last, end = answer.text.split("\n\n")
    assert (first + "\n\n", end) == (PART.decode(), "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "service_unavailable")
    assert "lost" in error["message"]


async def test_anthropics_client_receives_the_error_of_a_lost_replica():
    answer = await post(proxy(STREAM, body(PART, more_body=True)), "/of-an-application/v1/messages")
    name, data = answer.text.removeprefix(PART.decode()).strip().split("\n")
    assert name == "event: error", "the client ignores events without a name"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
    assert "lost" in error["error"]["message"]


async def test_a_complete_stream_is_sent_as_it_is():
    messages = (body(PART, more_body=True), body(b"data: [DONE]\n\n", more_body=False))
    answer = await post(proxy(STREAM, *messages))
    assert answer.content == PART + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("start", "path"),
    [({**START, "headers": []}, "/v1/completions"), (STREAM, "/dashboard/generate")],
)
async def test_other_broken_answers_have_no_event(start, path):
    with pytest.raises(httpx.RemoteProtocolError):
        await post(proxy(start, body(PART, more_body=True)), path)
