"""Forwarding of gRPC calls between two servicers, without Ray."""

from contextlib import aclosing
from math import inf

import grpc
import pytest
from ray.serve.grpc_util import RayServegRPCContext

from cluster.api.base.authentication import NoApiKeyError
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.grpc import forwarding as grpc_forwarding
from cluster.api.grpc.forwarding import ForwardedCall, Forwarding
from cluster.api.grpc.status import StreamFailedError
from protos.specdec.v1 import inference_pb2 as pb
from specdec.types.errors import NotReadyError, OverloadedError, UnknownModelError


def test_the_text_of_a_call_has_neither_credential_nor_prompt():
    metadata = (("authorization", "Bearer sk-secret"),)
    call = ForwardedCall("Generate", pb.GenerateRequest(text="private"), metadata, "peer")
    assert repr(call) == "ForwardedCall(method='Generate', peer='peer')"


class Context:
    """Context of a call, as grpc's."""

    def __init__(self):
        self.code = self.details = None
        self.trailing = ()

    def invocation_metadata(self):
        return (("traceparent", "00-1"),)

    def peer(self):
        return "ipv4:192.0.2.7:5000"

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, metadata):
        self.trailing = tuple(metadata)


class Servicer:
    """Servicer that answers with its name, and forwards to another."""

    def __init__(self, name, other=None, error=None):
        self.name, self.other, self.error = name, other, error
        self.metadata = self.peer = None
        self.is_closed, self.num_checked, self.num_lookups = False, 0, 0
        self.counted = []
        forwarding = Forwarding(self, self._check, self.counted.append, ByteBudget(inf))
        forwarding.mount(self, ("Detokenize", "GenerateStream"))

    def _check(self, grpc_context):
        """Check the caller's key."""
        self.num_checked += 1
        if self.is_closed:
            raise NoApiKeyError

    def is_own(self, model):
        return model in ("", self.name)

    def require_own(self, model):
        if not self.is_own(model):
            raise UnknownModelError(model, self.name)

    async def find(self, model):
        self.num_lookups += 1
        if self.other is None or model != self.other.name:
            raise UnknownModelError(model, self.name)
        return self

    async def stream(self, method, call, session_id):
        """Return the messages of the other, as PeerApplication does."""
        assert method == "answer_call"
        assert isinstance(call, ForwardedCall)
        if self.other.name == "away":
            raise NotReadyError("it is unavailable")
        async with aclosing(grpc_forwarding.answer(self.other, call)) as messages:
            async for each in messages:
                yield each

    async def Detokenize(self, request, grpc_context):  # noqa: N802 - the name of its RPC
        self.metadata, self.peer = grpc_context.invocation_metadata(), grpc_context.peer()
        with grpc_forwarding.reporting_to(grpc_context):
            if self.error is not None:
                raise self.error
            return pb.DetokenizeResponse(text=self.name)
        return pb.DetokenizeResponse()

    async def GenerateStream(self, request, grpc_context):  # noqa: N802
        with grpc_forwarding.reporting_to(grpc_context):
            for index in range(3):
                yield pb.GenerateStreamResponse(text=f"{self.name}{index}")
            if self.error is not None:
                raise self.error
        grpc_forwarding.raise_on_serve(grpc_context)


async def detokenized(servicer, model, context):
    return (await servicer.Detokenize(pb.DetokenizeRequest(model=model), context)).text


async def streamed(servicer, model, context):
    request = pb.GenerateRequest(model=model)
    return [each.text async for each in servicer.GenerateStream(request, context)]


async def test_each_application_answers_for_its_model():
    a = Servicer("a", Servicer("b"))
    for model, name in (("", "a"), ("a", "a"), ("b", "b")):
        assert await detokenized(a, model, Context()) == name
        assert await streamed(a, model, Context()) == [f"{name}{i}" for i in range(3)]
    assert a.other.metadata == (("traceparent", "00-1"),)
    assert a.other.peer == "ipv4:192.0.2.7:5000", "the client's, by which its share is limited"


async def test_an_error_of_the_other_is_the_status_of_the_call():
    a = Servicer("a", Servicer("b", error=OverloadedError("full")))
    context = Context()
    assert await detokenized(a, "b", context) == ""
    assert (context.code, context.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert dict(context.trailing)["retry-after-s"]
    context = Context()
    assert len(await streamed(a, "b", context)) == 3
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert a.counted == [], "the other application counts it"


@pytest.mark.parametrize(
    ("model", "code"),
    [("unknown", grpc.StatusCode.NOT_FOUND), ("away", grpc.StatusCode.UNAVAILABLE)],
)
async def test_a_call_that_cannot_be_forwarded_has_a_status(model, code):
    a = Servicer("a", Servicer("away"))
    context = Context()
    assert await detokenized(a, model, context) == ""
    assert context.code is code
    context = Context()
    assert await streamed(a, model, context) == []
    assert context.code is code
    assert a.counted == [code, code]


async def test_without_a_key_no_application_is_looked_up():
    """And the error names no models; for the own model the method itself checks the key."""
    a = Servicer("a", Servicer("b"))
    a.is_closed = True
    for ask in (detokenized, streamed):
        for model in ("unknown", "b"):
            context = Context()
            await ask(a, model, context)
            assert context.code is grpc.StatusCode.UNAUTHENTICATED
            assert "model" not in context.details
    assert (a.num_checked, a.num_lookups) == (4, 0)
    assert a.counted == [grpc.StatusCode.UNAUTHENTICATED] * 4
    context = Context()
    assert await detokenized(a, "a", context) == "a"
    assert (context.code, a.num_checked) == (None, 4)


async def test_a_name_that_is_too_long_is_not_looked_up():
    a, context = Servicer("a"), Context()
    await detokenized(a, "x" * 257, context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert a.num_lookups == 0


async def test_a_forwarded_call_is_not_forwarded_again():
    """Even if `b` forwards calls for that model; nor does `b` answer for it."""
    b = Servicer("b", Servicer("c"))
    for model, code in (("b", None), ("c", grpc.StatusCode.NOT_FOUND)):
        call = ForwardedCall("Detokenize", pb.DetokenizeRequest(model=model), (), "")
        answer, status = [each async for each in grpc_forwarding.answer(b, call)]
        assert (answer.text, status.code) == ("b" if code is None else "", code)
    assert b.num_lookups == 0


class ServeContext(RayServegRPCContext):
    """Context of Serve without a call."""

    def __init__(self):
        self._code = self._details = None
        self._trailing_metadata = []

    def invocation_metadata(self):
        return ()

    def peer(self):
        return ""


@pytest.mark.parametrize("model", ["a", "b"])
async def test_a_stream_that_fails_keeps_its_status_on_serves_ingress(model):
    error = OverloadedError("full")
    a, context = Servicer("a", Servicer("b", error=error), error), ServeContext()
    with pytest.raises(StreamFailedError, match="full"):
        await streamed(a, model, context)
    assert context.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert a.counted == []
