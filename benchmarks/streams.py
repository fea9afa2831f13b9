"""Many streams at once through a running service, over gRPC."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqdm import tqdm

from specdec.client import Client
from specdec.sampling_params import SamplingParams, SpeculationMethod, SpeculationOptions
from specdec.stats import SpeculationStats


@dataclass(frozen=True)
class Call:
    """One request: a prompt as token ids, and how to continue it."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """What one stream brought. arrivals_s: from the call to each message with tokens."""

    token_ids: tuple[int, ...]
    speculation: SpeculationStats
    arrivals_s: tuple[float, ...]


def speculation_options(
    num_speculative_tokens: int, method: SpeculationMethod = "ngram"
) -> SpeculationOptions:
    """Exactly so many draft tokens a step; 0 opts out."""
    if num_speculative_tokens == 0:
        return SpeculationOptions(enabled=False)
    return SpeculationOptions(True, num_speculative_tokens, method)


def stream_all(
    client: Client, calls: Sequence[Call], num_streams: int, description: str = ""
) -> list[Answer]:
    """The answers in the calls' order; shows progress if there is a description of it."""
    with ThreadPoolExecutor(num_streams) as pool:
        answers = pool.map(lambda call: _stream(client, call), calls)
        shown = tqdm(answers, description, total=len(calls), disable=not description, leave=False)
        return list(shown)


def _stream(client: Client, call: Call) -> Answer:
    started_at = time.perf_counter()
    token_ids: list[int] = []
    arrivals_s: list[float] = []
    for chunk in client.generate_stream(call.prompt, call.params):
        if chunk.token_ids:
            token_ids.extend(chunk.token_ids)
            arrivals_s.append(time.perf_counter() - started_at)
        if chunk.usage is not None:
            return Answer(tuple(token_ids), chunk.usage.speculation, tuple(arrivals_s))
    raise AssertionError("a stream ended without usage")
