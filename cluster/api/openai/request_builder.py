"""From the fields of a request to the calls that a Router takes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.api.openai.deadline import Deadline
from cluster.api.openai.logprobs import TokenNames
from cluster.api.openai.sampling_fields import SamplingFields
from cluster.replica.router import Router
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.engine.input_processor import check_answer_in_one_message
from specdec.types.chat import Conversation
from specdec.types.request import GenerateRequest, TokenizeRequest
from specdec.types.sampling_params import SamplingParams

_NUM_SEEDS = 2**63


@dataclass(frozen=True)
class Origin:
    """Fields that every answer has."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Terms:
    """What a request is called, and when its answer has to be complete."""

    request_id: str
    deadline: Deadline


async def prompt_token_ids(
    router: Router,
    request: SamplingFields,
    prompt: str | Conversation | Sequence[int],
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """The tokens of a prompt, cut to the last ones where the request wants that.

    Raises OverloadedError where too many prompts wait to be encoded.
    """
    if isinstance(prompt, str | Conversation):
        call = TokenizeRequest(prompt, request.model or "", add_special_tokens)
        prompt = await router.tokenize(call)
    most = request.truncate_prompt_tokens
    return tuple(prompt if most is None else prompt[-most:])


def settle_seed(params: SamplingParams) -> SamplingParams:
    """With a seed, the one that is answered with."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))


def for_prompt(params: SamplingParams, index: int, *, is_seed_given: bool) -> SamplingParams:
    """What is asked for one of several prompts.

    A seed that the client gave holds for all of them. One that was chosen is counted up, so that
    equal prompts have different answers; noise is keyed by the seed, and no two keys are alike.
    """
    assert params.seed is not None, "the seed is settled before prompts are planned"
    return params if is_seed_given else replace(params, seed=(params.seed + index) % _NUM_SEEDS)


def generate_call(
    router: Router,
    request: SamplingFields,
    prompt: tuple[int, ...],
    params: SamplingParams,
    request_id: str,
) -> GenerateRequest:
    """A call for one prompt. An answer that is not streamed is wanted when it is complete."""
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
    """How log-probabilities call tokens. On a thread: the first time it reads the vocabulary."""
    token_bytes = await asyncio.to_thread(lambda: router.text.token_bytes)
    return TokenNames(token_bytes, request.return_tokens_as_token_ids)
