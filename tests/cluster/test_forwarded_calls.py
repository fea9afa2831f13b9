"""gRPC methods between two servicers, without Ray between them."""

from contextlib import aclosing

import grpc
import pytest

from cluster import forwarded_calls
from cluster.api_keys import NoApiKeyError
from cluster.forwarded_calls import ForwardedCall, Guard, by_model, streamed_by_model
from protos.specdec.v1 import inference_pb2 as pb
from specdec.errors import NotReadyError, OverloadedError, UnknownModelError


class Context:
    """As grpc's."""

    def __init__(self):
        self.code = self.details = None
        self.trailing = ()

    def invocation_metadata(self):
        return (("traceparent", "00-1"),)

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, metadata):
        self.trailing = tuple(metadata)


def _check(servicer, grpc_context):
    """Of the real ones: whether the caller's key is theirs."""
    servicer.num_checked += 1
    if servicer.is_closed:
        raise NoApiKeyError


_GUARD = Guard(_check, lambda servicer, code: servicer.counted.append(code))


class Servicer:
    """Answers with its own name, and knows another."""

    def __init__(self, name, other=None, error=None):
        self.name, self.other, self.error = name, other, error
        self.applications = self
        self.metadata = None
        self.is_closed, self.num_checked = False, 0
        self.counted = []

    async def elsewhere(self, model):
        if model in ("", self.name):
            return None
        if self.other is None or model != self.other.name:
            raise UnknownModelError(model, self.name)
        return self

    async def stream(self, method, call):
        """As a Fellow's: the other answers."""
        assert method == "answer_call"
        assert isinstance(call, ForwardedCall)
        if self.other.name == "away":
            raise NotReadyError("it is away")
        async with aclosing(forwarded_calls.answer(self.other, call)) as messages:
            async for each in messages:
                yield each

    @by_model(pb.DetokenizeResponse, _GUARD)
    async def Detokenize(self, request, grpc_context):  # noqa: N802 - the name of its RPC
        self.metadata = grpc_context.invocation_metadata()
        with forwarded_calls.reporting_to(grpc_context):
            if self.error is not None:
                raise self.error
            return pb.DetokenizeResponse(text=self.name)
        return pb.DetokenizeResponse()

    @streamed_by_model(_GUARD)
    async def GenerateStream(self, request, grpc_context):  # noqa: N802
        with forwarded_calls.reporting_to(grpc_context):
            for index in range(3):
                yield pb.GenerateStreamResponse(text=f"{self.name}{index}")
            if self.error is not None:
                raise self.error


async def detokenized(servicer, model, context):
    return (await servicer.Detokenize(pb.DetokenizeRequest(model=model), context)).text


async def streamed(servicer, model, context):
    request = pb.GenerateRequest(model=model)
    return [each.text async for each in servicer.GenerateStream(request, context)]


async def test_each_answers_for_its_own_model():
    a = Servicer("a", Servicer("b"))
    for model, name in (("", "a"), ("a", "a"), ("b", "b")):
        assert await detokenized(a, model, Context()) == name
        assert await streamed(a, model, Context()) == [f"{name}{i}" for i in range(3)]
    assert a.other.metadata == (("traceparent", "00-1"),)


async def test_an_error_over_there_is_the_status_here():
    a = Servicer("a", Servicer("b", error=OverloadedError("full")))
    context = Context()
    assert await detokenized(a, "b", context) == ""
    assert (context.code, context.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert dict(context.trailing)["retry-after-s"]
    context = Context()
    assert len(await streamed(a, "b", context)) == 3
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("nobody's", grpc.StatusCode.NOT_FOUND),
        ("x" * 257, grpc.StatusCode.INVALID_ARGUMENT),
        ("away", grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_what_cannot_be_forwarded_has_a_status_too(model, code):
    a = Servicer("a", Servicer("away"))
    context = Context()
    assert await detokenized(a, model, context) == ""
    assert context.code is code
    context = Context()
    assert await streamed(a, model, context) == []
    assert context.code is code
    assert a.counted == [code] * 2


async def test_whose_key_is_not_ours_is_not_told_which_models_there_are():
    """But asks for another's model: what that wants of callers it sees to itself."""
    a = Servicer("a", Servicer("b"))
    a.is_closed = True
    for ask in (detokenized, streamed):
        context = Context()
        await ask(a, "nobody's", context)
        assert context.code is grpc.StatusCode.UNAUTHENTICATED
        assert "model" not in context.details
        context = Context()
        await ask(a, "b", context)
        assert context.code is None
    assert a.num_checked == 2


async def test_what_was_forwarded_once_is_not_forwarded_again():
    """Though `b` would say that the model is somebody else's."""
    b = Servicer("b", Servicer("c"))
    call = ForwardedCall("Detokenize", pb.DetokenizeRequest(model="c"), ())
    answer, status = [each async for each in forwarded_calls.answer(b, call)]
    assert answer.text == "b"
    assert status.code is None
