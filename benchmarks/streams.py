"""Many concurrent streams through a running service, over gRPC.

They share an event loop: one thread per stream would use more of the cores that the service needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from specdec.client import AsyncClient
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions


@dataclass(frozen=True)
class Call:
    """One request: a prompt as token ids, and its parameters."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """Result of one stream. arrivals_s: from the call to each message with tokens."""

    token_ids: tuple[int, ...]
    speculation: SpeculationStats
    arrivals_s: tuple[float, ...]


def speculation_options(num_speculative_tokens: int, method: str = "ngram") -> SpeculationOptions:
    """Request exactly this number of draft tokens per step; 0 disables speculation."""
    if num_speculative_tokens == 0:
        return SpeculationOptions(enabled=False)
    return SpeculationOptions(True, num_speculative_tokens, method)


def stream_all(
    address: str, calls: Sequence[Call], num_streams: int, description: str = ""
) -> list[Answer]:
    """Return the answers in the order of the calls; a description enables the progress bar."""
    return timed_streams(address, calls, num_streams, description)[1]


def timed_streams(
    address: str, calls: Sequence[Call], num_streams: int, description: str = ""
) -> tuple[float, list[Answer]]:
    """Return the total seconds, without connecting, and the answers in the order of the calls."""
    with tqdm(total=len(calls), desc=description, disable=not description, leave=False) as shown:
        return asyncio.run(_timed_streams(address, calls, num_streams, shown))


async def _timed_streams(
    address: str, calls: Sequence[Call], num_streams: int, shown: tqdm[Any]
) -> tuple[float, list[Answer]]:
    is_free = asyncio.Semaphore(num_streams)

    async def answer(client: AsyncClient, call: Call) -> Answer:
        async with is_free:
            found = await _stream(client, call)
            shown.update()
            return found

    async with AsyncClient(address) as client:
        await client.model_info()  # connects
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(client, call)) for call in calls]
        seconds = time.perf_counter() - started_at
    return seconds, [task.result() for task in tasks]


async def _stream(client: AsyncClient, call: Call) -> Answer:
    started_at = time.perf_counter()
    token_ids: list[int] = []
    arrivals_s: list[float] = []
    async with aclosing(client.generate_stream(call.prompt, call.params)) as chunks:
        async for chunk in chunks:
            if chunk.token_ids:
                token_ids.extend(chunk.token_ids)
                arrivals_s.append(time.perf_counter() - started_at)
            if chunk.usage is not None:
                return Answer(tuple(token_ids), chunk.usage.speculation, tuple(arrivals_s))
    raise AssertionError("a stream ended without usage")
