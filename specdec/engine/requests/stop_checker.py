"""Checks whether a sequence has ended, and why."""

from __future__ import annotations

import collections.abc
import logging
from collections.abc import Set
from dataclasses import dataclass

from specdec.sequences.sequence import Sequence
from specdec.types.errors import DetokenizeError
from specdec.types.responses import FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stop:
    """Why a sequence ended.

    stop_reason: the stop string or stop token that ended it; None for an end-of-sequence token and
        for a length limit.
    hides_token: whether its last token is not part of the text.
    """

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    hides_token: bool = False


AT_LIMIT = Stop(FinishReason.LENGTH)


def append(
    seq: Sequence, token_id: int, eos_token_ids: Set[int], max_model_len: int
) -> Stop | None:
    """Append a token to a sequence; return why it ends there, None if it does not.

    Only with stop strings it is added to the text too, which is searched for them.
    """
    seq.token_ids.append(token_id)
    num_tokens = len(seq.token_ids)
    if num_tokens <= seq.open_length and token_id not in eos_token_ids:
        return None
    stop = check_token(seq, token_id, eos_token_ids)
    if stop is not None:
        return stop
    return AT_LIMIT if num_tokens >= seq.max_length(max_model_len) else None


def extend(
    seq: Sequence, token_ids: collections.abc.Sequence[int], eos_token_ids: Set[int]
) -> bool:
    """Add tokens to a sequence if none of them may end it; return whether it did."""
    num_tokens = len(seq.token_ids) + len(token_ids)
    if num_tokens > seq.open_length or not eos_token_ids.isdisjoint(token_ids):
        return False
    seq.token_ids.extend(token_ids)
    return True


def check_token(seq: Sequence, token_id: int, eos_token_ids: Set[int]) -> Stop | None:
    """Return the stop if a token or a stop string ends the text with it.

    A token that ends the text is left out of it, unless include_stop_str_in_output is set.
    min_tokens is not checked: until then end tokens are masked, except where a grammar allows
    nothing else, and then the sequence must end. The same holds for ignore_eos.
    """
    params, is_eos, is_end = seq.params, False, False
    if token_id in eos_token_ids or token_id in params.stop_token_ids:
        ignores_eos = params.ignore_eos and params.structured_output is None
        is_eos = token_id in eos_token_ids and not ignores_eos
        is_end = is_eos or token_id in params.stop_token_ids
    is_hidden = is_end and not params.include_stop_str_in_output
    if params.stop and (found := _stop_string(seq, token_id, is_hidden=is_hidden)) is not None:
        return Stop(FinishReason.STOP, found)
    return Stop(FinishReason.STOP, None if is_eos else token_id, is_hidden) if is_end else None


def _stop_string(seq: Sequence, token_id: int, *, is_hidden: bool) -> str | None:
    """Add a token to the text; return the stop string that ends it there.

    Raises DetokenizeError.
    """
    assert seq.detokenizer is not None, "stop strings without a text"
    if is_hidden:
        seq.detokenizer.skip()
        return None
    try:
        return seq.detokenizer.append(token_id)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers' library has errors that are no Exception
        logger.exception("the tokenizer failed")
        raise DetokenizeError(seq.num_output_tokens - 1) from error
