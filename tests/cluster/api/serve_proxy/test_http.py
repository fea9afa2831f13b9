"""What Serve's HTTP proxies send in place of the proxy's own endings."""

import json
import pickle

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares
from ray.serve._private.http_util import convert_object_to_asgi_messages as messages_of_serve
from starlette.middleware import Middleware

from cluster.api.http.limits import HttpLimits
from cluster.api.serve_proxy.http import EndResponses, ReadBodies
from cluster.control.peers import LOST_MESSAGE, NOT_STARTED_MESSAGE
from tests.cluster.http_server import running_server

PART = b'data: {"choices": []}\n\n'
START = {"type": "http.response.start", "status": 200}
STREAM = {**START, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}


def proxy(*messages):
    """Stand for Serve's proxy, whose response ends early where its replica is lost."""

    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return _apply_middlewares(app, [Middleware(EndResponses)])


def body(content, *, more_body):
    return {"type": "http.response.body", "body": content, "more_body": more_body}


async def post(app, path="/v1/completions"):
    async with running_server(app) as port, httpx.AsyncClient() as http:
        return await http.post(f"http://127.0.0.1:{port}{path}", content=b"{}")


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/generate", "/of-an-application/v1/chat/completions"]
)
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


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/b/v1/chat/completions"])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((), LOST_MESSAGE),  # of a Router that is lost before it answers
        (messages_of_serve("Path '/' not found.", status_code=404), NOT_STARTED_MESSAGE),
        (messages_of_serve("it failed to deploy", status_code=503), NOT_STARTED_MESSAGE),
    ],
    ids=["lost", "not listed", "failed"],
)
async def test_a_request_without_a_router_is_unavailable(messages, expected, path):
    answer = await post(proxy(*messages), path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    error = answer.json()["error"]
    assert (error["code"], error["message"]) == ("service_unavailable", expected)


async def test_anthropics_client_is_refused_in_its_format():
    answer = await post(proxy(), "/v1/messages")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize(
    ("start", "path"),
    [
        ({"status": 404, "headers": [(b"content-type", b"application/json")]}, "/v1/completions"),
        ({"status": 404, "headers": [(b"content-type", b"text/plain; charset=utf-8")]}, "/theirs"),
        ({"status": 200, "headers": [(b"content-type", b"text/plain; charset=utf-8")]}, "/metrics"),
    ],
    ids=["of a Router", "of another path", "metrics"],
)
async def test_an_answer_of_an_application_is_sent_as_it_is(start, path):
    answer = await post(proxy({**START, **start}, body(b"theirs", more_body=False)), path)
    assert (answer.status_code, answer.content) == (start["status"], b"theirs")


async def test_the_scope_of_a_request_can_be_sent_to_a_replica():
    paths = []

    async def app(scope, receive, send):
        paths.append(pickle.loads(pickle.dumps(scope))["path"])
        for message in (STREAM, body(PART, more_body=False)):
            await send(message)

    await post(_apply_middlewares(app, [Middleware(ReadBodies, limits=HttpLimits())]))
    assert paths == ["/v1/completions"]
