"""Building what is large on a thread, so that other streams go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cluster.api.openai.logprobs import TokenNames
from specdec.types.outputs import RequestOutput

T = TypeVar("T")

MANY_TOKENS = 64
"""With log-probabilities, as many are worth the way to a thread and back."""


async def off_loop(work: Callable[[], T], *, is_large: bool) -> T:
    """What `work` returns. Where it is not large, it is done at once."""
    return await asyncio.to_thread(work) if is_large else work()


def tells_many(output: RequestOutput, names: TokenNames | None) -> bool:
    """Whether an output has many log-probabilities. `names`: None where none are told."""
    has_prompts = output.prompt_logprobs is not None
    return names is not None and (has_prompts or len(output.token_ids) > MANY_TOKENS)
