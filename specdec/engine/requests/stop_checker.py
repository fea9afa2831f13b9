"""Checks whether a sequence has ended, and why."""

from __future__ import annotations

import collections.abc
from collections.abc import Set
from dataclasses import dataclass

from specdec.sequences.sequence import Sequence
from specdec.types.responses import FinishReason


@dataclass(frozen=True)
class Stop:
    """Why a sequence ended.

    stop_reason: the stop string or stop token that ended it; None for an end-of-sequence token and
        for a length limit.
    """

    finish_reason: FinishReason
    stop_reason: str | int | None = None


def append(
    seq: Sequence, token_id: int, eos_token_ids: Set[int], max_model_len: int
) -> Stop | None:
    """Append a token to a sequence and its text; return why it ends there, None if it does not."""
    seq.token_ids.append(token_id)
    stop = check_token(seq, token_id, eos_token_ids)
    if stop is not None:
        return stop
    num_tokens = len(seq.token_ids)
    is_full = num_tokens >= max_model_len
    if is_full or num_tokens - seq.num_prompt_tokens == seq.max_tokens:
        return Stop(FinishReason.LENGTH)
    return None


def extend(
    seq: Sequence,
    token_ids: collections.abc.Sequence[int],
    eos_token_ids: Set[int],
    max_model_len: int,
) -> bool:
    """Add tokens to a sequence and its text if none of them may end it; return whether it did.

    It does for all of them what `append` does for one.
    """
    params = seq.params
    if params.stop or not eos_token_ids.isdisjoint(token_ids):
        return False
    if params.stop_token_ids and any(each in params.stop_token_ids for each in token_ids):
        return False
    if len(seq.token_ids) + len(token_ids) >= seq.max_length(max_model_len):
        return False
    seq.token_ids.extend(token_ids)
    if seq.detokenizer is not None:
        seq.detokenizer.extend(token_ids)
    return True


def check_token(seq: Sequence, token_id: int, eos_token_ids: Set[int]) -> Stop | None:
    """Add a token to the sequence's text; return the stop if the token or a stop string ends it.

    A token that ends the text is left out of it, unless include_stop_str_in_output is set.
    min_tokens is not checked: until then end tokens are masked, except where a grammar allows
    nothing else, and then the sequence must end. The same holds for ignore_eos.
    """
    params, is_eos, is_end = seq.params, False, False
    if token_id in eos_token_ids or token_id in params.stop_token_ids:
        ignores_eos = params.ignore_eos and params.structured_output is None
        is_eos = token_id in eos_token_ids and not ignores_eos
        is_end = is_eos or token_id in params.stop_token_ids
    text = seq.detokenizer
    if text is not None:
        if is_end and not params.include_stop_str_in_output:
            text.skip()
        elif (stop := text.append(token_id)) is not None:
            return Stop(FinishReason.STOP, stop)
    return Stop(FinishReason.STOP, None if is_eos else token_id) if is_end else None
