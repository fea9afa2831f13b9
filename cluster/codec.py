"""Between the protos and the types of this service, in both directions.

Decoding raises InvalidValueError, which names the field by the last words of its path in the proto,
as SamplingParams and SpeculationOptions do. A proto field that is absent leaves its default to the
type that it becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from cluster.calls import Chat, DetokenizeCall, GenerateCall, Prompt, TokenizeCall
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import ModelInfo
from specdec.engine import RequestOutput
from specdec.errors import InvalidValueError
from specdec.sampling_params import SPECULATION_METHODS, SamplingParams, SpeculationOptions
from specdec.tokenizer import ChatMessage

MAX_TEXT_CHARS = 1_000_000
MAX_TOKEN_IDS = 1_000_000
MAX_CHAT_MESSAGES = 1_000
MAX_REQUEST_ID_CHARS = 128
MAX_PRIORITY = 1_000

_METHOD_SPELLINGS: dict[str, str] = {
    name: f"SPECULATION_METHOD_{name.upper()}" for name in SPECULATION_METHODS
}
_METHODS = {pb.SpeculationMethod.Value(text): name for name, text in _METHOD_SPELLINGS.items()}


def decode_generate(request: pb.GenerateRequest) -> GenerateCall:
    """Reads a request for a completion."""
    return GenerateCall(
        model=request.model,
        prompt=_decode_prompt(request),
        params=_decode_params(request.sampling, request.speculation),
        request_id=_decode_request_id(request.request_id),
        priority=_decode_priority(request.priority),
        resume_token_ids=_decode_resumed(request),
    )


def encode_stream_chunk(
    seed: int, output: RequestOutput, *, is_first: bool
) -> pb.GenerateStreamResponse:
    """What one step added; the seed in the first and the last message, usage in the last."""
    is_last = output.finish_reason is not None
    return pb.GenerateStreamResponse(
        request_id=output.request_id,
        seed=seed if is_first or is_last else None,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=_encode_finish_reason(output),
        usage=_encode_usage(output) if is_last else None,
    )


def encode_completion(seed: int, outputs: Sequence[RequestOutput]) -> pb.GenerateResponse:
    """All outputs of one request, in order, as one answer."""
    last = outputs[-1]
    assert last.finish_reason is not None, "a completion without its end"
    return pb.GenerateResponse(
        request_id=last.request_id,
        seed=seed,
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        finish_reason=_encode_finish_reason(last),
        usage=_encode_usage(last),
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
        speculation_method=None if method is None else _METHOD_SPELLINGS[method],
        num_speculative_tokens=info.num_speculative_tokens,
        version=info.version,
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


def _decode_params(
    sampling: pb.SamplingParams, speculation: pb.SpeculationOptions
) -> SamplingParams:
    options = present_fields(speculation, "enabled", "num_speculative_tokens")
    if speculation.method != pb.SPECULATION_METHOD_UNSPECIFIED:
        # A number that has no name here is handed on, for SpeculationOptions to refuse.
        options["method"] = _METHODS.get(speculation.method, speculation.method)
    return SamplingParams(
        stop=tuple(sampling.stop),
        speculation=SpeculationOptions(**options),
        **present_fields(
            sampling, "temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos"
        ),
    )


def present_fields(message: Message, *names: str) -> dict[str, Any]:
    """The fields that the sender has set, by name."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _decode_request_id(request_id: str) -> str:
    is_printable = request_id.isascii() and request_id.isprintable()
    if len(request_id) > MAX_REQUEST_ID_CHARS or not is_printable:
        limit = f"at most {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        raise InvalidValueError("request_id", request_id, limit)
    return request_id


def _require_length(path: str, length: int, low: int, high: int, unit: str) -> None:
    if not low <= length <= high:
        raise InvalidValueError(f"{path} length", length, f"from {low} to {high} {unit}")


def _encode_finish_reason(output: RequestOutput) -> str:
    reason = output.finish_reason
    return f"FINISH_REASON_{reason.name if reason else 'UNSPECIFIED'}"


def _encode_usage(output: RequestOutput) -> pb.Usage:
    speculation = output.speculation
    return pb.Usage(
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=output.num_output_tokens,
        speculation=pb.SpeculationUsage(
            num_drafts=speculation.num_drafts,
            num_draft_tokens=speculation.num_draft_tokens,
            num_accepted_tokens=speculation.num_accepted_tokens,
        ),
    )
