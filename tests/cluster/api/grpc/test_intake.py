# Modules: cluster.api.grpc.rpc_access
"""Reception of messages on a real server: access first, few at a time, within a time."""

import asyncio
import sys
from contextlib import suppress
from functools import partial

import grpc
import psutil
import pytest
from grpc import StatusCode
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.api.base.authentication import AdminAccess, ApiKey, ApiKeys
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.grpc import intake
from cluster.api.grpc.intake import CHANNEL_OPTIONS, Intake
from cluster.api.grpc.rpc_access import has_access
from cluster.api.grpc.servicers import add_inference_service
from cluster.api.grpc.status import MALFORMED_MESSAGE, reporting_to
from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceServicer, InferenceServiceStub
from tests.waiting import eventually

MIB = 2**20
KEY = "sk-correct-horse"
INFERENCE = "specdec.v1.InferenceService"
GENERATE = f"/{INFERENCE}/Generate"


class Counting(InferenceServiceServicer):
    """Holds each request until `is_open`, within a budget, and keeps their sizes."""

    def __init__(self):
        self.budget = ByteBudget(64 * MIB)
        self.is_open = asyncio.Event()
        self.sizes = []

    async def Generate(self, request, context):  # noqa: N802
        self.sizes.append(len(request.text))
        with reporting_to(context), self.budget.hold(request.ByteSize()):
            await self.is_open.wait()
        return pb.GenerateResponse(request_id="done")

    async def GenerateStream(self, request, context):  # noqa: N802
        self.sizes.append(len(request.text))
        for _ in range(3):
            yield pb.GenerateStreamResponse(request_id="done")


class Served:
    """A server with an intake, and a channel to it."""

    def __init__(self, keys=(), max_calls=1000, **options):
        self.servicer = Counting()
        access = partial(has_access, ApiKeys(keys), AdminAccess())
        self.intake = Intake(access, max_calls, services=(INFERENCE,), **options)
        self.server = grpc.aio.server(
            interceptors=[self.intake],
            options=[("grpc.max_receive_message_length", 16 * MIB), *CHANNEL_OPTIONS],
        )
        add_inference_service(self.servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self.server)

    async def __aenter__(self):
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(self.address, options=options)
        self.stub = InferenceServiceStub(self.channel)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(0)


async def code_of(call):
    try:
        await call
    except grpc.RpcError as error:
        return error.code()
    return StatusCode.OK


async def test_messages_of_all_kinds_of_calls_arrive():
    async with Served() as served:
        served.servicer.is_open.set()
        assert (await served.stub.Generate(pb.GenerateRequest(text="abc"))).request_id == "done"
        chunks = [each async for each in served.stub.GenerateStream(pb.GenerateRequest(text="ab"))]
        assert [each.request_id for each in chunks] == ["done"] * 3
        assert served.servicer.sizes == [3, 2]
        status = await health_pb2_grpc.HealthStub(served.channel).Check(
            health_pb2.HealthCheckRequest()
        )
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        too_large = served.stub.Generate(pb.GenerateRequest(text="x" * 17 * MIB))
        assert await code_of(too_large) is StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            await served.channel.unary_unary(GENERATE)(b"\xff")
        assert caught.value.details() == MALFORMED_MESSAGE


async def test_a_hundred_large_messages_take_the_memory_of_few():
    async with Served() as served:
        before = peak = psutil.Process().memory_info().rss
        command = (sys.executable, "-m", "tests.cluster.large_messages", served.address)
        client = await asyncio.create_subprocess_exec(
            *command, "100", str(15 * MIB), stdout=asyncio.subprocess.PIPE
        )
        printed = asyncio.ensure_future(client.stdout.read())
        while not printed.done():
            await asyncio.sleep(0.01)
            peak = max(peak, psutil.Process().memory_info().rss)
            if len(served.servicer.sizes) == 100:
                served.servicer.is_open.set()
    counts = dict(line.split() for line in (await printed).decode().splitlines())
    assert counts == {"OK": "4", "RESOURCE_EXHAUSTED": "96"}  # 60 of 64 MiB are held
    assert peak - before < 700 * MIB, "without an intake 1500 MiB and more"


async def test_a_message_without_access_is_not_received():
    async with Served([ApiKey("ann", KEY)]) as served:
        served.servicer.is_open.set()
        text = "x" * 1000
        await served.stub.Generate(pb.GenerateRequest(text=text))
        assert served.servicer.sizes == [0]
        metadata = (("authorization", f"Bearer {KEY}"),)
        await served.stub.Generate(pb.GenerateRequest(text=text), metadata=metadata)
        assert served.servicer.sizes == [0, 1000]


