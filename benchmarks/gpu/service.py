"""The whole service on the GPU, under closed-loop loads of its HTTP API, and a peer under the same.

The page shows them beside the engine in one process, which the part `speculation` measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.parts import Context, PartSkippedError, Result
from benchmarks.gpu.random_models import LLAMA_8B, RandomTensors, write_config
from benchmarks.tiny_model import write_tiny_llama

if TYPE_CHECKING:
    from benchmarks.service_cpu.load import Load, Times

COLUMNS = (
    *("streams", "engine, tokens/s", "service, tokens/s", "peer, tokens/s"),
    *("service, first token ms", "service, ms a token"),
    *("peer, first token ms", "peer, ms a token"),
)
_STREAMS, _NUM_TOKENS = (1, 16, 64, 256), 128
_ROUNDS = 3
_TINY_TOKENS = 250


def measure_service(context: Context) -> Result:
    """Serve a model of 8B, or that of the check, and measure tokens per second and latencies.

    A peer at `context.peer_url` serves the same model under the name `MODEL_NAME`.
    """
    if find_spec("ray") is None:
        raise PartSkippedError("Ray is not installed")
    from benchmarks.service import started_service  # imports Ray's and gRPC's packages
    from benchmarks.service_cpu.load import MODEL_NAME

    result: Result = {"service_cells": [], "peer_cells": []}
    if context.peer_url is not None:
        _measure(context, context.peer_url, "peer_cells", result)
    with started_service(
        str(_model(context)),
        served_model_name=MODEL_NAME,
        max_model_len=512,
        device=context.device.type,
        speculative_config=None,
        enable_prefix_caching=False,
    ) as service:
        _measure(context, service.http_url, "service_cells", result)
    return result


def _measure(context: Context, http_url: str, key: str, result: Result) -> None:
    """Add the figures of each number of streams, and save them."""
    from benchmarks.service_cpu.load import LoadGenerator

    with closing(LoadGenerator("", http_url)) as generator:
        for load in _loads(context):
            generator.begin(replace(load, num_requests=load.streams), seed=0).wait()  # warm
            times = generator.begin(load, seed=1).wait()
            result[key].append(_cell(load, times))
            context.save(result)


def _loads(context: Context) -> Iterator[Load]:
    from benchmarks.service_cpu.load import Load

    if context.is_small:
        yield from (Load("sse", count, 2 * count, 8, 16, _TINY_TOKENS) for count in (1, 4))
        return
    for count in _STREAMS:
        yield Load("sse", count, _ROUNDS * count, _NUM_TOKENS)


def _cell(load: Load, times: Sequence[Times]) -> dict[str, Any]:
    seconds = max(each.last_at_s for each in times) - min(each.sent_at_s for each in times)
    token_s = [(each.last_at_s - each.first_at_s) / (load.max_tokens - 1) for each in times]
    return {
        "streams": load.streams,
        "tokens_per_s": load.num_tokens / seconds,
        "first_token_ms": 1e3 * median(each.first_at_s - each.sent_at_s for each in times),
        "token_ms": 1e3 * median(token_s),
    }


def _model(context: Context) -> Path:
    """Return the directory of the model: the given one, or random weights with a tokenizer."""
    if context.model is not None:
        return context.model
    directory = write_tiny_llama(context.directory / "served")
    if context.is_small:
        return directory
    source = RandomTensors(write_config(directory, LLAMA_8B), context.device, torch.bfloat16)
    tensors = {name: source.slice(name, slice(None)).cpu() for name in source.names}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def rows(parts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row in `COLUMNS` for each number of streams; unknown cells are empty."""
    engine = parts.get("speculation", {}).get("rates", {}).get("none", {})
    found = parts.get("service", {})
    peers = {each["streams"]: each for each in found.get("peer_cells", ())}
    for cell in found.get("service_cells", ()):
        count = cell["streams"]
        peer = peers.get(count, {})
        alone = engine.get(str(count), engine.get(count, {}))
        rates = (each.get("tokens_per_s") for each in (alone, cell, peer))
        times = (each.get(key) for each in (cell, peer) for key in ("first_token_ms", "token_ms"))
        yield (
            str(count),
            *("" if each is None else f"{each:,.0f}" for each in rates),
            *("" if each is None else f"{each:.1f}" for each in times),
        )
