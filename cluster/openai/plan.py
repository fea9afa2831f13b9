"""From the fields of a request to the calls that a Router takes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.calls import GenerateCall, TokenizeCall
from cluster.openai.logprobs import TokenNames
from cluster.openai.sampling_fields import SamplingFields
from cluster.router import Router
from specdec.chat_template import Conversation
from specdec.config import MAX_STREAM_INTERVAL
from specdec.request_limits import check_answer_in_one_message
from specdec.sampling_params import SamplingParams


@dataclass(frozen=True)
class Origin:
    """What every answer says of itself."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Terms:
    """What a request is called, and how many seconds its answer may take."""

    request_id: str
    timeout_s: float


async def prompt_token_ids(
    router: Router,
    request: SamplingFields,
    prompt: str | Conversation | Sequence[int],
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """The tokens of a prompt, cut to the last ones where the request wants that."""
    if isinstance(prompt, str | Conversation):
        call = TokenizeCall(request.model or "", prompt, add_special_tokens)
        prompt = await router.tokenize(call)
    most = request.truncate_prompt_tokens
    return tuple(prompt if most is None else prompt[-most:])


def settle_seed(params: SamplingParams) -> SamplingParams:
    """With a seed: the one that is answered with holds for all prompts of a request."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))


def generate_call(
    router: Router,
    request: SamplingFields,
    prompt: tuple[int, ...],
    params: SamplingParams,
    request_id: str,
) -> GenerateCall:
    """A call for one prompt. An answer that is not streamed is wanted when it is complete."""
    interval: int | None = MAX_STREAM_INTERVAL
    if request.stream:
        interval = request.stream_interval
    else:
        check_answer_in_one_message(params, router.max_tokens(params))
    return GenerateCall(
        model=request.model or "",
        prompt=prompt,
        params=params,
        request_id=request_id,
        priority=request.priority,
        stream_interval=interval,
        cache_salt=request.cache_salt or "",
    )


async def token_names(router: Router, request: SamplingFields) -> TokenNames:
    """How log-probabilities call tokens. On a thread: the first time it reads the vocabulary."""
    token_bytes = await asyncio.to_thread(lambda: router.text.token_bytes)
    return TokenNames(token_bytes, request.return_tokens_as_token_ids)
