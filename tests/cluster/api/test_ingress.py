"""The servers of a replica."""

import asyncio
import ssl

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.api import ingress
from cluster.api.endpoint_picker.certificates import self_signed
from cluster.api.ingress import IngressFailedError
from tests.cluster.ingress import running_ingress

HALF_SENT = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000\r\n\r\n{"
)


async def grpc_status(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)).status


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError("no descriptors"), "no descriptors"), (MemoryError(), "MemoryError"), (None, "")],
)
async def test_a_server_that_ends_makes_the_replica_unhealthy_at_once(
    tiny_model_dir, tmp_path, monkeypatch, caplog, error, reason
):
    fails, failed = asyncio.Event(), asyncio.Event()

    async def serve(server, sockets):
        await fails.wait()
        if error is not None:
            raise error

    monkeypatch.setattr(ingress._HttpServer, "serve", serve)
    async with running_ingress(tiny_model_dir, tmp_path) as served:
        own = served.ingress
        own._on_failure = failed.set
        await own.set_ready(True)
        own.check()
        fails.set()
        await asyncio.wait_for(failed.wait(), 10)
        reason = f"the HTTP server has ended: {reason or 'without an error'}"
        with pytest.raises(IngressFailedError, match=reason):
            own.check()
        assert reason in caplog.text
        await own.set_ready(True)
        async with grpc.aio.insecure_channel(served.grpc_address) as channel:
            assert await grpc_status(channel) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_new_certificate_files_apply_from_the_next_connection_on(tiny_model_dir, tmp_path):
    paths = {"tls_key_file": tmp_path / "key", "tls_cert_file": tmp_path / "certificate"}

    def write(pair):
        for path, data in zip(paths.values(), pair, strict=True):
            path.write_bytes(data)

    def client_that_trusts(pair):
        context = ssl.create_default_context(cadata=pair[1].decode())
        keeps_connections = httpx.Limits(keepalive_expiry=None)
        return httpx.AsyncClient(verify=context, timeout=30, limits=keeps_connections)

    write(first := self_signed())
    async with (
        running_ingress(tiny_model_dir, tmp_path, **paths) as served,
        client_that_trusts(first) as open_client,
    ):
        url = f"https://{served.http_url.removeprefix('http://')}/health"
        assert (await open_client.get(url)).status_code == 200
        second = self_signed()
        write((second[0], first[1]))  # half of the files are replaced
        async with client_that_trusts(first) as client:
            assert (await client.get(url)).status_code == 200
        write(second)
        async with client_that_trusts(second) as client:
            for _ in range(2):
                assert (await client.get(url)).status_code == 200
        credentials = grpc.ssl_channel_credentials(second[1])
        async with grpc.aio.secure_channel(served.grpc_address, credentials) as channel:
            assert await grpc_status(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await open_client.get(url)).status_code == 200, "its connection goes on"
        async with client_that_trusts(first) as client:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await client.get(url)
