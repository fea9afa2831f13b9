"""Forwarding of HTTP requests between two applications, without Ray."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from cluster.api.http import forwarding
from cluster.api.http.forwarding import ForwardedRequest, find_peer, forward, is_forwarded
from cluster.control.peers import Applications
from specdec.types.errors import UnknownModelError
from tests.waiting import eventually


def other_app():
    """Return an application that echoes requests."""
    app = FastAPI()
    app.state.num_open = 0

    @app.post("/echo")
    async def echo(request: Request):
        body = (await request.body()).decode()
        received = {
            "body": body,
            "query": str(request.query_params),
            "is": is_forwarded(request.scope),
        }
        received["from"] = request.client.host
        return {**received, "key": request.headers["authorization"]}

    @app.post("/endless")
    async def endless(request: Request):
        async def events():
            app.state.num_open += 1
            try:
                while True:
                    yield b"data\n\n"
                    await asyncio.sleep(0)
            finally:
                app.state.num_open -= 1

        return StreamingResponse(events(), 207, {"x-kind": "endless"})

    @app.post("/broken")
    async def broken():
        raise KeyError("a bug")

    return app


class Peer:
    def __init__(self, app):
        self.app, self.session_ids = app, []

    async def stream(self, method, request, session_id):
        assert method == "answer_request"
        self.session_ids.append(session_id)
        async for each in forwarding.answer(self.app, request):
            yield each


@pytest.fixture
def other():
    return other_app()


@pytest.fixture
async def client(other):
    """Return a client of an application below a prefix that forwards everything."""
    app = FastAPI()

    @app.post("/{path:path}")
    async def everything(request: Request):
        return await forward(Peer(other), ForwardedRequest.of(request, await request.body()))

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, root_path="/a"), base_url="http://test"
    ) as client:
        yield client


def test_the_text_of_a_request_has_neither_credential_nor_prompt():
    headers = ((b"authorization", b"Bearer sk-secret"),)
    request = ForwardedRequest("POST", "/echo", b"", headers, b"private")
    assert repr(request) == "ForwardedRequest(method='POST', path='/echo', query=b'', client=None)"


async def test_the_request_arrives_unchanged(client):
    headers = {"authorization": "Bearer x"}
    answer = await client.post("/a/echo?model=b", content="text", headers=headers)
    assert answer.status_code == 200
    received = {"body": "text", "query": "model=b", "is": True, "from": "127.0.0.1"}
    assert answer.json() == {**received, "key": "Bearer x"}


async def test_an_unknown_path_gets_the_response_of_the_other(client):
    answer = await client.post("/a/nothing")
    assert answer.status_code == 404
    assert answer.json() == {"detail": "Not Found"}


async def test_a_forwarded_request_must_be_for_the_application_that_gets_it():
    request = Request(ForwardedRequest("POST", "/echo", b"", (), b"").scope)
    assert await find_peer(Applications("a"), request, "a") is None
    with pytest.raises(UnknownModelError, match="model 'b' is not served; served: 'a'"):
        await find_peer(Applications("a"), request, "b")


async def test_closing_a_stream_cancels_the_request(other):
    request = ForwardedRequest("POST", "/endless", b"", (), b"")
    response = await forward(Peer(other), request)
    assert response.status_code == 207
    assert response.headers["x-kind"] == "endless"
    pieces = response._body
    assert [await anext(pieces) for _ in range(50)] == [b"data\n\n"] * 50
    assert other.state.num_open == 1
    await pieces.aclose()
    await eventually(lambda: other.state.num_open == 0)


async def test_an_exception_of_the_other_gives_a_500_and_is_raised(other):
    request = ForwardedRequest("POST", "/broken", b"", (), b"")
    answer = forwarding.answer(other, request)
    assert (await anext(answer)).status == 500
    with pytest.raises(KeyError):
        [_ async for _ in answer]


@pytest.mark.parametrize("headers", [(), ((b"x-session-id", b"hint"),)])
async def test_the_routing_hint_reaches_the_other_application(other, headers):
    peer = Peer(other)
    await forward(peer, ForwardedRequest("POST", "/broken", b"", headers, b"{}"))
    assert peer.session_ids == [b"".join(value for _, value in headers).decode()]
