# Modules: cluster.api.http.admin_json, cluster.api.http.origin
"""AdminService over HTTP, down to a ControlPlane in this process."""

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from cluster.api.base.authentication import AdminAccess
from cluster.api.http.admin import MAX_BODY_BYTES
from cluster.control.peers import Applications
from tests.cluster.full_disk import fill_disk

URL = "/v1/admin/speculation"
JSON = {"content-type": "application/json"}


async def test_the_state_with_its_version_as_an_etag(http):
    response = await http.get(URL)
    assert (response.status_code, response.headers["etag"]) == (200, '"0"')
    assert response.json()["in_force"]["threshold"] == 32
    change = {"mode": "off", "rules": [{"min_requests_per_s": 5, "mode": "on"}], "reason": "why"}
    response = await http.put(URL, json=change)
    assert (response.status_code, response.headers["etag"]) == (200, '"1"')
    state = response.json()
    assert (state["in_force"]["mode"], state["reason"], state["version"]) == ("off", "why", 1)
    assert state["rules"][0]["mode"] == "on"
    assert (await http.get(URL)).json() == state


async def test_of_two_concurrent_writers_one_wins(http):
    changes = [{"threshold": n, "expected_version": 0} for n in (4, 8)]
    responses = await asyncio.gather(*(http.put(URL, json=each) for each in changes))
    assert sorted(each.status_code for each in responses) == [200, 409]
    [lost] = [each.json()["error"] for each in responses if each.status_code == 409]
    assert (lost["field"], lost["value"], lost["limit"]) == ("expected_version", 0, 1)
    assert (
        await http.put(URL, json={"mode": "on"}, headers={"if-match": '"0"'})
    ).status_code == 412
    assert (
        await http.put(URL, json={"mode": "on"}, headers={"if-match": '"1"'})
    ).status_code == 200
    assert (await http.put(URL, json={"reset": True}, headers={"if-match": "*"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"threshold": -1}, "threshold"),
        ({"threshold": "4"}, "threshold"),
        ({"threshold": True}, "threshold"),
        ({"mode": "maybe"}, "mode"),
        ({"treshold": 4}, "treshold"),
        ({}, "change"),
        ([], "body"),
        ({"reset": None}, "reset"),
        ({"rules": {}}, "rules"),
        ({"rules": [{"mode": "off"}]}, "rules[0]"),
        ({"rules": [{"min_requests_per_s": 1, "mod": "off"}]}, "rules[0].mod"),
        ({"rules": [{"min_requests_per_s": "x", "mode": "off"}]}, "rules[0].min_requests_per_s"),
        ({"allowed_verifiers": "coupled"}, "allowed_verifiers"),
        ({"ttl_s": "1"}, "ttl_s"),
        ({"method": "ngram"}, "method"),
    ],
)
async def test_a_wrong_change_names_field_value_and_limit(http, body, field):
    response = await http.put(URL, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["field"]) == (400, field)
    assert error["limit"] in error["message"]
    assert "value" in error
    assert (await http.get(URL)).json()["version"] == 0


async def test_a_change_on_a_full_disk_is_507_and_has_no_effect(http, monkeypatch):
    await http.put(URL, json={"mode": "on"})
    fill_disk(monkeypatch)
    version, status = 1, 200
    while status == 200:  # until the file would grow
        assert version < 100
        response = await http.put(URL, json={"mode": "off", "reason": "x" * 256})
        status, version = response.status_code, version + 1
    assert status == 507
    assert response.json()["error"]["message"].endswith("database or disk is full")
    assert (await http.get(URL)).json()["version"] == version - 1


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[" * 5000, rb'{"mode": "off", "reason": "\ud83d"}', rb'{"\ud83d": 1}'],
)
async def test_a_body_that_is_not_json(http, body):
    response = await http.put(URL, content=body, headers=JSON)
    assert (response.status_code, response.json()["error"]["field"]) == (400, "body")


