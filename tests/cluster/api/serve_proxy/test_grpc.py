"""The proxy's server, with handlers that fail as Serve's do."""

import errno
import os
from types import SimpleNamespace

import grpc
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, WorkerCrashedError
from ray.serve._private.common import DeploymentID
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType

from cluster.api.base.errors import INTERNAL_MESSAGE
from cluster.api.grpc.routing import hint_of
from cluster.api.serve_proxy.grpc import restate_answers
from cluster.api.serve_proxy.http import proxy_budget
from cluster.config.serve_config import ServeConfig
from cluster.control.peers import LOST_MESSAGE, NOT_STARTED_MESSAGE, ROUTER
from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from specdec.types.errors import BadLogitsError

LOSSES = (
    ActorDiedError(),
    ActorUnavailableError("RPC Error", None),
    WorkerCrashedError(),
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
)
OWN = str(BadLogitsError(num_output_tokens=7))
CASES = [
    *(
        (grpc.StatusCode.INTERNAL, str(each), grpc.StatusCode.UNAVAILABLE, LOST_MESSAGE)
        for each in LOSSES
    ),
    (grpc.StatusCode.INTERNAL, OWN, grpc.StatusCode.INTERNAL, OWN),
    (grpc.StatusCode.INTERNAL, "KeyError: 'x'", grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE),
    (
        grpc.StatusCode.NOT_FOUND,
        "Application 'specdec' not found. Ping ...",
        grpc.StatusCode.UNAVAILABLE,
        NOT_STARTED_MESSAGE,
    ),
    (grpc.StatusCode.NOT_FOUND, "no model 'x'", grpc.StatusCode.NOT_FOUND, "no model 'x'"),
    (grpc.StatusCode.INVALID_ARGUMENT, "top_p", grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
]


class FailingProxy:
    """Proxy of Serve: handlers return serialized messages and set the status on the context."""

    def __init__(self, code, details, routes=(), others=()):
        """routes: of our applications, by name. others: of other applications."""
        self._code, self._details = code, details
        self.proxy_router = SimpleNamespace(
            endpoints={
                DeploymentID(deployment, name): SimpleNamespace(route=route)
                for deployment, them in ((ROUTER, routes), ("Theirs", others))
                for name, route in dict(them).items()
            }
        )
        self.applications, self.sessions = [], []

    def service_handler_factory(self, service_method, streaming_type):
        async def call(request, context):
            self._fail(context)
            return b""

        async def stream(request, context):
            yield pb.GenerateStreamResponse(text="so far").SerializeToString()
            self._fail(context)

        return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else call

    def _fail(self, context):
        metadata = context.invocation_metadata()
        self.applications.append([value for key, value in metadata if key == "application"])
        self.sessions += [value for key, value in metadata if key == "session_id"]
        context.set_code(self._code)
        context.set_details(self._details)


@pytest.fixture
async def start():
    """Return a function that starts a server of failing handlers and returns its address."""
    servers = []

    async def start(proxy):
        server = gRPCGenericServer(proxy.service_handler_factory)
        servers.append(server)
        restate_answers(None, server)
        add_InferenceServiceServicer_to_server(InferenceServiceServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(0)


@pytest.mark.parametrize(
    ("code", "details", "expected", "message"),
    CASES,
    ids=[
        "lost",
        "silent",
        "crashed",
        "out of descriptors",
        "ours",
        "bug",
        "none yet",
        "model",
        "value",
    ],
)
async def test_statuses_of_serve_are_replaced(start, code, details, expected, message):
    async with grpc.aio.insecure_channel(await start(FailingProxy(code, details))) as channel:
        stub = InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Generate(pb.GenerateRequest())
        assert (caught.value.code(), caught.value.details()) == (expected, message)
        stream = stub.GenerateStream(pb.GenerateRequest())
        assert (await stream.read()).text == "so far"
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        assert (caught.value.code(), caught.value.details()) == (expected, message)


@pytest.mark.parametrize(
    ("routes", "given", "expected"),
    [
        ({"b": "/b", "a": "/a", "first": "/"}, (), ["first"]),
        ({"b": "/b", "a": "/a"}, (), ["a"]),
        ({}, (), []),
        ({"first": "/", "b": "/b"}, (("application", "b"),), ["b"]),
    ],
    ids=["the root's", "by name", "none", "as requested"],
)
async def test_a_call_without_an_application_goes_to_one(start, routes, given, expected):
    proxy = FailingProxy(grpc.StatusCode.NOT_FOUND, "no model", routes)
    async with grpc.aio.insecure_channel(await start(proxy)) as channel:
        stub = InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            await stub.Generate(pb.GenerateRequest(), metadata=given)
        with pytest.raises(grpc.RpcError):
            [_ async for _ in stub.GenerateStream(pb.GenerateRequest(), metadata=given)]
    assert proxy.applications == [expected, expected]


async def test_the_proxy_gets_the_routing_hint_as_session_id(start):
    proxy = FailingProxy(grpc.StatusCode.INVALID_ARGUMENT, "reached")
    request = pb.GenerateRequest(text="Once upon a time " * 50)
    async with grpc.aio.insecure_channel(await start(proxy)) as channel:
        stub = InferenceServiceStub(channel)
        for call in (stub.Generate(request), stub.GenerateStream(request)):
            with pytest.raises(grpc.RpcError):
                await call if isinstance(call, grpc.aio.UnaryUnaryCall) else [x async for x in call]
        with pytest.raises(grpc.RpcError):
            await stub.Tokenize(pb.TokenizeRequest(text="text"), metadata=(("session_id", "own"),))
    assert proxy.sessions == [hint_of(request, "").encode()] * 2 + ["own"]


async def test_large_requests_beyond_the_budget_are_refused(start):
    proxy = FailingProxy(grpc.StatusCode.INVALID_ARGUMENT, "reached")
    address = await start(proxy)
    request = pb.GenerateRequest(text="x" * 2**20)
    held = proxy_budget().hold(ServeConfig.max_inflight_mib * 2**20)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        with held:
            for call in (stub.Generate(request), stub.GenerateStream(request).read()):
                with pytest.raises(grpc.aio.AioRpcError, match="max_inflight_mib") as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert dict(caught.value.trailing_metadata())["retry-after-s"] == "1"
            assert proxy.applications == []
            with pytest.raises(grpc.aio.AioRpcError, match="reached"):
                await stub.Generate(pb.GenerateRequest(text="x"))
        with pytest.raises(grpc.aio.AioRpcError, match="reached"):
            await stub.Generate(request)
    assert proxy_budget().num_bytes == 0


async def test_a_call_without_an_application_does_not_go_to_foreign_ones(start):
    """Even if one has the route "/" or the first name."""
    proxy = FailingProxy(grpc.StatusCode.NOT_FOUND, "no model", {"z": "/z"}, {"a": "/a", "b": "/"})
    async with grpc.aio.insecure_channel(await start(proxy)) as channel:
        with pytest.raises(grpc.RpcError):
            await InferenceServiceStub(channel).Generate(pb.GenerateRequest())
    assert proxy.applications == [["z"]]
