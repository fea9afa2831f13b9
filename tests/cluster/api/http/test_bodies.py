# Modules: cluster.api.http.limits
"""Limits of request bodies on every path, declared or chunked, and what is read of them."""

import asyncio
import gzip
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace

import httpx
import pytest

from cluster.api.base.authentication import AdminAccess
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.http import bodies
from cluster.api.http.connection import MAX_LINGERING_BYTES
from cluster.api.http.limits import HttpLimits
from cluster.api.http_app import make_app
from cluster.api.serve_proxy.http import ReadBodies
from tests.cluster.http_server import connected, running_server

LIMIT = 2**20
MIB = b" " * 2**20
MAX_READ = MAX_LINGERING_BYTES + 16 * 2**20
HEADERS = b"host: localhost\r\ncontent-type: application/json\r\n"
PATHS = ["/dashboard/generate", "/v1/completions", "/v1/admin/speculation/preview", "/health"]


class Router:
    """A router that is ready and generates nothing."""

    is_ready, failure = True, None
    config = SimpleNamespace(request_timeout_s=5, served_model_name="tiny", ingress="embedded")
    metrics = SimpleNamespace(count_failure=lambda code: None)


def application(limits=None):
    limits = limits or HttpLimits(max_body_bytes=LIMIT)
    router = Router()
    admin = SimpleNamespace(access=AdminAccess(), applications=None)
    return make_app(lambda: router, lambda: admin, get_limits=lambda: limits)


@pytest.mark.parametrize("path", PATHS)
async def test_a_declared_body_above_the_limit_is_refused_before_it_is_read(path):
    async with running_server(application()) as port, connected(port) as client:
        head = f"POST {path} HTTP/1.1\r\ncontent-length: {400 * 2**20}\r\n"
        await client.send(head.encode() + HEADERS + b"\r\n")
        head, _, body = (await client.answer()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["message"] == f"the body is too large (limit {LIMIT} bytes)"


@pytest.mark.parametrize("path", PATHS)
async def test_a_chunked_body_above_the_limit_is_not_read_to_its_end(path):
    async with running_server(application()) as port, connected(port) as client:
        head = f"POST {path} HTTP/1.1\r\ntransfer-encoding: chunked\r\n"
        await client.send(head.encode() + HEADERS + b"\r\n")
        await client.send(b"100000\r\n" + MIB + b"\r\n", count=400)
        answer = await client.answer()
    assert client.num_sent < MAX_READ
    expected = (b"HTTP/1.1 405 ",) if path == "/health" else (b"HTTP/1.1 413 ", b"")
    assert answer.startswith(expected) or answer == b""  # the reset may overtake it


@pytest.mark.parametrize("length", [0, LIMIT])
async def test_a_body_within_the_limit_is_read(length):
    async with running_server(application()) as port:
        url = f"http://127.0.0.1:{port}/dashboard/generate"
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient() as http:
            for _ in range(2):
                answer = await http.post(url, content=b" " * length, headers=headers)
                assert answer.json()["error"]["message"].startswith("body is ")
                assert "connection" not in answer.headers


async def test_deeply_nested_json_is_no_internal_error():
    transport = httpx.ASGITransport(application())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        headers = {"content-type": "application/json"}
        answer = await http.post("/dashboard/generate", content=b"[" * 5000, headers=headers)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "body")


@pytest.mark.parametrize("path", ["/dashboard/generate", "/v1/completions", "/v1/messages"])
async def test_a_compressed_body_is_refused(path):
    """Otherwise the error was that the body is no JSON."""
    sent = {"content-type": "application/json"}
    async with (
        running_server(application()) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=sent) as http,
    ):
        for encodings in (["gzip"], ["x-gzip"], ["identity, BR"], ["zstd", "identity"]):
            headers = [("content-encoding", each) for each in encodings]
            refused = await http.post(path, content=gzip.compress(b"{}"), headers=headers)
            message = f"content-encoding is '{encodings[0]}'; it must be identity, or left out"
            assert (refused.status_code, refused.json()["error"]["message"]) == (415, message)
            assert refused.headers["accept-encoding"] == "identity"
        for encoding in ("Identity", "", "utf-8"):  # the last is a known mistake of clients
            plain = await http.post(path, content=b"[]", headers={"content-encoding": encoding})
            assert plain.status_code == 400
        empty = await http.get("/health", headers={"content-encoding": "gzip"})
        assert empty.status_code == 200


