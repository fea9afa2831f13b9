"""The try-it box: streams the tokens of one answer, each marked as drafted or sampled.

The page sends JSON and reads server-sent events: `start`, then `tokens` for each step, then `end`,
or `error` if the request fails.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from cluster.api.base.errors import status_of
from cluster.api.base.sse import json_event
from cluster.replica.router import Generation, Router
from specdec.config.fields import refuse_unknown_fields
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError
from specdec.types.request import ChatMessage, GenerateRequest, Prompt
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import (
    LOSSY_VERIFIERS,
    SamplingParams,
    SpeculationOptions,
)
from specdec.types.token_display import token_texts

MAX_PROMPT_CHARS = 100_000
MAX_TOKENS = 4_096

_KEYS = ("prompt", "as_chat", "max_tokens", "temperature", "seed", "speculation")


def decode_try_it(body: Any) -> GenerateRequest:
    """Convert the page's JSON to a request. Raise InvalidValueError."""
    _require_object("body", body)
    refuse_unknown_fields(body, _KEYS)
    max_tokens = body.get("max_tokens")
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS:
        raise InvalidValueError("max_tokens", max_tokens, f"a whole number from 1 to {MAX_TOKENS}")
    speculation = body.get("speculation", {})
    _require_object("speculation", speculation)
    refuse_unknown_fields(speculation, ("enabled", "num_speculative_tokens"), "speculation")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=body.get("temperature"),
        seed=body.get("seed"),
        speculation=SpeculationOptions(**speculation),
    )
    prompt = _decode_prompt(body)
    # The page shows each step, whatever the service's stream interval is.
    return GenerateRequest(prompt, params, stream_interval=1)


def _decode_prompt(body: Mapping[str, Any]) -> Prompt:
    text, as_chat = body.get("prompt"), body.get("as_chat", True)
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_PROMPT_CHARS:
        limit = f"a string of 1 to {MAX_PROMPT_CHARS} characters"
        raise InvalidValueError("prompt", text if not isinstance(text, str) else len(text), limit)
    if not isinstance(as_chat, bool):
        raise InvalidValueError("as_chat", as_chat, "true or false")
    return (ChatMessage("user", text),) if as_chat else text


def _require_object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidValueError(name, value, "a JSON object")


async def begin(
    router: Router, call: GenerateRequest, deadline: Deadline
) -> AsyncGenerator[bytes, None]:
    """Wait for the first step and return the events; closing them aborts the request.

    Raise the engine's error for an invalid request, before the response has a status code.
    """
    generation = await router.generate(call, deadline=deadline)
    outputs = generation.outputs
    first = await anext(outputs)
    return _events(generation, first)


async def _events(generation: Generation, first: EngineOutput) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.outputs) as outputs:
        yield json_event("start", {"request_id": generation.request_id, "seed": generation.seed})
        try:
            yield _tokens(first)
            last = first
            async for last in outputs:
                yield _tokens(last)
        except Exception as error:
            yield json_event("error", {"message": status_of(error).message})
        else:
            assert last.finish_reason is not None, "the last output has a finish reason"
            is_lossless = last.verifier not in LOSSY_VERIFIERS
            reason, verifier = last.finish_reason.value, last.verifier
            summary = {"finish_reason": reason, "verifier": verifier, "is_lossless": is_lossless}
            yield json_event("end", summary)


def _tokens(output: EngineOutput) -> bytes:
    """Encode the tokens of a step; the text of an incomplete character is empty."""
    texts = token_texts(output.text, output.text_lengths)
    tokens = [
        {"text": text, "accepted": is_drafted}
        for text, is_drafted in zip(texts, output.is_drafted, strict=True)
    ]
    usage = {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": output.num_output_tokens,
        **asdict(output.speculation),
    }
    return json_event("tokens", {"tokens": tokens, "usage": usage})
