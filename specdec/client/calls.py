"""Connection and requests of both the blocking and the asynchronous client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.client.codec.inference import DETOKENIZE, TOKENIZE, encode_request
from specdec.client.connection import Connection, Destination
from specdec.types.request import ChatMessage, DetokenizeRequest, GenerateRequest, TokenizeRequest
from specdec.types.responses import Prompt
from specdec.types.sampling.sampling_params import SamplingParams

DEFAULT_TIMEOUT_S = 300.0


class InferenceConnection(Connection):
    """Connection to InferenceService, of the blocking or the asynchronous client."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls_ca_file: Path | str | None = None,
        tls_server_name: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Arguments and errors are those of `Destination`, whose bearer is the API key."""
        super().__init__(Destination(address, timeout_s, tls_ca_file, api_key, tls_server_name))
        self._stub = InferenceServiceStub(self._channel)


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, with the meaning that they have in `GenerateRequest`."""

    model: str
    request_id: str
    priority: int
    resume_token_ids: Sequence[int]
    cache_salt: str
    allow_training: bool
    receipt: bool


class StreamOptions(GenerateOptions, total=False):
    """Keyword arguments of `generate_stream`: those of `generate`, and one more."""

    stream_interval: int | None


def generate_message(
    prompt: Prompt, params: SamplingParams | None, options: GenerateOptions | StreamOptions
) -> pb.GenerateRequest:
    """Return the request for a completion. Raises InvalidValueError for what cannot be sent."""
    values: dict[str, Any] = dict(options)
    values["resume_token_ids"] = tuple(values.get("resume_token_ids", ()))
    frozen: Any = prompt if isinstance(prompt, str) else tuple(prompt)
    return encode_request(GenerateRequest(frozen, params or SamplingParams(), **values))


def tokenize_message(
    prompt: str | Sequence[ChatMessage], model: str, *, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """Return the request to encode a text or a chat."""
    frozen = prompt if isinstance(prompt, str) else tuple(prompt)
    return TOKENIZE.encode(TokenizeRequest(frozen, model, add_special_tokens))


def detokenize_message(token_ids: Sequence[int], model: str) -> pb.DetokenizeRequest:
    """Return the request for the text of tokens."""
    return DETOKENIZE.encode(DetokenizeRequest(tuple(token_ids), model))
