"""When a sequence is over, and why."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from specdec.sequences.sequence import Sequence
from specdec.types.responses import FinishReason


@dataclass(frozen=True)
class Ending:
    """Why a sequence is over.

    stop_reason: the stop string or stop token that ended it; None for an end-of-sequence token and
        for a limit of length.
    """

    finish_reason: FinishReason
    stop_reason: str | int | None = None


def ending_after_last_token(
    seq: Sequence, eos_token_ids: Set[int], max_model_len: int
) -> Ending | None:
    """Adds a sequence's last token to its text; how it ends the sequence, None if it does not."""
    stopped = stop_at(seq, seq.token_ids[-1], eos_token_ids)
    if stopped is not None:
        return stopped
    is_full = seq.num_tokens >= max_model_len
    if is_full or seq.num_output_tokens == seq.max_tokens:
        return Ending(FinishReason.LENGTH)
    return None


def stop_at(seq: Sequence, token_id: int, eos_token_ids: Set[int]) -> Ending | None:
    """Adds a token to a sequence's text; the ending, if it is one that the text or token asks for.

    A token that ends the text is no part of it, unless include_stop_str_in_output is set. Whether
    min_tokens allows it is not asked: before them such a token is never drawn, except where a
    grammar leaves nothing else, and then it has to end. So it has with ignore_eos.
    """
    params = seq.params
    goes_on = params.ignore_eos and params.structured_output is None
    is_eos = token_id in eos_token_ids and not goes_on
    is_end = is_eos or token_id in params.stop_token_ids
    if not is_end or params.include_stop_str_in_output:
        stop = seq.detokenizer.append(token_id)
        if stop is not None:
            return Ending(FinishReason.STOP, stop)
    if not is_end:
        return None
    return Ending(FinishReason.STOP, None if is_eos else token_id)
