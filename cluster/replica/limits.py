"""How large a call may be, whichever protocol it came by. Each check raises InvalidValueError."""

from __future__ import annotations

from cluster.config.network import MAX_MODEL_CHARS
from specdec.types.errors import InvalidValueError

MAX_TEXT_CHARS = 1_000_000
MAX_TOKEN_IDS = 1_000_000
MAX_CHAT_MESSAGES = 1_000
MAX_REQUEST_ID_CHARS = 128
MAX_PRIORITY = 1_000
MAX_CACHE_SALT_CHARS = 128


def check_model(model: str) -> str:
    """The name as it is; it goes into traces before anybody knows whether there is such a model."""
    if len(model) > MAX_MODEL_CHARS:
        raise InvalidValueError("model", model, f"at most {MAX_MODEL_CHARS} characters long")
    return model


def check_request_id(request_id: str) -> str:
    """The id as it is; it goes into headers and log lines."""
    is_printable = request_id.isascii() and request_id.isprintable()
    if len(request_id) > MAX_REQUEST_ID_CHARS or not is_printable:
        limit = f"at most {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        raise InvalidValueError("request_id", request_id, limit)
    return request_id


def check_priority(priority: int) -> int:
    """The priority as it is."""
    if abs(priority) > MAX_PRIORITY:
        limit = f"from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidValueError("priority", priority, limit)
    return priority


def check_cache_salt(cache_salt: str) -> str:
    """The salt as it is."""
    if len(cache_salt) > MAX_CACHE_SALT_CHARS:
        limit = f"at most {MAX_CACHE_SALT_CHARS} characters long"
        raise InvalidValueError("cache_salt", f"{len(cache_salt)} characters", limit)
    return cache_salt


def require_length(path: str, length: int, low: int, high: int, unit: str) -> None:
    """For too few or too many of something that `path` has."""
    if not low <= length <= high:
        raise InvalidValueError(f"{path} length", length, f"from {low} to {high} {unit}")
