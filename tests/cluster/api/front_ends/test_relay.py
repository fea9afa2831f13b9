"""What a front end relays to its Router."""

import time

import grpc
import httpx
import pytest

from cluster.api.app import make_app
from cluster.api.front_ends.relay import RelayedAdminServicer
from protos.specdec.v1 import admin_pb2


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
