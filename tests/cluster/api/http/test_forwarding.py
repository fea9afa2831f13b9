"""HTTP requests between two applications, without Ray between them."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from cluster.api.http import forwarding
from cluster.api.http.forwarding import ForwardedRequest, forward, is_forwarded


def other_app():
    """Says what it has been told."""
    app = FastAPI()
    app.state.num_open = 0

    @app.post("/echo")
    async def echo(request: Request):
        body = (await request.body()).decode()
        told = {"body": body, "query": str(request.query_params), "is": is_forwarded(request)}
        return {**told, "key": request.headers["authorization"]}

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
        self.app = app

    async def stream(self, method, request):
        assert method == "answer_request"
        async for each in forwarding.answer(self.app, request):
            yield each


@pytest.fixture
def other():
    return other_app()


@pytest.fixture
async def client(other):
    """Of an application below a prefix, which forwards everything."""
    app = FastAPI()

    @app.post("/{path:path}")
    async def everything(request: Request):
        return await forward(Peer(other), ForwardedRequest.of(request, await request.body()))

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, root_path="/a"), base_url="http://test"
    ) as client:
        yield client


async def test_the_request_arrives_as_it_was(client):
    headers = {"authorization": "Bearer x"}
    answer = await client.post("/a/echo?model=b", content="text", headers=headers)
    assert answer.status_code == 200
    assert answer.json() == {"body": "text", "query": "model=b", "is": True, "key": "Bearer x"}


async def test_what_is_not_there_is_told_as_over_there(client):
    answer = await client.post("/a/nothing")
    assert answer.status_code == 404
    assert answer.json() == {"detail": "Not Found"}


async def test_leaving_a_stream_ends_it_over_there(other):
    request = ForwardedRequest("POST", "/endless", b"", (), b"")
    response = await forward(Peer(other), request)
    assert response.status_code == 207
    assert response.headers["x-kind"] == "endless"
    pieces = response._body
    assert [await anext(pieces) for _ in range(50)] == [b"data\n\n"] * 50
    assert other.state.num_open == 1
    await pieces.aclose()
    await asyncio.sleep(0.01)
    assert other.state.num_open == 0


async def test_a_bug_over_there_is_told_and_raised(other):
    request = ForwardedRequest("POST", "/broken", b"", (), b"")
    answer = forwarding.answer(other, request)
    assert (await anext(answer)).status == 500
    with pytest.raises(KeyError):
        [_ async for _ in answer]