@pytest.mark.parametrize(("number", "shown"), [("NaN", "nan"), ("1e999", "inf"), ("-1", -1)])
async def test_an_error_is_json_whatever_the_value(http, number, shown):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    response = await http.put(URL, content=f'{{"ttl_s": {number}}}', headers=JSON)
    error = json.loads(response.text, parse_constant=refuse)["error"]
    assert (response.status_code, error["field"], error["value"]) == (400, "ttl_s", shown)


async def test_a_too_large_body(http):
    response = await http.put(URL, content=b" " * (MAX_BODY_BYTES + 1), headers=JSON)
    message = f"the body is too large (limit {MAX_BODY_BYTES} bytes)"
    assert (response.status_code, response.json()["error"]["message"]) == (413, message)


@pytest.mark.parametrize("method", ["PUT", "POST"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 200),
        ({**JSON, "content-type": "application/json; charset=utf-8"}, 200),
        ({**JSON, "origin": "http://test", "sec-fetch-site": "same-origin"}, 200),
        ({**JSON, "origin": "http://elsewhere"}, 403),
        ({**JSON, "sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 400),
        ({}, 400),
    ],
)
async def test_cross_site_requests_are_rejected(http, method, headers, status):
    url = URL if method == "PUT" else f"{URL}/preview"
    response = await http.request(method, url, content=b'{"mode": "off"}', headers=headers)
    assert response.status_code == status
    assert (await http.get(URL)).json()["version"] == (method == "PUT" and status == 200)


FOREIGN = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}


@pytest.mark.parametrize(
    "path", ["speculation", "status", "replicas", "audit-log", "watch", "drafters"]
)
@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({}, False),
        ({**FOREIGN, "sec-fetch-site": "same-origin"}, False),
        ({**FOREIGN, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, False),
        (FOREIGN, True),
        ({**FOREIGN, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, True),
        ({**FOREIGN, "sec-fetch-site": "same-site"}, True),
        ({"origin": "http://elsewhere"}, True),
    ],
)
async def test_pages_of_other_sites_read_nothing(http, path, headers, is_refused):
    """Such a page could take the places of all watchers with streams that it cannot read."""
    url = f"/v1/admin/{path}" + ("?interval_s=-1" if path == "watch" else "")
    served = 400 if path == "watch" else 200  # instead of a stream without an end
    assert (await http.get(url, headers=headers)).status_code == (403 if is_refused else served)


async def test_a_preview_reports_the_effect_and_changes_nothing(http):
    change = {"num_speculative_tokens": 1, "rules": [{"min_requests_per_s": 0, "mode": "on"}]}
    preview = (await http.post(f"{URL}/preview", json=change)).json()
    assert (preview["in_force"]["mode"], preview["active_rule"]) == ("on", 0)
    assert "is_by_rule" not in preview["in_force"], "gRPC has no such field"
    assert preview["in_force"]["num_speculative_tokens"] == 1
    present = (await http.post(f"{URL}/preview", json={})).json()
    assert (present["in_force"]["mode"], present["active_rule"]) == ("auto", None)
    assert (await http.get(URL)).json()["version"] == 0
    wrong = await http.post(f"{URL}/preview", json={"threshold": -1})
    assert wrong.json()["error"]["field"] == "threshold"


@pytest.mark.parametrize("tag", ["3", '"x"', '""', 'W/"1"', '"1" "2"'])
async def test_an_if_match_that_is_not_an_etag_of_this_resource(http, tag):
    response = await http.put(URL, json={"mode": "off"}, headers={"if-match": tag})
    assert (response.status_code, response.json()["error"]["field"]) == (400, "If-Match")


async def test_status_replicas_and_audit_log(http):
    await http.put(URL, json={"mode": "off", "updated_by": "ann"})
    status = (await http.get("/v1/admin/status")).json()
    assert status["replicas"][0]["report"]["replica_id"] == "r1"
    assert status["speculation"]["version"] == 1
    replicas = (await http.get("/v1/admin/replicas")).json()["replicas"]
    assert replicas[0]["report"]["counts"]["num_requests"] == 4
    log = (await http.get("/v1/admin/audit-log", params={"page_size": 1})).json()
    assert log["entries"][0]["change"] == {"mode": "off"}
    assert (log["entries"][0]["updated_by"], log["next_page_token"]) == ("ann", "")
    wrong = await http.get("/v1/admin/audit-log", params={"page_size": "many"})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "page_size")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("audit-log?pagesize=1", "unknown field 'pagesize'; did you mean page_size?"),
        ("watch?page_size=1", "unknown field 'page_size'; known: model, interval_s"),
        ("status?modle=m", "unknown field 'modle'; did you mean model?"),
    ],
)
async def test_an_unknown_parameter_is_rejected(http, path, hint):
    wrong = await http.get(f"/v1/admin/{path}")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (400, hint)


