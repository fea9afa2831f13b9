"""Between the protos of calls and the types of this service, in both directions.

Decoding raises InvalidValueError, which names the field by the last words of its path in the proto,
as SamplingParams and SpeculationOptions do. A proto field that is absent leaves its default to the
type that it becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from cluster.calls import Chat, DetokenizeCall, GenerateCall, Prompt, TokenizeCall
from cluster.sampling_codec import METHODS, decode_params
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import ModelInfo
from specdec.errors import InvalidValueError
from specdec.tokenizer import ChatMessage

MAX_TEXT_CHARS = 1_000_000
MAX_TOKEN_IDS = 1_000_000
MAX_CHAT_MESSAGES = 1_000
MAX_REQUEST_ID_CHARS = 128
MAX_PRIORITY = 1_000
MAX_CACHE_SALT_CHARS = 128


def decode_generate(request: pb.GenerateRequest) -> GenerateCall:
    """Reads a request for a completion."""
    return GenerateCall(
        model=request.model,
        prompt=_decode_prompt(request),
        params=decode_params(request.sampling, request.speculation),
        request_id=_decode_request_id(request.request_id),
        priority=_decode_priority(request.priority),
        resume_token_ids=_decode_resumed(request),
        stream_interval=request.stream_interval if request.HasField("stream_interval") else None,
        cache_salt=_decode_cache_salt(request.cache_salt),
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
    return TokenizeCall(request.model, prompt, adds)


def encode_tokens(
    token_ids: Sequence[int], tokens: Sequence[str], max_model_len: int
) -> pb.TokenizeResponse:
    """The ids of an input and, one for one, their spelling in the vocabulary."""
    return pb.TokenizeResponse(token_ids=token_ids, tokens=tokens, max_model_len=max_model_len)


def decode_detokenize(request: pb.DetokenizeRequest) -> DetokenizeCall:
    """Reads a request to decode tokens; no tokens at all have an empty text."""
    _require_length("token_ids", len(request.token_ids), 0, MAX_TOKEN_IDS, "tokens")
    return DetokenizeCall(request.model, tuple(request.token_ids))


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
            _require_length("token_ids", len(ids), 1, MAX_TOKEN_IDS, "tokens")
            return tuple(ids)
        case "chat":
            return _decode_chat(request.chat)
        case _:
            raise InvalidValueError("prompt", None, "a text, token_ids or a chat")


def _decode_cache_salt(cache_salt: str) -> str:
    if len(cache_salt) > MAX_CACHE_SALT_CHARS:
        limit = f"at most {MAX_CACHE_SALT_CHARS} characters long"
        raise InvalidValueError("cache_salt", f"{len(cache_salt)} characters", limit)
    return cache_salt


def _decode_priority(priority: int) -> int:
    if abs(priority) > MAX_PRIORITY:
        limit = f"from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidValueError("priority", priority, limit)
    return priority


def _decode_resumed(request: pb.GenerateRequest) -> tuple[int, ...]:
    """Without the seed that was used, what follows would not be what would have come."""
    resumed, sampling = tuple(request.resume_token_ids), request.sampling
    _require_length("resume_token_ids", len(resumed), 0, MAX_TOKEN_IDS, "tokens")
    is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
    if resumed and not sampling.HasField("seed") and not is_greedy:
        limit = "given with resume_token_ids, unless temperature is 0"
        raise InvalidValueError("seed", None, limit)
    return resumed


def _decode_text(text: str, *, min_chars: int) -> str:
    _require_length("text", len(text), min_chars, MAX_TEXT_CHARS, "characters")
    return text


def _decode_chat(chat: pb.ChatMessages) -> Chat:
    # Roles are the tokenizer's affair; its errors call the conversation `messages` too.
    _require_length("messages", len(chat.messages), 1, MAX_CHAT_MESSAGES, "messages")
    num_chars = sum(len(message.content) for message in chat.messages)
    _require_length("messages content", num_chars, 0, MAX_TEXT_CHARS, "characters in all")
    return tuple(ChatMessage(message.role, message.content) for message in chat.messages)


def _decode_request_id(request_id: str) -> str:
    is_printable = request_id.isascii() and request_id.isprintable()
    if len(request_id) > MAX_REQUEST_ID_CHARS or not is_printable:
        limit = f"at most {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        raise InvalidValueError("request_id", request_id, limit)
    return request_id


def _require_length(path: str, length: int, low: int, high: int, unit: str) -> None:
    if not low <= length <= high:
        raise InvalidValueError(f"{path} length", length, f"from {low} to {high} {unit}")
