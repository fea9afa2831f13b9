import asyncio
import errno
import time
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient

from cluster.api.base.errors import INTERNAL_MESSAGE, NO_DESCRIPTOR_MESSAGE
from cluster.api.http.limits import HttpLimits
from cluster.api.http_app import HttpApp, make_app
from cluster.control.peers import Applications
from specdec.types.errors import NotReadyError, TargetFailedError
from tests.cluster.http_server import connected, running_server

LOST = TargetFailedError("rank 1 failed: secret detail")


@pytest.mark.parametrize(
    ("router", "health", "ready"),
    [
        (SimpleNamespace(is_ready=False, failure=None), 200, 503),
        (SimpleNamespace(is_ready=True, failure=None), 200, 200),
        (SimpleNamespace(is_ready=False, failure=LOST), 503, 503),
    ],
    ids=["loading", "ready", "lost"],
)
def test_liveness_and_readiness(router, health, ready):
    client = TestClient(make_app(lambda: router, lambda: None))
    assert client.get("/health").status_code == health
    assert client.get("/ready").status_code == ready
    assert "secret" not in client.get("/health").text + client.get("/ready").text


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
async def test_a_503_closes_the_connection(path):
    """A client would send its next attempts to the same replica."""

    def get_router():
        if path.startswith("/v1"):
            raise NotReadyError("the service is draining")
        return SimpleNamespace(is_ready=False, failure=LOST)

    app = make_app(get_router, lambda: None)
    async with running_server(app) as port, connected(port) as client:
        await client.send(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode())
        head, _, _ = (await client.answer()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert head.lower().count(b"connection: close") == 1


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
async def test_head_has_the_head_of_get(path):
    """Load balancers and monitors send it; it was refused with 405."""
    app = make_app(lambda: SimpleNamespace(is_ready=True, failure=None), lambda: None)
    async with running_server(app) as port, httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{port}{path}"
        head, got = await http.head(url), await http.get(url)
        again = await http.get(url)  # on the same connection
    ignored = ("date", "x-request-id")
    heads = [{**each.headers, **dict.fromkeys(ignored)} for each in (head, got)]
    assert (head.status_code, heads[0], head.content) == (got.status_code, heads[1], b"")
    assert again.content == got.content != b""


async def test_head_of_a_stream_ends():
    is_closed = asyncio.Event()

    async def stream(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        is_closed.set()

    app = HttpApp(HttpLimits, {})
    app.mount("/stream", stream)
    async with running_server(app) as port, httpx.AsyncClient() as http:
        head = await http.head(f"http://127.0.0.1:{port}/stream/")
        assert (head.status_code, head.content) == (200, b"")
        await asyncio.wait_for(is_closed.wait(), 30)


def test_unknown_paths_and_methods_have_the_format_of_other_errors():
    client = TestClient(make_app(lambda: SimpleNamespace(), lambda: None))
    missing, wrong = client.post("/v1/audio/speech"), client.delete("/v1/models")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    message = "no such path: /v1/audio/speech; /openapi.json lists those of the API"
    assert missing.json()["error"]["message"] == message
    message = "method DELETE is not allowed for /v1/models; use GET, HEAD"
    assert wrong.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
        ("/models", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),  # /v1 in the base URL and in the client's path
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
@pytest.mark.parametrize("root", ["", "/small"])
def test_an_unknown_path_has_the_nearest_one_in_its_error(path, meant, root):
    client = TestClient(make_app(lambda: SimpleNamespace(), lambda: None), root_path=root)
    message = client.post(root + path).json()["error"]["message"]
    assert message.startswith(f"no such path: {root}{path}; did you mean {root}{meant}? ")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/models", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/dashboard/app.js", "GET, HEAD"),
        ("/dashboard/generate", "POST"),
        ("/v1/completions", "POST"),
        ("/v1/admin/speculation", "GET, HEAD, PUT"),
        ("/v1/admin/drafters", "GET, HEAD, POST"),
        ("/v1/admin/adapters", "GET, HEAD, POST"),
    ],
)
def test_allow_has_the_methods_of_a_path(path, methods):
    refused = TestClient(make_app(lambda: SimpleNamespace(), lambda: None)).patch(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/chat/completions", 400)])
async def test_a_query_that_is_no_text_disturbs_no_error(path, status):
    metrics = SimpleNamespace(count_failure=lambda code: None)
    router = SimpleNamespace(config=SimpleNamespace(ingress="serve"), metrics=metrics)
    app = make_app(lambda: router, lambda: None)
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"\xff"}
    await app({"http_version": "1.1", "root_path": "", **scope}, receive, send)
    assert sent[0]["status"] == status


