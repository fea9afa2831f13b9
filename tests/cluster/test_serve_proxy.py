"""The proxy's server as Serve makes it, with handlers that fail as Serve's do."""

import grpc
import pytest
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType

from cluster.errors import INTERNAL_MESSAGE
from cluster.serve_proxy import LOST_MESSAGE, NOT_STARTED_MESSAGE, restate_answers
from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)

DEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: ServeReplica"
CASES = [
    (grpc.StatusCode.INTERNAL, DEAD, grpc.StatusCode.UNAVAILABLE, LOST_MESSAGE),
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


def failing(code, details):
    """As Serve's proxy makes handlers: serialized answers, and the status set on the context."""

    def factory(service_method, streaming_type):
        async def call(request, context):
            context.set_code(code)
            context.set_details(details)
            return b""

        async def stream(request, context):
            yield pb.GenerateStreamResponse(text="so far").SerializeToString()
            context.set_code(code)
            context.set_details(details)

        return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else call

    return factory


@pytest.fixture
async def start():
    """Starts a server of failing handlers, and returns its address."""
    servers = []

    async def start(code, details):
        server = gRPCGenericServer(failing(code, details))
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
    ("code", "details", "told", "words"), CASES, ids=["lost", "bug", "none yet", "model", "value"]
)
async def test_what_serve_says_is_told_in_our_words(start, code, details, told, words):
    async with grpc.aio.insecure_channel(await start(code, details)) as channel:
        stub = InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Generate(pb.GenerateRequest())
        assert (caught.value.code(), caught.value.details()) == (told, words)
        stream = stub.GenerateStream(pb.GenerateRequest())
        assert (await stream.read()).text == "so far"
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        assert (caught.value.code(), caught.value.details()) == (told, words)
