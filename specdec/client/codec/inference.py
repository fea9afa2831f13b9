"""Codecs of requests with their parameters, tokens and the description of the model."""

from __future__ import annotations

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.codec.message import Converter, MessageCodec, Oneof, Options, enum_converter
from specdec.types.errors import InvalidValueError
from specdec.types.request import (
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    Prompt,
    TokenizeRequest,
)
from specdec.types.responses import ModelInfo, TokenizedInput
from specdec.types.sampling.sampling_params import (
    AcceptanceThreshold,
    SamplingDefaults,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
    shared_params,
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
_STRUCTURE = MessageCodec(pb.StructuredOutput, StructuredOutput)


def _encode_structure(form: StructuredOutput) -> pb.StructuredOutput:
    if form.reasoning is not None:
        limit = "left out: by gRPC the whole text is constrained"
        raise InvalidValueError("structured_output.reasoning", form.reasoning, limit)
    return _STRUCTURE.encode(form)


SAMPLING = MessageCodec(
    pb.SamplingParams,
    SamplingParams,
    Options(
        converters={"structured_output": Converter(_encode_structure, _STRUCTURE.decode)},
        make=shared_params,
    ),
)
"""Without `SamplingParams.speculation`, which is a message beside it."""


def _prompt_field(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return "text"
    assert isinstance(prompt, tuple), "messages carry no conversation with tools"
    return "chat" if prompt and isinstance(prompt[0], ChatMessage) else "token_ids"


_CHAT = MessageCodec(pb.ChatMessage, ChatMessage)
REQUEST = MessageCodec(
    pb.GenerateRequest,
    GenerateRequest,
    Options(parts={"prompt": _CHAT}, oneofs={"prompt": Oneof("prompt", _prompt_field)}),
)
TOKENIZE = MessageCodec(
    pb.TokenizeRequest,
    TokenizeRequest,
    Options(
        parts={"prompt": _CHAT},
        oneofs={"prompt": Oneof("input", _prompt_field)},
        sends_defaults=True,
    ),
)
DETOKENIZE = MessageCodec(pb.DetokenizeRequest, DetokenizeRequest)
TOKENS = MessageCodec(pb.TokenizeResponse, TokenizedInput)
MODEL_INFO = MessageCodec(
    pb.GetModelInfoResponse,
    ModelInfo,
    Options(parts={"sampling_defaults": MessageCodec(pb.SamplingDefaults, SamplingDefaults)}),
)


def encode_request(request: GenerateRequest) -> pb.GenerateRequest:
    """Return the message for a request. Raises InvalidValueError for what it cannot carry."""
    sampling = SAMPLING.encode(request.params)
    speculation = SPECULATION.encode(request.params.speculation)
    given = {"speculation": speculation} if speculation.ByteSize() else {}
    return REQUEST.encode(request, sampling=sampling, **given)


def decode_request(message: pb.GenerateRequest) -> GenerateRequest:
    """Return the request in a message. Raises what SamplingParams raises."""
    given = {}
    if message.speculation.ByteSize():  # an empty message has the defaults, as none has
        given["speculation"] = SPECULATION.decode(message.speculation)
    return REQUEST.decode(message, params=SAMPLING.decode(message.sampling, **given))
