"""Makes the outputs of the engine from sequences, and keeps those of a step that fails."""

from __future__ import annotations

import collections.abc

from specdec.engine.requests.stop_checker import Stop
from specdec.sequences.output_buffer import BufferedTokens
from specdec.sequences.sequence import Choices, Sequence
from specdec.types.errors import TargetFailedError
from specdec.types.responses import EngineOutput


class TargetLostError(TargetFailedError):
    """The target was lost in a step. outputs: those that the step had committed before."""

    def __init__(self, reason: str, outputs: collections.abc.Sequence[EngineOutput]) -> None:
        super().__init__(reason)
        self.outputs = tuple(outputs)


def output_of(
    seq: Sequence, choices: Choices, tokens: BufferedTokens, stop: Stop | None
) -> EngineOutput:
    """Return the output for new tokens of `seq`, with the text that is certain by now."""
    text = seq.detokenizer.take() if stop is None else seq.detokenizer.flush()
    return EngineOutput(
        request_id=seq.request.request_id,
        token_ids=tokens.token_ids,
        text=text,
        finish_reason=stop.finish_reason if stop else None,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_output_tokens=choices.num_output_tokens,
        speculation=choices.speculation,
        prediction=choices.prediction,
        num_steps=tokens.num_steps,
        num_cached_tokens=seq.num_cached_tokens,
        choice=seq.choice,
        is_drafted=tokens.is_drafted,
        text_lengths=seq.detokenizer.lengths,
        is_last=not choices.unfinished,
        stop_reason=stop.stop_reason if stop else None,
        verifier=seq.rules.verifier.name,
        logprobs=tokens.logprobs,
        prompt_logprobs=seq.prompt_report.take(),
    )
