"""Codecs of what a request asks of sampling and of speculation."""

from __future__ import annotations

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.codec.message import Converter, MessageCodec, Oneof, Options, enum_converter
from specdec.types.sampling_params import (
    AcceptanceThreshold,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)

_PRESETS = enum_converter(pb.AcceptancePreset.DESCRIPTOR)


def _decode_preset(number: int) -> str:
    """Return the preset's name; a number without one as text, or it would be a probability."""
    return str(_PRESETS.decode(number) or number)


def _threshold_field(threshold: AcceptanceThreshold) -> str:
    is_preset = isinstance(threshold, str)
    return "acceptance_preset" if is_preset else "acceptance_probability"


SPECULATION = MessageCodec(
    pb.SpeculationOptions,
    SpeculationOptions,
    Options(
        oneofs={"acceptance_threshold": Oneof("acceptance_threshold", _threshold_field)},
        converters={"acceptance_preset": Converter(_PRESETS.encode, _decode_preset)},
    ),
)
SAMPLING = MessageCodec(
    pb.SamplingParams,
    SamplingParams,
    Options(parts={"structured_output": MessageCodec(pb.StructuredOutput, StructuredOutput)}),
)
"""Without `SamplingParams.speculation`, which is a message beside it."""
