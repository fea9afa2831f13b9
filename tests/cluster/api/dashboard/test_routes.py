"""The routes of the dashboard: static files, headers, and rejected requests."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cluster.api.base.authentication import AdminAccess, ApiKey, ApiKeys
from cluster.api.dashboard import make_dashboard
from cluster.api.dashboard.routes import load_assets
from specdec.types.errors import OverloadedError

TOKEN = "a-token-of-the-operators"
QUESTION = {"prompt": "Hi", "max_tokens": 4}


class StalledRouter:
    """A router whose queue does not move."""

    config = SimpleNamespace(request_timeout_s=5)

    def __init__(self):
        self.was_cancelled = False

    async def generate(self, call, deadline):
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


class RefusingRouter:
    config = SimpleNamespace(request_timeout_s=5)

    async def generate(self, call, deadline):
        raise OverloadedError("too many waiting requests (limit 256)")


def application(token=None, keys=None):
    return TestClient(dashboard(RefusingRouter(), token, keys), base_url="http://service:8000")


def dashboard(router, token=None, keys=None):
    app = FastAPI()
    admin = SimpleNamespace(access=AdminAccess(token, keys))
    app.include_router(make_dashboard(lambda: router, lambda: admin))
    return app


@pytest.fixture
def client():
    return application()


def test_the_page_and_every_file_it_links_to_are_served(client):
    page = client.get("/dashboard")
    assert (page.status_code, page.url.path) == (200, "/dashboard/")
    named = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
    assert len(named) > 5
    assert [client.get(f"/dashboard/{path}").status_code for path in named] == [200] * len(named)


def test_modules_import_existing_modules():
    assets = load_assets()
    modules = [path for path in assets if path.startswith("js/")]
    for path in modules:
        for imported in re.findall(r'from "\./([^"]+)"', assets[path].body.decode()):
            assert f"js/{imported}" in assets, path


def test_no_other_origin_and_no_inline_scripts(client):
    page = client.get("/dashboard/")
    policy = dict(
        rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    for path, asset in load_assets().items():
        if path.endswith((".html", ".css")):
            assert not re.search(rb"https?://(?!jfly)", asset.body), path
    assert " style=" not in page.text
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son[a-z]+=", page.text)
    assert page.headers["x-content-type-options"] == "nosniff"


def test_a_browser_revalidates_and_gets_304(client):
    first = client.get("/dashboard/js/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    etag = {"if-none-match": first.headers["etag"]}
    again = client.get("/dashboard/js/main.js", headers=etag)
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/dashboard/css/theme.css", headers=etag).status_code == 200


@pytest.mark.parametrize("path", ["nothing", "../http.py", "%2e%2e/routes.py", "js", "js/"])
def test_unknown_paths_are_not_found(client, path):
    assert client.get(f"/dashboard/{path}").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 429),
        ({"sec-fetch-site": "same-origin", "origin": "http://service:8000"}, 429),
        ({"origin": "http://service:8000"}, 429),
        ({"origin": "http://elsewhere:8000"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://service:8000"}, 403),
    ],
)
def test_only_the_same_origin_may_post(client, headers, status):
    assert client.post("/dashboard/generate", json=QUESTION, headers=headers).status_code == status


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "cross-site"}, {"origin": "http://a"}])
def test_the_events_are_for_the_same_origin(client, headers):
    assert client.get("/dashboard/events", headers=headers).status_code == 403
    assert client.get("/dashboard/", headers=headers).status_code == 200, "a link on another site"


def test_a_form_is_rejected(client):
    answer = client.post("/dashboard/generate", data={"prompt": "Hi"})
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "content-type"


def test_files_are_public_and_the_rest_needs_the_token():
    client = application(token=TOKEN)
    assert client.get("/dashboard/").status_code == 200
    assert client.get("/dashboard/events").status_code == 401
    assert client.post("/dashboard/generate", json=QUESTION).status_code == 401
    for presented, status in (("wrong", 401), (TOKEN, 429)):
        headers = {"authorization": f"Bearer {presented}"}
        answer = client.post("/dashboard/generate", json=QUESTION, headers=headers)
        assert answer.status_code == status
        assert TOKEN not in answer.text


def test_with_api_keys_and_no_token_every_call_needs_a_key():
    keys = ApiKeys([ApiKey("ann", TOKEN, max_concurrent_requests=1)])
    client = application(keys=keys)
    assert client.get("/dashboard/").status_code == 200
    assert client.get("/dashboard/events").status_code == 401
    assert client.post("/dashboard/generate", json=QUESTION).status_code == 401
    headers = {"authorization": f"Bearer {TOKEN}"}
    for _ in range(2):  # a failed request leaves no slot of the key taken
        answer = client.post("/dashboard/generate", json=QUESTION, headers=headers)
        assert answer.json()["error"]["message"] == "too many waiting requests (limit 256)"


def test_a_rejection_has_a_message_and_a_retry_hint(client):
    answer = client.post("/dashboard/generate", json=QUESTION)
    assert answer.json()["error"]["message"] == "too many waiting requests (limit 256)"
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"as_chat": "yes"}, "as_chat"),
        ({"speculation": {"num_speculative_tokens": 33}}, "speculation.num_speculative_tokens"),
        ({"speculation": {"k": 3}}, "speculation.k"),
        ({"speculation": []}, "speculation"),
        ({"n": 2}, "n"),
    ],
)
def test_a_wrong_field_is_named(client, change, field):
    answer = client.post("/dashboard/generate", json=QUESTION | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == field


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_object_is_rejected(client, body):
    headers = {"content-type": "application/json"}
    answer = client.post("/dashboard/generate", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "body"


async def test_a_page_that_is_closed_ends_its_request_in_the_queue(caplog):
    router, statuses = StalledRouter(), []
    body = {"type": "http.request", "body": json.dumps(QUESTION).encode()}
    messages = iter([body, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    async def send(message):
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": "/dashboard/generate", "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    async with asyncio.timeout(2):
        await dashboard(router)(scope, receive, send)
    assert (router.was_cancelled, statuses[0], caplog.records) == (True, 499, [])
