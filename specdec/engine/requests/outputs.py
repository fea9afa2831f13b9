"""Makes the outputs of the engine from sequences, and keeps those of a step."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from specdec.engine.requests.stop_checker import Stop
from specdec.sequences.sequence import Sequence
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.types.errors import TargetFailedError
from specdec.types.messages import Logprobs
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput

_NO_LENGTHS: tuple[int, ...] = ()
_NOT_DRAFTED = (False,)


class Delivery(NamedTuple):
    """Outputs of a step, on their way to the streams that they belong to.

    outputs: whole ones. request_ids, token_ids: one more token for each of these requests, which
    have one choice and had an output before; see `continued`.
    """

    outputs: collections.abc.Sequence[EngineOutput] = ()
    request_ids: collections.abc.Sequence[str] = ()
    token_ids: collections.abc.Sequence[int] = ()


class StepOutputs:
    """The outputs of a step. Those of plain decodes are made when they are read, for most are not.

    Read them before the next step, which changes the counts of those. whole: outputs that are made.
    sequences, request_ids, token_ids: decodes whose sequences go on, their requests and tokens.
    """

    def __init__(self) -> None:
        self.whole: list[EngineOutput] = []
        self.sequences: list[Sequence] = []
        self.request_ids: list[str] = []
        self.token_ids: list[int] = []

    @property
    def delivery(self) -> Delivery:
        """The part that streams need, valid also after later steps."""
        return Delivery(self.whole, self.request_ids, self.token_ids)

    def __len__(self) -> int:
        return len(self.whole) + len(self.token_ids)

    def __iter__(self) -> Iterator[EngineOutput]:
        yield from self.whole
        for seq, token_id in zip(self.sequences, self.token_ids, strict=True):
            yield output_of(seq, None, (token_id,))


class TargetLostError(TargetFailedError):
    """The target was lost in a step. outputs: those that the step had committed before."""

    def __init__(self, reason: str, outputs: StepOutputs) -> None:
        super().__init__(reason)
        self.outputs = outputs

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


def continued(
    last: EngineOutput,
    token_ids: tuple[int, ...],
    num_output_tokens: int,
    speculation: SpeculationStats,
    num_steps: int,
    num_drafted: int = 0,
) -> EngineOutput:
    """Return the output of further tokens of the only choice of a request, which goes on.

    last: an output of it before. num_drafted: number of leading tokens that were drafted.
    """
    num_others = len(token_ids) - num_drafted
    fields = (
        last.request_id,
        token_ids,
        "",
        None,  # it goes on
        last.num_prompt_tokens,
        num_output_tokens,
        speculation,
        num_steps,
        last.num_cached_tokens,
        0,
        (True,) * num_drafted + _NOT_DRAFTED * num_others,
        _NO_LENGTHS,
        False,
        None,
        last.verifier,
        None,
        None,
        None,
        last.prediction,
        None,
    )
    return tuple.__new__(EngineOutput, fields)