async def echo(scope, receive, send):
    """Stand for Serve's proxy, which reads whatever comes."""
    message = await receive()
    assert not message["more_body"]
    body = str(len(message["body"])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def test_serves_proxy_gets_whole_bodies_within_the_limit():
    app = ReadBodies(echo, HttpLimits(max_body_bytes=LIMIT))
    async with running_server(app) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient() as http:
            assert (await http.post(url, content=b" " * LIMIT)).text == str(LIMIT)
            assert (await http.get(url)).text == "0"
            compressed = {"content-encoding": "gzip"}  # for another application
            assert (await http.post(url, content=b" ", headers=compressed)).text == "1"
            assert (await http.post(url, content=b" " * (LIMIT + 1))).status_code == 413
        async with connected(port) as client:
            await client.send(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n" + HEADERS)
            await client.send(b"\r\n")
            await client.send(b"100000\r\n" + MIB + b"\r\n", count=400)
            await client.answer()
        assert client.num_sent < MAX_READ


@pytest.mark.parametrize("path", ["/dashboard/generate", "/v1/completions", "proxy"])
async def test_all_bodies_together_are_limited(path):
    """Two connections hold most of the budget with unfinished bodies; a third gets no more."""
    limits = HttpLimits(max_body_bytes=4 * LIMIT, budget=ByteBudget(6 * LIMIT))
    app = ReadBodies(echo, limits) if path == "proxy" else application(limits)
    url = "/" if path == "proxy" else path
    head = (
        f"POST {url} HTTP/1.1\r\ncontent-length: {3 * LIMIT + 1}\r\n".encode() + HEADERS + b"\r\n"
    )
    async with running_server(app) as port, AsyncExitStack() as stack:
        for _ in range(2):
            held = await stack.enter_async_context(connected(port))
            await held.send(head + MIB * 3)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            while limits.budget.num_bytes < 5 * LIMIT:
                await asyncio.sleep(0.01)
            headers = {"content-type": "application/json"}
            refused = await http.post(url, content=MIB * 2, headers=headers)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "max_inflight_mib" in refused.json()["error"]["message"]
            small = await http.post(url, content=b"[]", headers=headers)
            assert small.status_code != 429
        await stack.aclose()
        while limits.budget.num_bytes:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/dashboard/generate", "/v1/completions", "proxy"])
async def test_a_body_that_does_not_arrive_is_refused(path, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.3)
    limits = HttpLimits(max_body_bytes=LIMIT)
    app = ReadBodies(echo, limits) if path == "proxy" else application(limits)
    url = "/" if path == "proxy" else path
    head = f"POST {url} HTTP/1.1\r\ncontent-length: 9\r\n".encode()
    async with running_server(app) as port, connected(port) as client:
        await client.send(head + HEADERS + b"\r\nx")
        head, _, body = (await client.answer()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"] == (
        "the body arrives too slowly (limit 0.3 s for each part)"
    )


@pytest.mark.parametrize("path", ["/v1/completions", "proxy"])
async def test_a_body_that_arrives_in_single_bytes_is_refused(path, monkeypatch):
    """Each byte is in time, but the rest of the budget is held for as long as they last."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.5)
    limits = HttpLimits(max_body_bytes=LIMIT)
    app = ReadBodies(echo, limits) if path == "proxy" else application(limits)
    url = "/" if path == "proxy" else path
    head = f"POST {url} HTTP/1.1\r\ncontent-length: 1000\r\n".encode()
    async with running_server(app) as port, connected(port) as client:
        await client.send(head + HEADERS + b"\r\n")
        answer = asyncio.ensure_future(client.receive())
        while not answer.done() and client.num_sent < len(head) + 200:
            await client.send(b"x")
            await asyncio.sleep(0.05)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
