"""The middleware of Serve's proxies that passes on routing hints."""

import json

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.api.base.routing_hint import RoutingHint
from cluster.api.http.routing import AddRoutingHint

BODY = json.dumps({"model": "m", "prompt": "Once upon a time " * 50}).encode()


async def echo(scope, receive, send):
    """Respond with the headers and the body that the proxy would pass on."""
    request = Request(scope, receive)
    sessions = request.headers.getlist("x-session-id")
    content = {"sessions": sessions, "body": (await request.body()).decode()}
    await JSONResponse(content)(scope, receive, send)


async def send(method="POST", path="/v1/completions", content=BODY, **headers):
    transport = httpx.ASGITransport(AddRoutingHint(echo))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return (await http.request(method, path, content=content, headers=headers)).json()


@pytest.mark.parametrize("path", ["/v1/completions", "/extract/v1/chat/completions", "/generate"])
async def test_a_request_for_generation_has_its_hint_as_session(path):
    answer = await send(path=path)
    assert answer == {"sessions": [RoutingHint.of_body(BODY).encode()], "body": BODY.decode()}


@pytest.mark.parametrize("name", ["x-session-id", "X_Session_Id"])
async def test_the_session_of_the_client_becomes_a_part_of_the_hint(name):
    answer = await send(**{name: "client"})
    assert answer["sessions"] == [RoutingHint.of_body(BODY, "client").encode()]


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "/metrics", b""),
        ("POST", "/v1/admin/speculation", BODY),
        ("POST", "/tokenize", BODY),
        ("POST", "/v1/completions", b"no json"),
    ],
)
async def test_other_requests_are_passed_on_as_they_are(method, path, content):
    answer = await send(method, path, content, **{"x-session-id": "client"})
    assert answer == {"sessions": ["client"], "body": content.decode()}


@pytest.mark.parametrize("content", [BODY, b"no json"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models")])
async def test_a_hint_of_a_client_is_removed(method, path, content):
    forged = RoutingHint.of(("m",), b"x" * 200, None).encode()
    answer = await send(method, path, content, **{"x-session-id": forged})
    assert answer == await send(method, path, content)