async def test_calls_without_a_message_end_and_leave_their_places():
    async with Served(max_receiving=1, timeout_s=0.5) as served:
        served.servicer.is_open.set()
        stalled = served.channel.stream_unary(GENERATE)()
        assert await code_of(stalled) is StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.5 s" in await stalled.details()
        served.intake._timeout_s = 30.0
        closed = served.channel.stream_unary(GENERATE)(iter(()))
        assert await code_of(closed) is StatusCode.INVALID_ARGUMENT
        left = served.channel.stream_unary(GENERATE)()
        await eventually(served.intake._places.locked)
        left.cancel()
        assert await code_of(served.stub.Generate(pb.GenerateRequest())) is StatusCode.OK


async def test_calls_beyond_the_limit_are_refused_and_probes_answered():
    async with Served(max_calls=3) as served:
        calls = [served.stub.Generate(pb.GenerateRequest(text="x")) for _ in range(5)]
        await eventually(lambda: sum(call.done() for call in calls) == 2)
        await eventually(lambda: len(served.servicer.sizes) == 3)
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"too many open calls \(limit 3\)"
        ) as caught:
            await served.stub.Generate(pb.GenerateRequest())
        assert dict(caught.value.trailing_metadata())["retry-after-s"] == "1"
        stub = health_pb2_grpc.HealthStub(served.channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status
        served.servicer.is_open.set()
        codes = [await code_of(call) for call in calls]
        assert sorted(codes, key=str) == [StatusCode.OK] * 3 + [StatusCode.RESOURCE_EXHAUSTED] * 2
        assert await code_of(served.stub.Generate(pb.GenerateRequest())) is StatusCode.OK


async def test_watches_of_the_health_take_no_place_of_other_calls(monkeypatch):
    monkeypatch.setattr(intake, "MAX_OTHER_CALLS", 4)
    async with Served() as served:
        served.servicer.is_open.set()
        stub = health_pb2_grpc.HealthStub(served.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(4)]
        assert all([(await watch.read()).status for watch in watches])
        refused = stub.Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="too many open calls"):
            await refused.read()
        assert await code_of(served.stub.Generate(pb.GenerateRequest())) is StatusCode.OK
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status


async def test_checks_of_the_health_take_the_memory_of_few(monkeypatch):
    """Unfinished messages take all places; further checks are answered, but not received."""
    names = []

    class Health(health.aio.HealthServicer):
        async def Check(self, request, context):  # noqa: N802
            names.append(request.service)
            return await super().Check(health_pb2.HealthCheckRequest(), context)

    monkeypatch.setattr(intake, "MAX_RECEIVING_CHECKS", 2)
    monkeypatch.setattr(health.aio, "HealthServicer", Health)
    async with Served(timeout_s=2) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        named = health_pb2.HealthCheckRequest(service="x" * 1000)
        assert (await stub.Check(named)).status
        stalled = [served.channel.stream_unary(intake._CHECK)() for _ in range(2)]
        await eventually(served.intake._check_places.locked)
        assert (await stub.Check(named)).status
        assert [len(name) for name in names] == [1000, 0]
        assert [await code_of(call) for call in stalled] == [StatusCode.DEADLINE_EXCEEDED] * 2
        assert (await stub.Check(named)).status
        assert len(names[-1]) == 1000


async def test_connections_that_are_not_http2_end():
    options = dict(intake.CHANNEL_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
    quick = {name: 500 if name.endswith(("_ms", "timeout")) else 0 for name in options}
    server = grpc.aio.server(options=[*quick.items()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for sent in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(10):
            while await reader.read(2**16):
                pass
        writer.close()
    await server.stop(0)


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_clients_may_ping_every_ten_seconds(is_allowed):
    """In a hundredth of the time; gRPC's own limit ends the connection."""
    options = {name: value // 100 or value for name, value in intake.PING_OPTIONS}
    server = grpc.aio.server(options=[*options.items()] if is_allowed else None)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
    num_answered = 0
    with suppress(asyncio.IncompleteReadError):
        for number in range(6):
            payload = b"%08d" % number
            writer.write(bytes.fromhex("000008060000000000") + payload)
            await asyncio.wait_for(reader.readuntil(payload), 10)
            num_answered += 1
            await asyncio.sleep(10 / 100)
    assert (num_answered == 6) == is_allowed
    writer.close()
    await server.stop(0)
