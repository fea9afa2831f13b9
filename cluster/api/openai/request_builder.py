"""Builds the Router's calls from the fields of a request."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.api.openai.logprobs import TokenNames
from cluster.api.openai.sampling_fields import SamplingFields
from cluster.api.openai.streams import Deadline
from cluster.replica.router import Router
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.engine.input_processor import check_answer_in_one_message
from specdec.types.chat import Conversation
from specdec.types.request import GenerateRequest, TokenizeRequest
from specdec.types.sampling_params import SamplingParams

_NUM_SEEDS = 2**63


@dataclass(frozen=True)
class RequestContext:
    """The id and the deadline of a request."""

    request_id: str
    deadline: Deadline


@dataclass(frozen=True)
class ResponseInfo:
    """The fields that every response and every chunk repeats."""

    id: str
    model: str
    seed: int
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, id: str, router: Router, params: SamplingParams) -> ResponseInfo:
        """Make the fields for a request whose seed is set."""
        assert params.seed is not None, "with_seed has set the seed"
        return cls(id, router.config.served_model_name, params.seed)


async def prompt_token_ids(
    router: Router,
    request: SamplingFields,
    prompt: str | Conversation | Sequence[int],
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Encode a prompt, truncated to its last tokens if the request asks for that.

    Raise OverloadedError if too many prompts wait to be encoded.
    """
    if isinstance(prompt, str | Conversation):
        call = TokenizeRequest(prompt, request.model or "", add_special_tokens)
        prompt = await router.tokenize(call)
    max_tokens = request.truncate_prompt_tokens
    return tuple(prompt if max_tokens is None else prompt[-max_tokens:])


def with_seed(params: SamplingParams) -> SamplingParams:
    """Choose a random seed unless the request has one."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))


def params_for_prompt(params: SamplingParams, index: int, *, is_seed_given: bool) -> SamplingParams:
    """Return the parameters of one of several prompts.

    A seed from the client applies to all prompts. A chosen seed is incremented for each prompt, so
    that equal prompts have different answers: the random numbers are keyed by the seed.
    """
    assert params.seed is not None, "with_seed has set the seed"
    return params if is_seed_given else replace(params, seed=(params.seed + index) % _NUM_SEEDS)


def generate_call(
    router: Router,
    request: SamplingFields,
    prompt: tuple[int, ...],
    params: SamplingParams,
    request_id: str,
) -> GenerateRequest:
    """Build the call for one prompt; without streaming, all its output comes at once."""
    interval: int | None = MAX_STREAM_INTERVAL
    if request.stream:
        interval = request.stream_interval
    else:
        check_answer_in_one_message(params, router.max_tokens(params))
    return GenerateRequest(
        model=request.model or "",
        prompt=prompt,
        params=params,
        request_id=request_id,
        priority=request.priority,
        stream_interval=interval,
        cache_salt=request.cache_salt or "",
    )


async def token_names(router: Router, request: SamplingFields) -> TokenNames:
    """Return the names of tokens in log-probabilities. The first call reads the vocabulary."""
    token_bytes = await asyncio.to_thread(lambda: router.text.token_bytes)
    return TokenNames(token_bytes, request.return_tokens_as_token_ids)