async def test_a_profile(http):
    response = await http.post("/v1/admin/profile", json={"num_steps": 7})
    report = response.json()
    target, draft = report["workers"]
    assert (response.status_code, report["replica_id"], target["num_steps"]) == (200, "r1", 7)
    assert (target["trace_path"], draft["trace_path"]) == ("/traces/t.json.gz", "")
    assert target["operations"][1]["name"] == "aten::mm"
    assert (await http.post("/v1/admin/profile", json={})).json()["workers"][0]["num_steps"] == 10


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 101}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"num_steps": None}, "num_steps"),
        ({"timeout_s": "1"}, "timeout_s"),
        ({"timeout_s": 301}, "timeout_s"),
        ({"replica_id": 3}, "replica_id"),
        ({"steps": 5}, "steps"),
        ([], "body"),
    ],
)
async def test_a_wrong_order_for_a_profile_names_field_value_and_limit(http, body, field):
    response = await http.post("/v1/admin/profile", json=body)
    assert (response.status_code, response.json()["error"]["field"]) == (400, field)


async def test_events_until_the_replica_drains(http, admin, monkeypatch):
    streams, numbers = admin.stats_streams, itertools.count(1)
    query = streams._fleet

    def drain_at_the_third():
        if next(numbers) == 3:
            streams.drain()
        return query()

    monkeypatch.setattr(streams, "_fleet", drain_at_the_third)
    response = await http.get("/v1/admin/watch", params={"interval_s": 0.2})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [each.split("\n") for each in response.text.strip().split("\n\n")]
    names = [name for name, _ in events]
    assert names == ["event: stats"] * (len(names) - 1) + ["event: end"]
    assert len(names) >= 3
    first = json.loads(events[0][1].removeprefix("data: "))
    assert first["status"]["speculation"]["version"] == 0


async def test_an_invalid_interval_is_rejected_before_the_first_event(http):
    response = await http.get("/v1/admin/watch", params={"interval_s": 0.01})
    assert (response.status_code, response.json()["error"]["field"]) == (400, "interval_s")


async def test_an_unavailable_control_plane(http, handle):
    handle.plane = None
    for path in ("speculation", "status", "replicas", "audit-log", "watch"):
        response = await http.get(f"/v1/admin/{path}")
        assert response.status_code == 503
        assert "the control plane does not answer" in response.json()["error"]["message"]


async def test_only_operators_can_select_another_model(http, served):
    looks = []

    async def look():
        looks.append(1)
        return {}

    served.admin = replace(served.admin, applications=Applications("tiny", look))
    message = (await http.get(f"{URL}?model=other")).json()["error"]["message"]
    assert "tiny" in message
    served.admin = replace(served.admin, access=AdminAccess("correct-horse-battery"))
    response = await http.get(f"{URL}?model=other")
    assert response.status_code == 401
    assert "tiny" not in response.text
    assert len(looks) == 1


@pytest.mark.parametrize(
    "path", ["speculation", "status", "replicas", "audit-log", "watch", "drafters", "adapters"]
)
async def test_every_route_requires_the_token(http, served, path):
    served.admin = replace(served.admin, access=AdminAccess("correct-horse-battery"))
    response = await http.get(f"/v1/admin/{path}")
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert (await http.put(URL, json={"mode": "off"})).status_code == 401
    for each in ("profile", "drafters", "adapters"):
        assert (await http.post(f"/v1/admin/{each}", json={})).status_code == 401
    if path != "watch":
        headers = {"authorization": "Bearer correct-horse-battery"}
        assert (await http.get(f"/v1/admin/{path}", headers=headers)).status_code == 200
