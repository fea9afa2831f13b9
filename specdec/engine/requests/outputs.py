"""Makes the outputs of the engine from sequences, and keeps those of a step that fails."""

from __future__ import annotations

import collections.abc
from itertools import chain

from specdec.engine.requests.stop_checker import Stop
from specdec.sequences.output_buffer import BufferedTokens
from specdec.sequences.sequence import Choices, Sequence
from specdec.types.errors import TargetFailedError
from specdec.types.messages import Logprobs
from specdec.types.responses import EngineOutput

_NO_LENGTHS: tuple[int, ...] = ()


class TargetLostError(TargetFailedError):
    """The target was lost in a step. outputs: those that the step had committed before."""

    def __init__(self, reason: str, outputs: collections.abc.Sequence[EngineOutput]) -> None:
        super().__init__(reason)
        self.outputs = tuple(outputs)


def output_of(
    seq: Sequence, choices: Choices, tokens: BufferedTokens, stop: Stop | None
) -> EngineOutput:
    """Return the output for new tokens of `seq`, with the text that is certain by now, if any."""
    rules, detokenizer = seq.rules, seq.detokenizer
    text, lengths = "", _NO_LENGTHS
    if detokenizer is not None:
        text = detokenizer.take() if stop is None else detokenizer.flush()
        lengths = detokenizer.lengths
    fields = (
        seq.request.request_id,
        tokens.token_ids,
        text,
        stop.finish_reason if stop else None,
        seq.num_prompt_tokens,
        choices.num_output_tokens,
        choices.speculation,
        tokens.num_steps,
        seq.num_cached_tokens,
        rules.choice,
        tokens.is_drafted,
        lengths,
        not choices.unfinished,
        stop.stop_reason if stop else None,
        rules.verifier.name,
        tokens.logprobs,
        seq.prompt_report.take(),
        None,  # no error
        choices.prediction,
    )
    return EngineOutput._make(fields)  # in a fourth of the time of names, for each token


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
