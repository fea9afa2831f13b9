"""Routing hints of gRPC calls."""

import pytest

from cluster.api.base.routing_hint import MAX_PARTS, MAX_READ_BYTES, RoutingHint
from cluster.api.grpc.routing import hint_of, with_hint
from protos.specdec.v1 import inference_pb2 as pb

TEXT = "Once upon a time " * 50


def chat(*texts):
    messages = [pb.ChatMessage(role="user", content=each) for each in texts]
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=messages))


def test_a_call_that_generates_has_its_hint_as_session():
    metadata = (("a", "b"), ("session_id", "client"))
    request = pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(max_tokens=9))
    *others, (name, value) = with_hint(metadata, request)
    assert (others, name) == ([("a", "b")], "session_id")
    hint = RoutingHint.decode(value)
    assert (hint.output_tokens, hint.prompt_tokens) == (9, len(TEXT) // 4)
    assert hint.session == RoutingHint.of((), b"", None, "client").session


def test_other_calls_keep_their_metadata():
    metadata = (("session_id", "client"),)
    assert with_hint(metadata, pb.TokenizeRequest(text=TEXT)) == metadata
    large = pb.GenerateRequest(text="x" * MAX_READ_BYTES)
    assert with_hint(metadata, large) == metadata


@pytest.mark.parametrize("request_", [pb.TokenizeRequest(text=TEXT), pb.GenerateRequest(text=TEXT)])
def test_a_hint_of_a_client_is_removed(request_):
    forged = RoutingHint.of(("m",), b"x" * 200, None).encode()
    found = with_hint((("a", "b"), ("session_id", forged)), request_)
    assert found == with_hint((("a", "b"),), request_)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (pb.GenerateRequest(text=TEXT), pb.GenerateRequest(text=TEXT + TEXT)),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(200))),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(400))),
        ),
        (chat(TEXT), chat(TEXT, TEXT)),
    ],
)
def test_a_longer_prompt_has_the_keys_of_its_beginning(before, after):
    shorter, longer = hint_of(before, ""), hint_of(after, "")
    assert len(shorter.prefix_keys) >= 6
    assert longer.prefix_keys[: len(shorter.prefix_keys)] == shorter.prefix_keys


def test_of_many_messages_the_first_ones_are_read():
    some, more = (hint_of(chat(*["a"] * count), "") for count in (MAX_PARTS, 2 * MAX_PARTS))
    assert some == more


def test_a_cache_salt_shares_no_key():
    salted = pb.GenerateRequest(text=TEXT, cache_salt="tenant")
    one, other = hint_of(pb.GenerateRequest(text=TEXT), ""), hint_of(salted, "")
    assert not set(one.prefix_keys) & set(other.prefix_keys)
