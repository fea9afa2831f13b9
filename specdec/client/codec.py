"""Between the client's types and the protos of calls.

Encoding raises InvalidValueError for what a proto cannot carry; the service checks the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.sampling_codec import (
    METHOD_PREFIX,
    checked_token_ids,
    encode_sampling,
    encode_speculation,
    require_int32,
)
from specdec.types.chat import ChatMessage
from specdec.types.errors import InvalidValueError
from specdec.types.responses import ModelInfo, Prompt, TokenizedInput
from specdec.types.sampling_params import SamplingDefaults, SamplingParams


def encode_generate(
    prompt: Prompt,
    params: SamplingParams,
    model: str,
    request_id: str,
    priority: int = 0,
    resume_token_ids: Sequence[int] = (),
    stream_interval: int | None = None,
    cache_salt: str = "",
) -> pb.GenerateRequest:
    """The request for a completion; of `params`, what is None stays unset."""
    require_int32("priority", priority)
    if stream_interval is not None:
        require_int32("stream_interval", stream_interval)
    with _unicode_checked():
        request = pb.GenerateRequest(
            model=model,
            sampling=encode_sampling(params),
            speculation=encode_speculation(params.speculation),
            request_id=request_id,
            priority=priority,
            resume_token_ids=checked_token_ids("resume_token_ids", resume_token_ids),
            stream_interval=stream_interval,
            cache_salt=cache_salt,
        )
        if isinstance(prompt, str):
            request.text = prompt
        elif turns := [part for part in prompt if isinstance(part, ChatMessage)]:
            request.chat.CopyFrom(_encode_chat(turns))
        else:
            token_ids = [part for part in prompt if not isinstance(part, ChatMessage)]
            request.token_ids.CopyFrom(_encode_token_ids(token_ids))
    return request


def encode_tokenize(
    prompt: str | Sequence[ChatMessage], model: str, *, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """The request to encode a text or a chat."""
    with _unicode_checked():
        request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(_encode_chat(prompt))
    return request


def encode_detokenize(token_ids: Sequence[int], model: str) -> pb.DetokenizeRequest:
    """The request for the text of tokens."""
    with _unicode_checked():
        ids = checked_token_ids("token_ids", token_ids)
        return pb.DetokenizeRequest(model=model, token_ids=ids)


def decode_tokens(response: pb.TokenizeResponse) -> TokenizedInput:
    """Reads an encoded input."""
    return TokenizedInput(tuple(response.token_ids), tuple(response.tokens), response.max_model_len)


def decode_model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """Reads the description of a model."""
    has_method = response.speculation_method != pb.SPECULATION_METHOD_UNSPECIFIED
    return ModelInfo(
        model=response.model,
        architecture=response.architecture,
        dtype=response.dtype,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        tensor_parallel_size=response.tensor_parallel_size,
        speculation_method=_method_name(response.speculation_method) if has_method else None,
        num_speculative_tokens=response.num_speculative_tokens,
        version=response.version,
        sampling_defaults=_decode_defaults(response.sampling_defaults),
        speculation_methods=tuple(map(_method_name, response.speculation_methods)),
    )


def _method_name(method: pb.SpeculationMethod) -> str:
    return pb.SpeculationMethod.Name(method).removeprefix(METHOD_PREFIX).lower()


def _decode_defaults(defaults: pb.SamplingDefaults) -> SamplingDefaults:
    return SamplingDefaults(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        max_tokens=defaults.max_tokens if defaults.HasField("max_tokens") else None,
    )


def _encode_token_ids(token_ids: Sequence[int]) -> pb.TokenIds:
    return pb.TokenIds(ids=checked_token_ids("token_ids", token_ids))


def _encode_chat(messages: Sequence[ChatMessage]) -> pb.ChatMessages:
    turns = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in messages]
    return pb.ChatMessages(messages=turns)


@contextmanager
def _unicode_checked() -> Iterator[None]:
    """Half a surrogate pair, as broken bytes on a command line become, is no text to a proto."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidValueError("text", error.object, "valid Unicode") from error
