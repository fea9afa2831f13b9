"""What a request may ask of an engine, beyond the limits that hold for every engine.

Each function raises InvalidValueError, which names the field, the value and the limit.
"""

from __future__ import annotations

from specdec.config import MAX_STREAM_INTERVAL, EngineConfig
from specdec.errors import InvalidValueError
from specdec.field_checks import require_range
from specdec.sampling_params import SamplingParams
from specdec.sequence import Request
from specdec.tokenizer import check_token_ids

MAX_PROMPT_LOGPROBS = 200_000
"""Most log-probabilities of one prompt. They travel in one message, of 16 bytes each, and a gRPC
client takes 4 MiB unless told otherwise."""

MAX_ANSWER_LOGPROBS = 200_000
"""Most log-probabilities of an answer that is sent as one message, for the same reason."""


def check_request(request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Holds a request against the configuration and the vocabulary."""
    _check_prompt(request, config.max_model_len, vocab_size)
    _check_prompt_logprobs(request)
    room = config.max_model_len - len(request.prompt_token_ids)
    max_tokens = request.params.max_tokens
    if max_tokens is not None and max_tokens > room:
        length = len(request.prompt_token_ids)
        reason = f"at most {room} (max_model_len less the prompt's {length} tokens)"
        raise InvalidValueError("max_tokens", max_tokens, reason)
    _check_resumed(request, room if max_tokens is None else max_tokens, vocab_size)
    if type(request.priority) is not int:  # the queue is sorted by it
        raise InvalidValueError("priority", request.priority, "a whole number")
    require_range("stream_interval", request.stream_interval, 1, MAX_STREAM_INTERVAL)
    method = request.params.speculation.method
    loaded = config.speculation.methods if config.speculation else ()
    if method is not None and method not in loaded:
        reason = f"what is loaded: {' or '.join(loaded) or 'none'}"
        raise InvalidValueError("speculation.method", method, reason)


def check_answer_in_one_message(params: SamplingParams, max_tokens: int) -> None:
    """max_tokens: how long each choice can get. A stream, in messages of a step, needs no limit."""
    asked, num_tokens = params.logprobs, params.n * max_tokens
    if asked is not None and (1 + asked) * num_tokens > MAX_ANSWER_LOGPROBS:
        limit = f"so few that {num_tokens} tokens (n times max_tokens) have at most "
        limit += f"{MAX_ANSWER_LOGPROBS} in all, each token's own included, or be streamed"
        raise InvalidValueError("logprobs", asked, limit)


def _check_prompt(request: Request, max_model_len: int, vocab_size: int) -> None:
    num_tokens, limit = len(request.prompt_token_ids), max_model_len - 1
    if num_tokens == 0:
        raise InvalidValueError("prompt", "", "at least 1 token long")
    if num_tokens > limit:
        reason = f"at most {limit} tokens (max_model_len less one)"
        raise InvalidValueError("prompt length", num_tokens, reason)
    check_token_ids("prompt", request.prompt_token_ids, vocab_size)


def _check_prompt_logprobs(request: Request) -> None:
    asked, num_tokens = request.params.prompt_logprobs, len(request.prompt_token_ids)
    if asked is not None and (1 + asked) * num_tokens > MAX_PROMPT_LOGPROBS:
        limit = f"so few that {num_tokens} tokens have at most {MAX_PROMPT_LOGPROBS} in all"
        raise InvalidValueError("prompt_logprobs", asked, f"{limit}, each token's own included")


def _check_resumed(request: Request, max_tokens: int, vocab_size: int) -> None:
    resumed = request.resume_token_ids
    check_token_ids("resume_token_ids", resumed, vocab_size)
    if resumed and request.params.n > 1:
        raise InvalidValueError("n", request.params.n, "1 where resume_token_ids are given")
    if len(resumed) >= max_tokens:
        limit = f"fewer than the {max_tokens} that the request may generate"
        raise InvalidValueError("resume_token_ids", f"{len(resumed)} tokens", limit)
