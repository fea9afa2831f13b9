"""Limits on requests to the service. Each check raises InvalidValueError."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.model_name import MAX_MODEL_CHARS
from specdec.types.errors import InvalidValueError
from specdec.types.request import (
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    Prompt,
    TokenizeRequest,
)
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.validation import require_count, require_range

MAX_TEXT_CHARS = 1_000_000
MAX_TOKEN_IDS = 1_000_000
MAX_CHAT_MESSAGES = 1_000
MAX_REQUEST_ID_CHARS = 128
MAX_PRIORITY = 1_000
MAX_CACHE_SALT_CHARS = 128


def check_request(request: GenerateRequest, *, is_chat: bool) -> GenerateRequest:
    """Return the request as it is. is_chat: whether the prompt is a chat, even an empty one."""
    check_model(request.model)
    if request.prompt is None:
        raise InvalidValueError("prompt", None, "a string, token_ids or a chat")
    _check_prompt(request.prompt, is_chat=is_chat, min_chars=1)
    check_request_id(request.request_id)
    require_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    check_cache_salt(request.cache_salt)
    check_resumption(request.resume_token_ids, request.params)
    return request


def check_resumption(token_ids: Sequence[int], params: SamplingParams) -> None:
    """Check the tokens that a client has from an interrupted stream.

    params: as the client sent them; with another seed the output would not be what would have
    followed.
    """
    require_count("resume_token_ids", len(token_ids), 0, MAX_TOKEN_IDS, "tokens")
    if token_ids and params.seed is None and params.temperature != 0:
        limit = "given with resume_token_ids, unless temperature is 0"
        raise InvalidValueError("seed", None, limit)


def check_tokenize(request: TokenizeRequest) -> TokenizeRequest:
    """Return the request as it is. An empty text has no tokens."""
    check_model(request.model)
    if request.prompt is None:
        raise InvalidValueError("input", None, "a string or a chat")
    _check_prompt(request.prompt, is_chat=True, min_chars=0)
    return request


def check_detokenize(request: DetokenizeRequest) -> DetokenizeRequest:
    """Return the request as it is. No tokens have an empty text."""
    check_model(request.model)
    require_count("token_ids", len(request.token_ids), 0, MAX_TOKEN_IDS, "tokens")
    return request


def check_model(model: str) -> str:
    """Return the name as it is. Traces contain it even if there is no such model."""
    if len(model) > MAX_MODEL_CHARS:
        raise InvalidValueError("model", model, f"at most {MAX_MODEL_CHARS} characters long")
    return model


def check_request_id(request_id: str) -> str:
    """Return the id as it is. Headers and log lines contain it."""
    is_printable = request_id.isascii() and request_id.isprintable()
    if len(request_id) > MAX_REQUEST_ID_CHARS or not is_printable:
        limit = f"at most {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        raise InvalidValueError("request_id", request_id, limit)
    return request_id


def check_cache_salt(cache_salt: str) -> None:
    """Check the length of a cache salt; the error must not contain it."""
    if len(cache_salt) > MAX_CACHE_SALT_CHARS:
        limit = f"at most {MAX_CACHE_SALT_CHARS} characters long"
        raise InvalidValueError("cache_salt", f"{len(cache_salt)} characters", limit)


def _check_prompt(prompt: Prompt, *, is_chat: bool, min_chars: int) -> None:
    if isinstance(prompt, str):
        require_count("text", len(prompt), min_chars, MAX_TEXT_CHARS, "characters")
        return
    assert isinstance(prompt, tuple), "messages carry no conversation with tools"
    if is_chat:  # the tokenizer, whose errors also refer to `messages`, checks the roles
        require_count("messages", len(prompt), 1, MAX_CHAT_MESSAGES, "messages")
        num_chars = sum(len(each.content) for each in prompt if isinstance(each, ChatMessage))
        require_count("messages content", num_chars, 0, MAX_TEXT_CHARS, "characters in all")
    else:
        require_count("token_ids", len(prompt), 1, MAX_TOKEN_IDS, "tokens")
