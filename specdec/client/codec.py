"""Between the client's types and the protos.

Encoding raises InvalidValueError for what a proto cannot carry; the service checks the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.messages import (
    Completion,
    ModelInfo,
    Prompt,
    StreamChunk,
    TokenizedInput,
    Usage,
)
from specdec.errors import InvalidValueError
from specdec.finish_reason import FinishReason
from specdec.sampling_params import SamplingParams, SpeculationOptions
from specdec.stats import SpeculationStats
from specdec.tokenizer import ChatMessage

_FINISH_REASONS: Mapping[int, FinishReason] = MappingProxyType(
    {
        pb.FINISH_REASON_STOP: FinishReason.STOP,
        pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    }
)
_METHOD_PREFIX = "SPECULATION_METHOD_"
_INT32_LIMIT = 2**31


def encode_generate(
    prompt: Prompt,
    params: SamplingParams,
    model: str,
    request_id: str,
    priority: int = 0,
    resume_token_ids: Sequence[int] = (),
) -> pb.GenerateRequest:
    """The request for a completion; of `params`, what is None stays unset."""
    _require_int32("priority", priority)
    with _unicode_checked():
        request = pb.GenerateRequest(
            model=model,
            sampling=_encode_params(params),
            speculation=_encode_speculation(params.speculation),
            request_id=request_id,
            priority=priority,
            resume_token_ids=_checked_token_ids("resume_token_ids", resume_token_ids),
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


def decode_chunk(chunk: pb.GenerateStreamResponse) -> StreamChunk:
    """Reads one message of a stream."""
    return StreamChunk(
        request_id=chunk.request_id,
        text=chunk.text,
        token_ids=tuple(chunk.token_ids),
        finish_reason=_FINISH_REASONS.get(chunk.finish_reason),
        seed=chunk.seed if chunk.HasField("seed") else None,
        usage=_decode_usage(chunk.usage) if chunk.HasField("usage") else None,
    )


def decode_completion(response: pb.GenerateResponse) -> Completion:
    """Reads a whole answer."""
    return Completion(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish_reason=_FINISH_REASONS[response.finish_reason],
        seed=response.seed,
        usage=_decode_usage(response.usage),
    )


def decode_tokens(response: pb.TokenizeResponse) -> TokenizedInput:
    """Reads an encoded input."""
    return TokenizedInput(tuple(response.token_ids), tuple(response.tokens), response.max_model_len)


def decode_model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """Reads the description of a model."""
    method = pb.SpeculationMethod.Name(response.speculation_method)
    has_method = response.speculation_method != pb.SPECULATION_METHOD_UNSPECIFIED
    return ModelInfo(
        model=response.model,
        architecture=response.architecture,
        dtype=response.dtype,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        tensor_parallel_size=response.tensor_parallel_size,
        speculation_method=method.removeprefix(_METHOD_PREFIX).lower() if has_method else None,
        num_speculative_tokens=response.num_speculative_tokens,
        version=response.version,
    )


def _encode_params(params: SamplingParams) -> pb.SamplingParams:
    if params.max_tokens is not None:
        _require_int32("max_tokens", params.max_tokens)
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop=params.stop,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
    )


def _encode_speculation(options: SpeculationOptions) -> pb.SpeculationOptions:
    method = options.method
    return pb.SpeculationOptions(
        enabled=options.enabled,
        num_speculative_tokens=options.num_speculative_tokens,
        method=None if method is None else f"{_METHOD_PREFIX}{method.upper()}",
    )


def _encode_token_ids(token_ids: Sequence[int]) -> pb.TokenIds:
    return pb.TokenIds(ids=_checked_token_ids("token_ids", token_ids))


def _checked_token_ids(field: str, token_ids: Sequence[int]) -> Sequence[int]:
    for index, token_id in enumerate(token_ids):
        _require_int32(f"{field}[{index}]", token_id)
    return token_ids


def _encode_chat(messages: Sequence[ChatMessage]) -> pb.ChatMessages:
    turns = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in messages]
    return pb.ChatMessages(messages=turns)


def _decode_usage(usage: pb.Usage) -> Usage:
    speculation = usage.speculation
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        speculation=SpeculationStats(
            num_drafts=speculation.num_drafts,
            num_draft_tokens=speculation.num_draft_tokens,
            num_accepted_tokens=speculation.num_accepted_tokens,
        ),
    )


def _require_int32(field: str, value: int) -> None:
    if not -_INT32_LIMIT <= value < _INT32_LIMIT:
        raise InvalidValueError(field, value, "a number of 32 bits")


@contextmanager
def _unicode_checked() -> Iterator[None]:
    """Half a surrogate pair, as broken bytes on a command line become, is no text to a proto."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidValueError("text", error.object, "valid Unicode") from error
