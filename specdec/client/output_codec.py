"""From the protos of answers to the client's types."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.sampling_codec import VERIFIER_PREFIX
from specdec.types.responses import (
    Choice,
    Completion,
    FinishReason,
    PositionLogprobs,
    StreamChunk,
    TokenLogprob,
    Usage,
)
from specdec.types.sampling_params import VerifierName
from specdec.types.stats import SpeculationStats

_FINISH_REASONS: Mapping[int, FinishReason] = MappingProxyType(
    {
        pb.FINISH_REASON_STOP: FinishReason.STOP,
        pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    }
)


def decode_chunk(chunk: pb.GenerateStreamResponse) -> StreamChunk:
    """Reads one message of a stream."""
    return StreamChunk(
        request_id=chunk.request_id,
        text=chunk.text,
        token_ids=tuple(chunk.token_ids),
        is_drafted=tuple(chunk.is_drafted),
        finish_reason=_FINISH_REASONS.get(chunk.finish_reason),
        seed=chunk.seed if chunk.HasField("seed") else None,
        usage=_decode_usage(chunk.usage) if chunk.HasField("usage") else None,
        choice=chunk.choice,
        stop_reason=_stop_reason(chunk),
        logprobs=_decode_logprobs(chunk.logprobs) if chunk.HasField("logprobs") else None,
        prompt_logprobs=_prompt_logprobs(chunk),
    )


def decode_completion(response: pb.GenerateResponse) -> Completion:
    """Reads a whole answer."""
    return Completion(
        request_id=response.request_id,
        choices=tuple(map(_decode_choice, response.choices)),
        seed=response.seed,
        usage=_decode_usage(response.usage),
        prompt_logprobs=_prompt_logprobs(response),
    )


def _decode_choice(choice: pb.Choice) -> Choice:
    return Choice(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=_FINISH_REASONS[choice.finish_reason],
        stop_reason=_stop_reason(choice),
        logprobs=_decode_logprobs(choice.logprobs) if choice.HasField("logprobs") else None,
    )


def _stop_reason(message: pb.Choice | pb.GenerateStreamResponse) -> str | int | None:
    match message.WhichOneof("stop_reason"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
        case _:
            return None


def _prompt_logprobs(
    message: pb.GenerateResponse | pb.GenerateStreamResponse,
) -> tuple[PositionLogprobs, ...] | None:
    if not message.HasField("prompt_logprobs"):
        return None
    return _decode_logprobs(message.prompt_logprobs)


def _decode_logprobs(logprobs: pb.Logprobs) -> tuple[PositionLogprobs, ...]:
    listed = [
        TokenLogprob(*entry)
        for entry in zip(logprobs.token_ids, logprobs.tokens, logprobs.logprobs, strict=True)
    ]
    width = logprobs.num_listed
    return tuple(
        PositionLogprobs(
            listed[index * width], rank, tuple(listed[index * width + 1 : (index + 1) * width])
        )
        for index, rank in enumerate(logprobs.ranks)
    )


def _decode_usage(usage: pb.Usage) -> Usage:
    speculation = usage.speculation
    verifier = pb.Verifier.Name(speculation.verifier).removeprefix(VERIFIER_PREFIX).lower()
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        speculation=SpeculationStats(
            num_drafts=speculation.num_drafts,
            num_draft_tokens=speculation.num_draft_tokens,
            num_accepted_tokens=speculation.num_accepted_tokens,
        ),
        verifier=cast(VerifierName, verifier),
        is_lossless=speculation.is_lossless,
    )
