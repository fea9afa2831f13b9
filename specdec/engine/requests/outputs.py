"""Makes the outputs of the engine from sequences, and keeps those of a step that fails."""

from __future__ import annotations

import collections.abc
from itertools import chain

from specdec.engine.requests.stop_checker import Stop
from specdec.sequences.sequence import Sequence
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.types.errors import TargetFailedError
from specdec.types.messages import Logprobs
from specdec.types.responses import EngineOutput

_NO_LENGTHS: tuple[int, ...] = ()
_NOT_DRAFTED = (False,)
_NUM_CHANGING = EngineOutput._fields.index("speculation")  # fields that a decode changes


class TargetLostError(TargetFailedError):
    """The target was lost in a step. outputs: those that the step had committed before."""

    def __init__(self, reason: str, outputs: collections.abc.Sequence[EngineOutput]) -> None:
        super().__init__(reason)
        self.outputs = tuple(outputs)

    def __reduce__(self) -> tuple[type[TargetFailedError], tuple[object, ...]]:
        """Pickle it without the outputs, which have been delivered."""
        return TargetFailedError, self.args


def output_of(
    seq: Sequence,
    stop: Stop | None,
    token_ids: tuple[int, ...],
    logprobs: Logprobs | None = None,
    num_steps: int = 1,
    is_drafted: tuple[bool, ...] = _NOT_DRAFTED,
) -> EngineOutput:
    """Return the output for new tokens of `seq`, with the text that is certain by now, if any.

    token_ids and the fields after it: as in BufferedTokens; by default those of a decode.
    """
    choices, rules, detokenizer = seq.choices, seq.rules, seq.detokenizer
    text, lengths = "", _NO_LENGTHS
    if detokenizer is not None:
        text = _new_text(detokenizer, token_ids, stop)
        lengths = detokenizer.lengths
    fields = (
        seq.request.request_id,
        token_ids,
        text,
        stop.finish_reason if stop else None,
        seq.num_prompt_tokens,
        choices.num_output_tokens,
        choices.speculation,
        num_steps,
        seq.num_cached_tokens,
        rules.choice,
        is_drafted,
        lengths,
        stop is not None and not choices.unfinished,
        stop.stop_reason if stop else None,
        rules.verifier.name,
        logprobs,
        seq.take_prompt_logprobs() if seq.prompt_report else None,
        None,  # no error
        choices.prediction,
        None,  # no receipt
    )
    return tuple.__new__(EngineOutput, fields)  # in a fourth of the time of names, for each token


def output_of_decode(seq: Sequence, token_id: int) -> EngineOutput:
    """Return the output for a new token of a decode, which does not end its sequence.

    That of `output_of` in half of the time: most fields are those of the decode before, unless its
    request has had drafts since.
    """
    choices, end = seq.choices, seq.decode_fields
    if seq.detokenizer is not None:
        return output_of(seq, None, (token_id,))
    if not end or end[0] is not choices.speculation:
        output = output_of(seq, None, (token_id,))
        seq.decode_fields = output[_NUM_CHANGING:]
        return output
    num_tokens = seq.num_prompt_tokens, choices.num_output_tokens
    fields = (seq.request.request_id, (token_id,), "", None, *num_tokens, *end)
    return tuple.__new__(EngineOutput, fields)


def _new_text(
    detokenizer: IncrementalDetokenizer, token_ids: tuple[int, ...], stop: Stop | None
) -> str:
    """Return the text of new tokens. With stop strings the check of each token has added it."""
    if detokenizer.has_stop_strings:
        return detokenizer.take() if stop is None else detokenizer.flush()
    if stop is None:
        return detokenizer.decode(token_ids)
    if stop.hides_token:
        detokenizer.extend(token_ids[:-1])
        detokenizer.skip()
    else:
        detokenizer.extend(token_ids)
    return detokenizer.flush()


def joined(outputs: collections.abc.Sequence[EngineOutput]) -> EngineOutput:
    """Return outputs of one choice that follow each other, at least one, as one output."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [each.logprobs for each in outputs if each.logprobs is not None]
    return outputs[-1]._replace(
        token_ids=tuple(chain.from_iterable(each.token_ids for each in outputs)),
        text="".join([each.text for each in outputs]),
        num_steps=sum(each.num_steps for each in outputs),
        is_drafted=tuple(chain.from_iterable(each.is_drafted for each in outputs)),
        text_lengths=tuple(chain.from_iterable(each.text_lengths for each in outputs)),
        logprobs=Logprobs.join(logprobs) if logprobs else None,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
