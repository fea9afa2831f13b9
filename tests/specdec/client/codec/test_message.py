"""Tests of message codecs: every field is mapped, and decoding reverses encoding."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.specdec.v1 import admin_pb2, inference_pb2
from specdec.client import AuditPage, ProfileReport, ReplicaStatus, TokenizedInput
from specdec.client.codec import admin, inference, receipts
from specdec.client.codec.message import MessageCodec, Options, enum_converter
from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import Counts
from specdec.types.request import GenerateRequest
from specdec.types.sampling.sampling_params import (
    SamplingDefaults,
    SamplingParams,
    SpeculationOptions,
)

METRICS_ONLY = {
    *("block_size", "num_kv_blocks", "max_loras", "adapters_in_use", "at_s"),
    *("num_snapshots", "state_bytes", "service_curve"),
}
"""Fields of a replica's report that are sent as metrics alone."""

PLAIN = {
    int: st.integers(0, 2**31 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bool: st.booleans(),
    datetime: st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
    typing.Any: st.integers(),
}


def values(hint):
    """Return a strategy for values of a type, nested dataclasses included."""
    arguments = typing.get_args(hint)
    if is_dataclass(hint):
        return records(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if typing.get_origin(hint) is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is Mapping:
        return st.dictionaries(*map(values, arguments), max_size=3)
    return st.none() | values(arguments[0])


def records(kind):
    hints = typing.get_type_hints(kind)
    names = [each.name for each in fields(kind) if each.name not in METRICS_ONLY]
    if kind is Counts:  # the others are sent over HTTP only
        names = names[: names.index("decided_lengths")]
    return st.builds(kind, **{name: values(hints[name]) for name in names})


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        (admin.REPLICA, ReplicaStatus),
        (admin.AUDIT_PAGE, AuditPage),
        (admin.PROFILE, ProfileReport),
        (inference.TOKENS, TokenizedInput),
        (MessageCodec(inference_pb2.SamplingDefaults, SamplingDefaults), SamplingDefaults),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@settings(max_examples=40)
@given(data=st.data())
def test_a_round_trip(codec, kind, data):
    record = data.draw(records(kind))
    encoded = codec.encode(record)
    assert codec.decode(codec.message_type.FromString(encoded.SerializeToString())) == record


@pytest.mark.parametrize(
    ("codec", "elsewhere"),
    [
        (admin.CHANGE, {"model"}),
        (admin.STATE, set()),
        (admin.REPLICA, set()),
        (admin.STATUS, set()),
        (admin.AUDIT_PAGE, set()),
        (admin.FLEET, set()),
        (admin.PROFILE_ORDER, {"model"}),
        (admin.PROFILE, set()),
        (inference.TOKENIZE, set()),
        (inference.DETOKENIZE, set()),
        (inference.TOKENS, set()),
        (inference.MODEL_INFO, set()),
        (inference.REQUEST, {"sampling", "speculation"}),
        (inference.SAMPLING, set()),
        (inference.SPECULATION, set()),
        (receipts.RECEIPT, set()),
    ],
    ids=lambda value: value.message_type.__name__ if isinstance(value, MessageCodec) else "",
)
def test_every_field_of_a_message_is_converted(codec, elsewhere):
    assert codec.unmapped == elsewhere


def test_names_of_an_enum():
    modes = enum_converter(admin_pb2.SpeculationMode.DESCRIPTOR)
    assert modes.encode("off") == admin_pb2.SPECULATION_MODE_OFF
    assert [modes.decode(number) for number in (0, 1, 3, 9)] == [None, "auto", "off", "9"]


@dataclass(frozen=True)
class Numbers:
    num_listed: int = 1
    token_ids: tuple[int, ...] = ()


def test_a_number_out_of_range_for_its_field_is_reported():
    codec = MessageCodec(inference_pb2.Logprobs, Numbers)
    with pytest.raises(InvalidValueError, match=r"^num_listed is 2147483648; it must be a number"):
        codec.encode(Numbers(2**31))
    with pytest.raises(InvalidValueError, match=r"^token_ids\[1\] is -2147483649; .* of 32 bits"):
        codec.encode(Numbers(1, (5, -(2**31) - 1)))


def test_zero_decodes_to_the_default_only_with_zero_is_default():
    zero = inference_pb2.Logprobs()
    assert MessageCodec(inference_pb2.Logprobs, Numbers).decode(zero) == Numbers(0)
    options = Options(zero_is_default=True)
    assert MessageCodec(inference_pb2.Logprobs, Numbers, options).decode(zero) == Numbers(1)


def received(params, *, has_empty_options=False):
    """Return the parameters of a request after its way through the wire."""
    message = inference.encode_request(GenerateRequest("a", params))
    if has_empty_options:
        message.speculation.SetInParent()  # as clients of other languages may
    sent = inference_pb2.GenerateRequest.FromString(message.SerializeToString())
    return inference.decode_request(sent).params


def test_requests_with_the_same_numbers_share_their_parameters():
    params = SamplingParams(temperature=0.5, max_tokens=7)
    assert received(params) == params
    assert received(params) is received(params)
    assert received(params, has_empty_options=True) is received(params)


def test_an_empty_message_of_speculation_is_not_sent():
    message = inference.encode_request(GenerateRequest("a", SamplingParams()))
    assert not message.HasField("speculation")
    params = SamplingParams(speculation=SpeculationOptions(enabled=False))
    assert received(params) == params
