"""Builds large responses on a thread, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cluster.api.openai.logprobs import TokenNames
from specdec.types.outputs import EngineOutput

T = TypeVar("T")

MANY_TOKENS = 64
"""With log-probabilities, more tokens than this are worth the switch to a thread."""


async def offload(work: Callable[[], T], *, is_large: bool) -> T:
    """Run `work`, on a thread if it is large, and return its result."""
    return await asyncio.to_thread(work) if is_large else work()


def has_many_logprobs(output: EngineOutput, names: TokenNames | None) -> bool:
    """Return whether an output has many log-probabilities. names: None if none are returned."""
    has_prompts = output.prompt_logprobs is not None
    return names is not None and (has_prompts or len(output.token_ids) > MANY_TOKENS)
