"""Calls and requests that a front end relays to its Router."""

import asyncio
import json
import time

import grpc
import httpx
import pytest

from cluster.api.base.authentication import AdminAccess, ApiKey, ApiKeys
from cluster.api.front_ends.relay import RelayedAdminServicer, RelayHttp
from cluster.api.http.bodies import LimitBodies
from cluster.api.http.connection import CONNECTION_LOST
from cluster.api.http.forwarding import ForwardedRequest
from cluster.api.http.limits import HttpLimits
from cluster.api.http_app import HttpApp, make_app
from protos.specdec.v1 import admin_pb2
from tests.cluster.admin_service import operator_service
from tests.cluster.api.front_ends.linked import LinkedFrontEnd

TOKEN, KEY = "an-admin-token-of-operators", "sk-a-key-of-an-application"


@pytest.fixture
async def http(front_end):
    def refuse():
        raise AssertionError("not relayed")

    app = front_end.app(make_app(lambda: front_end.router, refuse, has_peers=False))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
def fixed_time(monkeypatch):
    """Set the time at which applications are made, since models are listed with it."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)


async def test_generation_is_answered_here_and_all_else_by_the_router(fixed_time, replica, http):
    body = {"model": "tiny", "prompt": [11, 12], "max_tokens": 3}
    assert (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 3
    for path in ("/health", "/ready", "/v1/models", "/v1/speculation", "/dashboard"):
        through, own = await http.get(path), await replica.http.get(path)
        assert (path, through.status_code, through.content) == (path, own.status_code, own.content)
    assert (await http.get("/nothing")).status_code == 404


async def test_head_of_a_stream_ends(replica):
    is_closed = asyncio.Event()

    async def stream(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    app = HttpApp(HttpLimits, {})
    app.mount("/stream", stream)
    front_end = await LinkedFrontEnd.start(replica.router, app)
    transport = httpx.ASGITransport(front_end.app(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        head = await asyncio.wait_for(client.head("/stream/"), 30)
    assert (head.status_code, head.content, is_closed.is_set()) == (200, b"", True)
    front_end.close()


class Context:
    """Context of a call. code: the status that was set last."""

    code = None

    def invocation_metadata(self):
        return ()

    def peer(self):
        return "ipv4:127.0.0.1:5"

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        pass

    def set_trailing_metadata(self, metadata):
        pass


async def test_administration_is_relayed_with_its_status(front_end):
    servicer, context = RelayedAdminServicer(front_end.client), Context()
    state = await servicer.GetSpeculation(admin_pb2.GetSpeculationRequest(), context)
    assert state.state.version >= 0
    assert context.code is None
    order = admin_pb2.UnloadAdapterRequest(name="none")
    await servicer.UnloadAdapter(order, context)
    assert context.code in grpc.StatusCode


async def test_an_order_for_another_model_is_refused(replica, front_end, http):
    servicer, context = RelayedAdminServicer(front_end.client), Context()
    order = {"model": "other", "mode": admin_pb2.SPECULATION_MODE_OFF}
    await servicer.SetSpeculation(admin_pb2.SetSpeculationRequest(**order), context)
    assert context.code is grpc.StatusCode.NOT_FOUND
    refused = await http.put("/v1/admin/speculation?model=other", json={"mode": "off"})
    assert refused.status_code == 404
    for name in ("load", "unload"):
        order = {"lora_name": "sql", "lora_path": "org/sql"}
        refused = await http.post(f"/v1/{name}_lora_adapter?model=other", json=order)
        assert refused.status_code == 404
    assert (await replica.link.speculation()).version == 0
    for model in ("tiny", "default"):
        response = await http.put(f"/v1/admin/speculation?model={model}", json={"mode": "off"})
        assert response.status_code == 200


class Upload:
    """A request with a large body. num_read: the bytes that were received of it."""

    SIZE, PART = 1024 * 1024, bytes(16 * 1024)

    def __init__(self, path, token=None):
        self.num_read, self.messages = 0, []
        headers = {"host": "127.0.0.1", "content-type": "application/json"}
        headers |= {"content-length": str(self.SIZE)}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        self.scope = {
            **ForwardedRequest("POST", path, b"", (), b"").scope,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "state": {CONNECTION_LOST: asyncio.get_running_loop().create_future()},
        }

    async def receive(self):
        self.num_read += len(self.PART)
        has_more = self.num_read < self.SIZE
        return {"type": "http.request", "body": self.PART, "more_body": has_more}

    async def send(self, message):
        self.messages.append(message)

    async def through(self, app):
        """Return the status, and whether the connection ends with the response."""
        await app(self.scope, self.receive, self.send)
        start = self.messages[0]
        return start["status"], (b"connection", b"close") in start["headers"]


@pytest.fixture
async def secured(replica):
    """Return the application of a Router with a key and a token, and of a front end's relay."""
    limits, access, keys = HttpLimits(), AdminAccess(TOKEN), ApiKeys([ApiKey("a", KEY)])
    operators = operator_service(replica.link, access)
    own = make_app(lambda: replica.router, lambda: operators, lambda: keys, lambda: limits)
    front_end = await LinkedFrontEnd.start(replica.router, own)
    yield own, LimitBodies(RelayHttp(front_end.client, access, keys), lambda: limits)
    front_end.close()


@pytest.mark.parametrize("path", ["/v1/admin/profile", "/v1/load_lora_adapter", "/nothing"])
async def test_no_more_of_a_body_is_read_than_by_the_router(secured, path):
    """Nothing without a credential; 64 KiB and one part with it, of which the Router needs all."""
    own, relay = secured
    for token, max_bytes in ((None, 0), ("wrong", 0), (KEY, 80 * 1024), (TOKEN, 80 * 1024)):
        direct, relayed = Upload(path, token), Upload(path, token)
        assert await relayed.through(relay) == await direct.through(own)
        assert relayed.num_read <= max_bytes


@pytest.mark.parametrize("path", ["/abort_request", "/v1/admin/speculation/preview"])
@pytest.mark.parametrize("token", ["wrong", KEY, TOKEN])
async def test_a_key_in_x_api_key_is_accepted_where_the_router_accepts_it(secured, path, token):
    statuses = []
    for app in secured:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"x-api-key": token}
            response = await client.post(path, json={"rid": "abc"}, headers=headers)
            statuses.append(response.status_code)
    own, relayed = statuses
    assert relayed == own == (401 if token == "wrong" or path.startswith("/v1/admin") else 200)


async def test_a_prompt_of_the_dashboard_is_relayed_whole(http):
    body = json.dumps({"prompt": "\N{GRINNING FACE}" * 20_000, "max_tokens": 1}).encode()

    async def parts():
        for start in range(0, len(body), 2**14):
            yield body[start : start + 2**14]

    is_json = {"content-type": "application/json"}
    refused = await http.post("/dashboard/generate", content=parts(), headers=is_json)
    assert refused.json()["error"]["message"].startswith("prompt length is 80015; it must be at")
