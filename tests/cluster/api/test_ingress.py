"""The servers of a replica."""

import asyncio

import httpx

from cluster.api import ingress
from tests.cluster.ingress import running_ingress

HALF_SENT = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000\r\n\r\n{"
)


async def test_a_client_that_does_not_send_its_body_delays_no_stop(
    tiny_model_dir, tmp_path, monkeypatch
):
    """Its time limit of 20 s exceeds what a replica has to stop."""
    monkeypatch.setattr(ingress, "_GRACE_S", 0.2)
    async with running_ingress(tiny_model_dir, tmp_path) as served:
        _, port = served.http_url.rsplit(":", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(HALF_SENT)
        await asyncio.sleep(0.1)
    assert await reader.read() == b"", "the connection was closed at once, not with 408"
    writer.close()


async def test_idle_connections_outlast_those_of_proxies(tiny_model_dir, tmp_path, monkeypatch):
    """nginx and cloud load balancers keep theirs for 60 s."""
    handles, call_later = [], asyncio.get_running_loop().call_later

    def recorded(delay_s, callback, *args):
        if getattr(callback, "__name__", "") == "timeout_keep_alive_handler":
            handles.append(delay_s)
        return call_later(delay_s, callback, *args)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", recorded)
    async with running_ingress(tiny_model_dir, tmp_path) as served, httpx.AsyncClient() as client:
        await client.get(f"{served.http_url}/health")
    assert handles
    assert min(handles) > 60


async def test_a_handler_that_ignores_the_end_of_its_connection_delays_no_stop(
    tiny_model_dir, tmp_path, monkeypatch
):
    started, can_end = asyncio.Event(), asyncio.Event()

    async def application(scope, receive, send):
        started.set()
        await can_end.wait()

    monkeypatch.setattr(ingress, "_GRACE_S", 0.2)
    monkeypatch.setattr("tests.cluster.ingress.make_app", lambda *_, **__: application)
    async with running_ingress(tiny_model_dir, tmp_path) as served:
        _, port = served.http_url.rsplit(":", 1)
        _, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(HALF_SENT)
        await started.wait()
    can_end.set()
    writer.close()
