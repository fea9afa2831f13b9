# Modules: cluster.api.endpoint_picker.certificates
"""The picker's gRPC server, called as Envoy calls it, with two fake replicas."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.api.endpoint_picker import server
from cluster.api.endpoint_picker.certificates import self_signed
from cluster.api.endpoint_picker.scraper import ScrapeConfig
from cluster.api.endpoint_picker.server import (
    LIVENESS,
    READINESS,
    SERVICE,
    PickerConfig,
    check_address,
)
from protos.ext_proc import external_processor_pb2 as pb
from specdec.types.errors import InvalidValueError
from tests.cluster.api.endpoint_picker.fake_replica import (
    FakeReplica,
    Picking,
    chosen,
    chosen_after_headers,
    picking,
    running_picker,
)
from tests.e2e.conftest import free_ports
from tests.waiting import DEADLINE_S, eventually

ADDRESS = "10.0.0.1:8000"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = "Once there was a river that met a mountain. " * 40


async def health(channel, name):
    request = health_pb2.HealthCheckRequest(service=name)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def test_requests_go_to_replicas_that_are_ready_and_conversations_stay():
    replicas = [FakeReplica(), FakeReplica()]
    async with picking(*replicas) as picker:
        first = await picker.pick({"model": "m", "prompt": LONG})
        for turn in range(3):
            again = await picker.pick({"model": "m", "prompt": LONG + f"turn {turn} " * 20})
            assert again == first
        [busy] = [each for each in replicas if each.address == first]
        [other] = [each for each in replicas if each is not busy]
        busy.waiting = 20
        await eventually(lambda: waiting(picker, busy) == 20)
        assert await picker.pick({"model": "m", "prompt": LONG}) == other.address
        other.ready_status = 503  # it drains
        await picker.until_up(busy.address)
        assert await picker.pick({"model": "m", "prompt": LONG}) == busy.address
        busy.ready_status = 503
        await picker.until_up()
        assert await picker.pick() == 503


def waiting(picker, replica):
    pool = picker.server.pool
    return pool.get(replica.address).last_report.num_waiting


async def test_an_objective_reaches_the_pool(caplog):
    async with picking(FakeReplica()) as picker:
        await picker.pick()
    assert "service curve" not in caplog.text
    replica = FakeReplica()
    async with picking(replica, slo="ttft:2000 tpot:40") as picker:
        assert await picker.pick() == replica.address
    assert "no service curve" in caplog.text


async def test_open_streams_are_open_requests():
    async with picking(FakeReplica(), FakeReplica()) as picker:
        async with picker.stream() as one, picker.stream() as two:
            assert await chosen(one) != await chosen(two)
            assert [each.num_open for each in picker.server.pool.endpoints] == [1, 1]
        await eventually(lambda: not any(e.num_open for e in picker.server.pool.endpoints))
        call = picker.stream()
        stream = await call.__aenter__()
        await chosen(stream)
        stream.cancel()  # the client has gone, and Envoy resets the stream
        await eventually(lambda: not any(e.num_open for e in picker.server.pool.endpoints))


async def test_a_picker_that_stops_leaves_open_responses_to_the_proxy(monkeypatch):
    """Its streams end with OK once their requests have an endpoint, which Envoy permits."""
    accept_s, has_picked = 3600.0, asyncio.Event()

    async def sleep(seconds):
        await (has_picked.wait() if seconds == accept_s else asyncio.sleep(seconds))

    monkeypatch.setattr(server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    async with picking(FakeReplica()) as picker:
        chosen_before, choosing, relaying = picker.call(), picker.call(), picker.call()
        await chosen(relaying)
        only_requests = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
        only_requests.protocol_config.request_body_mode = pb.FULL_DUPLEX_STREAMED
        await chosen_before.write(only_requests)
        assert (await chosen_before.read()).HasField("request_headers")
        only_requests.request_headers.end_of_stream = False
        await choosing.write(only_requests)
        stop = asyncio.create_task(picker.server.close(accept_s, 30.0))
        await eventually_status(picker.channel, READINESS, NOT_SERVING)
        assert isinstance(await picker.pick(), str), "gateways notice it late"
        has_picked.set()
        await has_ended(chosen_before)
        assert isinstance(await chosen_after_headers(choosing), str)
        await has_ended(choosing)
        for is_end in (False, True):
            part = pb.HttpBody(body=b"token", end_of_stream=is_end)
            await relaying.write(pb.ProcessingRequest(response_body=part))
            assert (await relaying.read()).HasField("response_body")
        await relaying.done_writing()
        await has_ended(relaying)
        await stop


async def test_a_response_that_is_too_long_for_the_stop_is_broken_off():
    """The parts that are on their way to the picker would be missing from it."""
    async with picking(FakeReplica()) as picker:
        stream = picker.call()
        await chosen(stream)
        await picker.server.close(0.0, 0.1)
        assert (await stream.read()).immediate_response.status.code == 503
        await has_ended(stream)


async def has_ended(stream):
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() == grpc.StatusCode.OK


async def test_a_body_that_takes_too_long_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(server, "_CHOICE_S", 0.1)
    async with picking(FakeReplica()) as picker, picker.stream() as stream:
        await stream.write(pb.ProcessingRequest(request_headers=pb.HttpHeaders()))
        part = pb.HttpBody(body=b'{"model": ')
        await stream.write(pb.ProcessingRequest(request_body=part))
        assert (await stream.read()).HasField("request_headers")
        assert (await stream.read()).HasField("request_body")
        [endpoint] = picker.server.pool.endpoints
        assert endpoint.choices == {"unread": 1}


async def test_small_parts_of_bodies_have_a_limit_together(monkeypatch):
    monkeypatch.setattr(server, "_MAX_HELD_BYTES", 100)
    async with picking(FakeReplica()) as picker, picker.stream() as one, picker.stream() as two:
        for stream in (one, two):
            await stream.write(pb.ProcessingRequest(request_headers=pb.HttpHeaders()))
            part = pb.HttpBody(body=b"x" * 60)
            await stream.write(pb.ProcessingRequest(request_body=part))
        [endpoint] = picker.server.pool.endpoints
        await eventually(lambda: endpoint.choices == {"unread": 1})


@pytest.mark.parametrize("vanishes", [False, True])
async def test_requests_of_a_proxy_that_has_vanished_end(monkeypatch, vanishes):
    """It sends nothing, not even the end of its connections, as a node without power.

    An idle proxy that answers pings stays.
    """
    monkeypatch.setattr(server, "_KEEPALIVE_S", 0.1)
    monkeypatch.setattr(server, "_KEEPALIVE_TIMEOUT_S", 1.0 if vanishes else 30.0)
    async with picking(FakeReplica()) as picker, relayed(picker.server.port) as relay:
        port, vanish, to_proxy = relay
        [endpoint] = picker.server.pool.endpoints
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = Picking(picker.server, channel).call()
            await chosen(stream)
            if vanishes:
                vanish.set()
                await eventually(lambda: endpoint.num_open == 0)
            else:
                num_before = len(to_proxy)  # a ping follows the answer to the one before
                await eventually(lambda: len(to_proxy) > num_before + 3)
                assert endpoint.num_open == 1


@asynccontextmanager
async def relayed(port):
    """Forward connections to a port.

    Yield the port to connect to, the event that ends it, and the parts that came back so far.
    """
    vanished, back = asyncio.Event(), []

    async def copy(reader, writer, parts):
        while (data := await reader.read(2**16)) and not vanished.is_set():
            parts.append(data)
            writer.write(data)
        await asyncio.Event().wait()

    async def connect(reader, writer):
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        for pair in ((reader, to_writer, []), (to_reader, writer, back)):
            copies.append(asyncio.create_task(copy(*pair)))

    copies = []
    listener = await asyncio.start_server(connect, "127.0.0.1", 0)
    yield listener.sockets[0].getsockname()[1], vanished, back
    for each in copies:
        each.cancel()
    listener.close()


async def test_an_adapter_is_found_where_it_is_loaded():
    replicas = [FakeReplica(), FakeReplica(models=("m", "sql"))]
    async with picking(*replicas) as picker:
        await eventually(lambda: all(each.models for each in picker.server.pool.endpoints))
        found = {await picker.pick({"model": "sql", "prompt": f"{i}"}) for i in range(8)}
        assert found == {replicas[1].address}


async def test_settings_of_the_choice_reach_the_pool():
    async with picking(FakeReplica(waiting=3), max_waiting=3) as picker:
        assert await picker.pick() == 429
    async with picking(FakeReplica(), FakeReplica(), num_fallbacks=1) as picker:
        assert len((await picker.pick()).split(",")) == 2


async def eventually_status(channel, name, status):
    async with asyncio.timeout(DEADLINE_S):
        while await health(channel, name) != status:
            await asyncio.sleep(0.01)


async def test_health_is_that_of_the_protocol():
    """It is alive at once, and ready after the first scrapes."""
    replica = FakeReplica(may_answer=asyncio.Event())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(replica.running())
        config = PickerConfig(endpoints=(replica.address,))
        picker = await stack.enter_async_context(running_picker(config))
        assert await health(picker.channel, LIVENESS) == SERVING
        for name in ("", READINESS, SERVICE):
            assert await health(picker.channel, name) == NOT_SERVING
        assert await picker.pick() == 503
        replica.may_answer.set()
        await picker.until_up(replica.address)
        for name in ("", READINESS, SERVICE):
            await eventually_status(picker.channel, name, SERVING)


async def test_pods_cannot_be_followed_outside_of_a_pod(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidValueError, match="in a pod with a service account"):
        async with running_picker(PickerConfig(pod_selector="app=chat")):
            pass


async def test_a_self_signed_certificate_encrypts():
    """Health checks of Kubernetes have a port without TLS."""
    [port] = free_ports(1)
    config = PickerConfig(endpoints=("127.0.0.1:1",), tls_self_signed=True, health_port=port)
    async with running_picker(config) as picker:
        with pytest.raises(grpc.aio.AioRpcError):
            await health(picker.channel, LIVENESS)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await health(channel, LIVENESS) == SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="Method not found"):
                await picked_by(channel)


async def picked_by(channel):
    return await Picking(None, channel).call().read()


async def test_a_certificate_of_the_operator_is_used(tmp_path):
    key, certificate = self_signed()
    paths = {"tls_key_file": tmp_path / "key", "tls_cert_file": tmp_path / "cert"}
    for path, data in zip(paths.values(), (key, certificate), strict=True):
        path.write_bytes(data)
    config = PickerConfig(endpoints=("127.0.0.1:1",), **paths)
    credentials = grpc.ssl_channel_credentials(certificate)
    async with running_picker(config, credentials=credentials) as picker:
        assert await health(picker.channel, LIVENESS) == SERVING
        key, renewed = self_signed()
        for data, served in ((b"damaged", certificate), (renewed, renewed)):
            paths["tls_cert_file"].write_bytes(data)
            paths["tls_key_file"].write_bytes(key)
            trusted = grpc.ssl_channel_credentials(served)
            address = f"127.0.0.1:{picker.server.port}"
            async with grpc.aio.secure_channel(address, trusted) as channel:
                assert await health(channel, LIVENESS) == SERVING


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "endpoints"),
        ({"endpoints": (ADDRESS,), "pod_selector": "a=b"}, "endpoints"),
        ({"endpoints": ("a",)}, "endpoints"),
        ({"endpoints": (ADDRESS,), "port": 7, "health_port": 7}, "health_port"),
        ({"endpoints": (ADDRESS,), "port": 7, "metrics_port": 7}, "metrics_port"),
        ({"endpoints": (ADDRESS,), "health_port": 7, "metrics_port": 7}, "health_port"),
        ({"endpoints": (ADDRESS,), "tls_cert_file": "x"}, "tls_cert_file"),
        ({"endpoints": (ADDRESS,), "tls_key_file": "x"}, "tls_cert_file"),
        (
            {
                "endpoints": (ADDRESS,),
                "tls_cert_file": "x",
                "tls_key_file": "x",
                "tls_self_signed": True,
            },
            "tls_cert_file",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, field):
    with pytest.raises(InvalidValueError) as caught:
        PickerConfig(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", ":80", "host:80", "fd00::1:80", "[10.0.0.1]:80"),
        *("10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:x"),
    ],
)
def test_an_address_has_an_ip_address_and_a_port(address):
    with pytest.raises(InvalidValueError):
        check_address(address)


def test_a_ca_file_without_certificates_is_rejected(tmp_path):
    (tmp_path / "ca").write_text("no certificate")
    scrape = ScrapeConfig(ca_file=str(tmp_path / "ca"))
    with pytest.raises(InvalidValueError, match=r"endpoint_ca_file is .* file of certificates"):
        PickerConfig(endpoints=(ADDRESS,), scrape=scrape)


def test_the_ca_file_is_read_once(tmp_path):
    (tmp_path / "ca").write_bytes(self_signed()[1])
    scrape = ScrapeConfig(ca_file=str(tmp_path / "ca"))
    config = PickerConfig(endpoints=(ADDRESS,), scrape=scrape)
    (tmp_path / "ca").unlink()
    assert config.scrape.ssl_context.cert_store_stats()["x509"] == 1


@pytest.mark.parametrize("address", [ADDRESS, "[fd00::1]:80"])
def test_addresses_of_both_versions_are_accepted(address):
    check_address(address)
