"""Between the protos of calls and the types of this service, in both directions.

Decoding raises InvalidValueError, which names the field by the last words of its path in the proto,
as SamplingParams and SpeculationOptions do. A proto field that is absent leaves its default to the
type that it becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from cluster.api.grpc.sampling_codec import METHODS, decode_params
from cluster.replica.limits import (
    MAX_CHAT_MESSAGES,
    MAX_TEXT_CHARS,
    MAX_TOKEN_IDS,
    check_cache_salt,
    check_model,
    check_priority,
    check_request_id,
    require_length,
)
from cluster.replica.requests import Chat, DetokenizeCall, GenerateCall, Prompt, TokenizeCall
from protos.specdec.v1 import inference_pb2 as pb
from specdec.types.chat import ChatMessage
from specdec.types.errors import InvalidValueError
from specdec.types.responses import ModelInfo


def decode_generate(request: pb.GenerateRequest) -> GenerateCall:
    """Reads a request for a completion."""
    return GenerateCall(
        model=check_model(request.model),
        prompt=_decode_prompt(request),
        params=decode_params(request.sampling, request.speculation),
        request_id=check_request_id(request.request_id),
        priority=check_priority(request.priority),
        resume_token_ids=_decode_resumed(request),
        stream_interval=request.stream_interval if request.HasField("stream_interval") else None,
        cache_salt=check_cache_salt(request.cache_salt),
    )


def decode_tokenize(request: pb.TokenizeRequest) -> TokenizeCall:
    """Reads a request to encode a text or a chat."""
    adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
    match request.WhichOneof("input"):
        case "text":
            prompt: str | Chat = _decode_text(request.text, min_chars=0)
        case "chat":
            prompt = _decode_chat(request.chat)
        case _:
            raise InvalidValueError("input", None, "a text or a chat")
    return TokenizeCall(check_model(request.model), prompt, adds)


def encode_tokens(
    token_ids: Sequence[int], tokens: Sequence[str], max_model_len: int
) -> pb.TokenizeResponse:
    """The ids of an input and, one for one, their spelling in the vocabulary."""
    return pb.TokenizeResponse(token_ids=token_ids, tokens=tokens, max_model_len=max_model_len)


def decode_detokenize(request: pb.DetokenizeRequest) -> DetokenizeCall:
    """Reads a request to decode tokens; no tokens at all have an empty text."""
    require_length("token_ids", len(request.token_ids), 0, MAX_TOKEN_IDS, "tokens")
    return DetokenizeCall(check_model(request.model), tuple(request.token_ids))


def encode_model_info(info: ModelInfo) -> pb.GetModelInfoResponse:
    """Describes the model."""
    method = info.speculation_method
    return pb.GetModelInfoResponse(
        model=info.model,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        tensor_parallel_size=info.tensor_parallel_size,
        speculation_method=None if method is None else METHODS.spelling(method),
        num_speculative_tokens=info.num_speculative_tokens,
        version=info.version,
        sampling_defaults=pb.SamplingDefaults(**asdict(info.sampling_defaults)),
        speculation_methods=[METHODS.spelling(each) for each in info.speculation_methods],
    )


def _decode_prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return _decode_text(request.text, min_chars=1)
        case "token_ids":
            ids = request.token_ids.ids
            require_length("token_ids", len(ids), 1, MAX_TOKEN_IDS, "tokens")
            return tuple(ids)
        case "chat":
            return _decode_chat(request.chat)
        case _:
            raise InvalidValueError("prompt", None, "a text, token_ids or a chat")


def _decode_resumed(request: pb.GenerateRequest) -> tuple[int, ...]:
    """Without the seed that was used, what follows would not be what would have come."""
    resumed, sampling = tuple(request.resume_token_ids), request.sampling
    require_length("resume_token_ids", len(resumed), 0, MAX_TOKEN_IDS, "tokens")
    is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
    if resumed and not sampling.HasField("seed") and not is_greedy:
        limit = "given with resume_token_ids, unless temperature is 0"
        raise InvalidValueError("seed", None, limit)
    return resumed


def _decode_text(text: str, *, min_chars: int) -> str:
    require_length("text", len(text), min_chars, MAX_TEXT_CHARS, "characters")
    return text


def _decode_chat(chat: pb.ChatMessages) -> Chat:
    # Roles are the tokenizer's affair; its errors call the conversation `messages` too.
    require_length("messages", len(chat.messages), 1, MAX_CHAT_MESSAGES, "messages")
    num_chars = sum(len(message.content) for message in chat.messages)
    require_length("messages content", num_chars, 0, MAX_TEXT_CHARS, "characters in all")
    return tuple(ChatMessage(message.role, message.content) for message in chat.messages)
