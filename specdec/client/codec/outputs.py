"""Conversion of outputs: from what the engine returns to messages, and on to the client's types.

Written out field by field: a stream converts a message for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.codec.message import MessageCodec, enum_converter
from specdec.client.codec.receipts import RECEIPT
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import (
    Choice,
    Completion,
    EngineOutput,
    FinishReason,
    PositionLogprobs,
    StreamChunk,
    TokenLogprob,
    Usage,
)
from specdec.types.sampling.sampling_params import LOSSY_VERIFIERS, VerifierName

if TYPE_CHECKING:  # numpy comes with them, and the client does without it
    from specdec.types.messages import Logprobs

Spell = Callable[[Sequence[int]], list[str]]
"""Returns the spelling of each token in the vocabulary."""

_STATS = MessageCodec(pb.SpeculationUsage, SpeculationStats)
_VERIFIERS = enum_converter(pb.Verifier.DESCRIPTOR)
_FINISH_REASONS = {
    pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason
}
_FINISH_NUMBERS = {reason: number for number, reason in _FINISH_REASONS.items()}


def encode_chunk(
    request_id: str, seed: int, output: EngineOutput, spell: Spell, *, is_first: bool
) -> pb.GenerateStreamResponse:
    """Return the message for one output; the first and the last of a request have the seed.

    `spell` is called only for tokens that are sent with log-probabilities.
    """
    return pb.GenerateStreamResponse(
        request_id=request_id,
        seed=seed if is_first or output.is_last else None,
        choice=output.choice,
        text=output.text,
        token_ids=output.token_ids,
        is_drafted=output.is_drafted,
        text_lengths=output.text_lengths,
        logprobs=_encode_logprobs([output.logprobs], spell),
        prompt_logprobs=_encode_logprobs([output.prompt_logprobs], spell),
        usage=_encode_usage(output) if output.is_last else None,
        receipt=None if output.receipt is None else RECEIPT.encode(output.receipt),
        **_encode_end(output),
    )


def decode_chunk(message: pb.GenerateStreamResponse) -> StreamChunk:
    """Return what a message of a stream adds."""
    return StreamChunk(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        is_drafted=tuple(message.is_drafted),
        text_lengths=tuple(message.text_lengths),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        seed=message.seed if message.HasField("seed") else None,
        usage=_decode_usage(message.usage) if message.HasField("usage") else None,
        choice=message.choice,
        stop_reason=_decode_stop_reason(message),
        logprobs=_decode_logprobs(message, "logprobs"),
        prompt_logprobs=_decode_logprobs(message, "prompt_logprobs"),
        receipt=RECEIPT.decode(message.receipt) if message.HasField("receipt") else None,
    )


def encode_completion(
    request_id: str, seed: int, outputs: Sequence[EngineOutput], spell: Spell
) -> pb.GenerateResponse:
    """Return one message for all outputs of a request, which are in order."""
    last = outputs[-1]
    assert last.is_last, "a completion without its end"
    num_choices = 1 + max(output.choice for output in outputs)
    return pb.GenerateResponse(
        request_id=request_id,
        seed=seed,
        choices=[
            _encode_choice([output for output in outputs if output.choice == index], spell)
            for index in range(num_choices)
        ],
        prompt_logprobs=_encode_logprobs([output.prompt_logprobs for output in outputs], spell),
        usage=_encode_usage(last),
        receipt=None if last.receipt is None else RECEIPT.encode(last.receipt),
    )


def decode_completion(message: pb.GenerateResponse) -> Completion:
    """Return a whole answer."""
    return Completion(
        request_id=message.request_id,
        choices=tuple(map(_decode_choice, message.choices)),
        seed=message.seed,
        usage=_decode_usage(message.usage),
        prompt_logprobs=_decode_logprobs(message, "prompt_logprobs"),
        receipt=RECEIPT.decode(message.receipt) if message.HasField("receipt") else None,
    )


def _encode_choice(outputs: Sequence[EngineOutput], spell: Spell) -> pb.Choice:
    last = outputs[-1]
    assert last.finish_reason is not None, "a choice without its end"
    return pb.Choice(
        index=last.choice,
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        is_drafted=[each for output in outputs for each in output.is_drafted],
        text_lengths=[each for output in outputs for each in output.text_lengths],
        logprobs=_encode_logprobs([output.logprobs for output in outputs], spell),
        **_encode_end(last),
    )


def _decode_choice(message: pb.Choice) -> Choice:
    return Choice(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=_FINISH_REASONS[message.finish_reason],
        stop_reason=_decode_stop_reason(message),
        logprobs=_decode_logprobs(message, "logprobs"),
        is_drafted=tuple(message.is_drafted),
        text_lengths=tuple(message.text_lengths),
    )


def _encode_end(output: EngineOutput) -> dict[str, Any]:
    """Return the fields that state why a choice ended, which chunk and choice share."""
    finish_reason, stop_reason = output.finish_reason, output.stop_reason
    if finish_reason is None:
        return {}
    end: dict[str, Any] = {"finish_reason": _FINISH_NUMBERS[finish_reason]}
    if stop_reason is not None:
        end["stop_string" if isinstance(stop_reason, str) else "stop_token_id"] = stop_reason
    return end


def _decode_stop_reason(message: Any) -> str | int | None:
    name = message.WhichOneof("stop_reason")
    return None if name is None else getattr(message, name)


def _encode_logprobs(parts: Sequence[Logprobs | None], spell: Spell) -> pb.Logprobs | None:
    """Return the given parts joined; None where there are none."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    joined = given[0].join(given)
    token_ids = joined.token_ids.ravel().tolist()
    return pb.Logprobs(
        num_listed=joined.token_ids.shape[1],
        token_ids=token_ids,
        logprobs=joined.logprobs.ravel().tolist(),
        tokens=spell(token_ids),
        ranks=joined.ranks.tolist(),
        num_given=joined.num_given,
    )


