"""Pods of a fake Kubernetes API over TLS: the list, the watch, and errors of both."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

import pytest

from cluster.api.endpoint_picker import kubernetes
from cluster.api.endpoint_picker.certificates import self_signed
from cluster.api.endpoint_picker.kubernetes import Cluster, PodWatcher
from specdec.types.errors import InvalidValueError
from tests.cluster.http_server import running_server
from tests.waiting import eventually


def pod(name, ip, *, ready="True", deleted=False):
    metadata = {"name": name}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": ready}]
    return {"metadata": metadata, "status": {"podIP": ip, "conditions": conditions}}


class FakeApi:
    """The endpoint of pods: a list, and a watch whose events are put into a queue."""

    def __init__(self, *pods):
        self.pods = list(pods)
        self.requests = []
        self.status = 200
        self.events = asyncio.Queue()

    async def __call__(self, scope, receive, send):
        query = {k: v[0] for k, v in parse_qs(scope["query_string"].decode()).items()}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["path"], query, headers["authorization"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        if "watch" not in query:
            body = json.dumps({"metadata": {"resourceVersion": "7"}, "items": self.pods})
            await send({"type": "http.response.body", "body": body.encode()})
            return
        while (event := await self.events.get()) is not None:
            for part in event:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def put(self, kind, item):
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        self.events.put_nowait([line[:9], line[9:]])  # lines need not arrive whole


@asynccontextmanager
async def watching(api, account, **changes):
    """Run the server and a watcher of it; yield the list of its reports."""
    key, certificate = self_signed()
    (account / "key").write_bytes(key)
    (account / "ca.crt").write_bytes(certificate)
    (account / "token").write_text("secret\n")
    tls = {"ssl_keyfile": account / "key", "ssl_certfile": account / "ca.crt"}
    async with running_server(api, **tls) as port:
        cluster = Cluster(f"https://localhost:{port}", "llm", account)
        reports = []
        task = asyncio.create_task(PodWatcher(cluster, "app=chat", 8000, reports.append).run())
        try:
            yield reports
        finally:
            task.cancel()
            api.events.put_nowait(None)


async def test_pods_are_followed(tmp_path):
    api = FakeApi(pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ready="False"))
    async with watching(api, tmp_path) as reports:
        await eventually(lambda: reports == [["10.0.0.1:8000"]])
        api.put("MODIFIED", pod("b", "10.0.0.2"))
        await eventually(lambda: reports[-1] == ["10.0.0.1:8000", "10.0.0.2:8000"])
        api.put("ADDED", pod("c", "fd00::1"))
        await eventually(lambda: reports[-1][-1] == "[fd00::1]:8000")
        api.put("MODIFIED", pod("a", "10.0.0.1", deleted=True))
        await eventually(lambda: len(reports[-1]) == 2)
        api.put("DELETED", pod("c", "fd00::1"))
        await eventually(lambda: reports[-1] == ["10.0.0.2:8000"])
        api.put("ADDED", {"metadata": {"name": "d"}})
        api.put("ADDED", pod("e", "", ready="True"))
        await eventually(lambda: len(reports) == 7)
        assert reports[-1] == ["10.0.0.2:8000"]
    (path, listed, token), (_, watched, _) = api.requests
    assert (path, token) == ("/api/v1/namespaces/llm/pods", "Bearer secret")
    assert listed == {"labelSelector": "app=chat"}
    assert watched.items() >= {"watch": "1", "resourceVersion": "7"}.items()


@pytest.mark.parametrize(
    "event",
    [
        ("ERROR", {"code": 410, "message": "too old resource version"}),
        ("ADDED", {}),
        ("BOOKMARK", None),
        ("ADDED", "text"),
        ("ERROR", "text"),
    ],
)
async def test_after_a_broken_watch_the_pods_are_listed_again(tmp_path, monkeypatch, event):
    monkeypatch.setattr(kubernetes, "_RETRY_S", 0.01)
    api = FakeApi(pod("a", "10.0.0.1"))
    async with watching(api, tmp_path) as reports:
        await eventually(lambda: len(reports) == 1)
        (tmp_path / "token").write_text("renewed")
        api.pods.append(pod("b", "10.0.0.2"))
        api.put(*event)
        await eventually(lambda: reports[-1] == ["10.0.0.1:8000", "10.0.0.2:8000"])
    assert api.requests[2][2] == "Bearer renewed"


async def test_a_watch_that_ends_is_begun_again_after_a_pause(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes, "_RETRY_S", 0.2)
    api = FakeApi(pod("a", "10.0.0.1"))
    for _ in range(1000):
        api.events.put_nowait(None)  # each ends a watch at once
    begun_s = time.monotonic()
    async with watching(api, tmp_path) as reports:
        await eventually(lambda: len(reports) >= 3)
        assert time.monotonic() - begun_s > 0.39, "two pauses"


async def test_an_api_that_fails_or_sends_too_much_keeps_the_pods(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes, "_RETRY_S", 0.01)
    monkeypatch.setattr(kubernetes, "_MAX_LIST_BYTES", 1000)
    monkeypatch.setattr(kubernetes, "_MAX_EVENT_BYTES", 1000)
    api = FakeApi(pod("a", "10.0.0.1"))
    async with watching(api, tmp_path) as reports:
        await eventually(lambda: len(reports) == 1)
        api.events.put_nowait([b"x" * 2000])
        await eventually(lambda: len(reports) == 2)
        api.status = 500
        for _ in range(2):  # of which the first ends the handler of the former watch
            api.events.put_nowait(None)
        await eventually(lambda: len(api.requests) > 6)
        api.status, api.pods = 200, [pod(str(i), "10.0.0.3") for i in range(100)]
        count = len(api.requests)
        await eventually(lambda: len(api.requests) > count + 3)
        assert reports == [["10.0.0.1:8000"]] * 2


def test_the_cluster_of_a_pod(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(InvalidValueError, match="in a pod with a service account"):
        Cluster.of_pod(None, tmp_path)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "namespace").write_text("llm\n")
    assert Cluster.of_pod(None, tmp_path) == Cluster("https://[fd00::1]:6443", "llm", tmp_path)
    assert Cluster.of_pod("other", tmp_path).namespace == "other"