def test_the_error_of_an_unknown_path_has_the_prefix_of_the_application():
    app = make_app(lambda: SimpleNamespace(), lambda: None)
    missing = TestClient(app, root_path="/b").get("/b/v2/pets").json()["error"]["message"]
    assert missing == "no such path: /b/v2/pets; /b/openapi.json lists those of the API"


@pytest.mark.parametrize("root", ["", "/b"])
def test_a_browser_is_led_from_the_root_to_the_dashboard(root):
    app = make_app(lambda: SimpleNamespace(), lambda: None)
    client = TestClient(app, root_path=root, follow_redirects=False)
    accept = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    led = client.get(f"{root}/", headers=accept)
    assert (led.status_code, led.headers["location"]) == (307, "dashboard/")
    others = [client.get(f"{root}/"), client.post(f"{root}/", headers=accept)]
    others.append(client.get(f"{root}/other", headers=accept))
    assert [each.status_code for each in others] == [404] * 3
    assert "no such path" in others[0].json()["error"]["message"]


@pytest.mark.parametrize("path", ["/b/v1/completions", "/b/v1/messages", "/b/ready"])
def test_the_paths_of_a_redeployed_application_are_unavailable(path):
    class Admin:
        applications = Applications("a")

    Admin.applications._last_listed_at_s["b"] = time.monotonic()
    client = TestClient(make_app(lambda: SimpleNamespace(), Admin))
    answer = client.post(path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "b is being redeployed" in answer.json()["error"]["message"]
    assert [client.post(each).status_code for each in ("/b/c", "/c/ready", "/b")] == [404] * 3


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("secret"), 500, INTERNAL_MESSAGE),
        (OSError(errno.EMFILE, "secret"), 503, NO_DESCRIPTOR_MESSAGE),
    ],
)
def test_an_error_that_no_route_reports_has_the_format_of_other_errors(error, status, message):
    def fail():
        raise error

    client = TestClient(make_app(fail, lambda: None), raise_server_exceptions=False)
    for path in ("/health", "/metrics", "/v1/models"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)
        assert ("retry-after" in answer.headers) == (status == 503)
    direct = TestClient(HttpApp(HttpLimits, {"/x": failing(error)}), raise_server_exceptions=False)
    limits = make_app(lambda: None, lambda: None, get_limits=fail)
    limited = TestClient(limits, raise_server_exceptions=False)
    for answer in (client.post("/tokenize", json={}), direct.post("/x"), limited.get("/health")):
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)


def failing(error, *messages):
    """Make an application that fails after it has sent messages."""

    async def app(scope, receive, send):
        for each in messages:
            await send(each)
        raise error

    return app


async def test_an_error_in_a_response_adds_nothing_to_it():
    start, sent = {"type": "http.response.start", "status": 200, "headers": []}, []

    async def send(message):
        sent.append(message)

    app = HttpApp(HttpLimits, {"/x": failing(KeyError("x"), start)})
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    with pytest.raises(KeyError):
        await app(scope, None, send)
    assert sent == [start]


def test_other_pages_do_not_exist():
    client = TestClient(make_app(lambda: SimpleNamespace(), lambda: None))
    assert [client.get(path).status_code for path in ("/", "/docs", "/redoc")] == [404] * 3