def _decode_logprobs(message: Any, name: str) -> tuple[PositionLogprobs, ...] | None:
    """Return the log-probabilities in a field; None where it is absent."""
    if not message.HasField(name):
        return None
    logprobs: pb.Logprobs = getattr(message, name)
    columns = logprobs.token_ids, logprobs.tokens, logprobs.logprobs
    listed = [TokenLogprob(*entry) for entry in zip(*columns, strict=True)]
    width, num_given = logprobs.num_listed, logprobs.num_given
    starts = range(0, len(listed), width) if width else ()
    rows = [listed[start : start + width] for start in starts]
    split = width - num_given
    return tuple(
        PositionLogprobs(row[0], rank, tuple(row[1:split]), tuple(row[split:]))
        for row, rank in zip(rows, logprobs.ranks, strict=True)
    )


def _encode_usage(output: EngineOutput) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=output.num_output_tokens,
        speculation=_encode_speculation(output.speculation, output.verifier),
        accepted_prediction_tokens=output.prediction.num_accepted_tokens,
        rejected_prediction_tokens=output.prediction.num_rejected_tokens,
    )


@lru_cache(maxsize=16)  # most requests have no drafts
def _encode_speculation(stats: SpeculationStats, verifier: VerifierName) -> pb.SpeculationUsage:
    return _STATS.encode(
        stats,
        verifier=_VERIFIERS.encode(verifier),
        is_lossless=verifier not in LOSSY_VERIFIERS,
    )


def _decode_usage(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        speculation=_STATS.decode(message.speculation),
        verifier=_VERIFIERS.decode(message.speculation.verifier),
        is_lossless=message.speculation.is_lossless,
        accepted_prediction_tokens=message.accepted_prediction_tokens,
        rejected_prediction_tokens=message.rejected_prediction_tokens,
    )
