"""Routes that load versions of the drafter and adapters, ours and vLLM's."""

from dataclasses import replace

import pytest

from cluster.api.base.authentication import AdminAccess
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.drafters import DrafterOrder


async def test_versions_of_the_drafter(http, admin):
    replicas = (await http.get("/v1/admin/drafters")).json()["replicas"]
    assert [each["replica_id"] for each in replicas] == ["r1", "r2"]
    assert replicas[0]["versions"][0]["state"] == "ready"
    assert replicas[1]["fault"] == "version is 7; it must be 1"
    order = {"path": "org/head", "is_pinned": True, "replica_id": "r1"}
    response = await http.post("/v1/admin/drafters", json=order)
    [replica] = response.json()["replicas"]
    assert (response.status_code, replica["is_pinned"]) == (200, True)
    assert replica["versions"][1]["name"] == "org/head"
    assert admin.orders.drafter.orders[-1] == DrafterOrder("org/head", 0, True, "r1")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "path"),
        ({"path": 3}, "path"),
        ({"path": "x" * 1025}, "path"),
        ({"version": "2"}, "version"),
        ({"version": 9}, "version"),
        ({"is_pinned": 1}, "is_pinned"),
        ({"pin": True}, "pin"),
    ],
)
async def test_a_wrong_order_for_the_drafter_names_its_field(http, body, field):
    response = await http.post("/v1/admin/drafters", json=body)
    assert (response.status_code, response.json()["error"]["field"]) == (400, field)


async def test_adapters(http, admin):
    replicas = (await http.get("/v1/admin/adapters")).json()["replicas"]
    assert [each["replica_id"] for each in replicas] == ["r1", "r2"]
    [adapter] = replicas[0]["adapters"]
    assert (adapter["name"], adapter["state"], adapter["rank"]) == ("sql", "ready", 16)
    assert adapter["speculation"]["num_accepted_tokens"] == 120
    order = {"name": "chat", "path": "org/chat", "replica_id": "r1"}
    response = await http.post("/v1/admin/adapters", json=order)
    assert response.status_code == 200
    assert response.json()["replicas"][0]["adapters"][1]["name"] == "chat"
    response = await http.post("/v1/admin/adapters", json={"name": "sql"})
    assert response.json()["replicas"][0]["adapters"][0]["state"] == "unloading"
    assert admin.orders.adapter.orders[1:] == [
        AdapterOrder.load("chat", "org/chat", replica_id="r1"),
        AdapterOrder.unload("sql"),
    ]
    assert (await http.post("/v1/admin/adapters", json={"name": "x"})).status_code == 404


async def test_vllms_routes_for_adapters(http, admin):
    body = {"lora_name": "chat", "lora_path": "org/chat"}
    response = await http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'chat' loaded."
    body |= {"lora_name": "sql", "load_inplace": True}
    assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    body = {"lora_name": "sql", "lora_int_id": 3}
    response = await http.post("/v1/unload_lora_adapter", json=body)
    assert response.text == "Success: LoRA adapter 'sql' unloaded."
    body = {"lora_name": "fast", "draft_lora_path": "org/draft"}
    assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    assert admin.orders.adapter.orders == [
        AdapterOrder.load("chat", "org/chat"),
        AdapterOrder.load("sql", "org/chat", replaces=True),
        AdapterOrder.unload("sql"),
        AdapterOrder.load("fast", draft_path="org/draft"),
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/admin/adapters", {}, 400, "name"),
        ("/v1/admin/adapters", {"name": 3}, 400, "name"),
        ("/v1/admin/adapters", {"name": "a", "path": "x" * 1025}, 400, "path"),
        ("/v1/admin/adapters", {"name": "a", "file": "x"}, 400, "file"),
        ("/v1/admin/adapters", {"draft_path": "x"}, 400, "name"),
        ("/v1/admin/adapters", {"name": "a", "path": "x", "draft_path": "\n"}, 400, "draft_path"),
        ("/v1/load_lora_adapter", {"lora_path": "/a"}, 400, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": 3}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/a"}, 400, "lora_name"),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "/a", "load_inplace": 1},
            400,
            "load_inplace",
        ),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "/a", "draft_lora_path": "\n"},
            400,
            "draft_lora_path",
        ),
        ("/v1/load_lora_adapter", {"lora_nam": "a"}, 400, "lora_nam"),
        ("/v1/unload_lora_adapter", {}, 400, "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": "other"}, 404, None),
    ],
)
async def test_a_wrong_order_for_adapters_names_its_field(http, path, body, status, field):
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error.get("param", error.get("field"))) == (status, field)
    if "admin" not in path:  # in the format of the OpenAI API
        assert error["code"] == (None if field else "model_not_found")
        assert error["type"] == "invalid_request_error"
        assert "must be did you mean" not in error["message"]


async def test_an_order_that_some_replicas_did_not_execute_fails_on_vllms_routes(http, served):
    async def order(_):
        return AdapterReport("r1"), AdapterReport("r2", fault="no such directory")

    served.admin = replace(served.admin, orders=replace(served.admin.orders, adapter=order))
    body = {"lora_name": "a", "lora_path": "/a"}
    response = await http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 503
    assert "replica r2 has not loaded it: no such directory" in response.text


async def test_vllms_routes_require_the_token_and_the_same_origin(http, served, admin):
    body = {"lora_name": "sql"}
    foreign = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await http.post(path, json=body, headers=foreign)).status_code == 403
        served.admin = replace(admin, access=AdminAccess("correct-horse-battery"))
        assert (await http.post(path, json=body)).status_code == 401
        served.admin = admin
    assert admin.orders.adapter.orders == []
