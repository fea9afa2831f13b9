"""Outputs of the engine for one choice of a request."""

from __future__ import annotations

from typing import NamedTuple

from specdec.engine.stop_checker import Stop
from specdec.sequences.output_buffer import BufferedTokens
from specdec.sequences.sequence import Choices, Sequence
from specdec.types.errors import SpecdecError
from specdec.types.messages import FinishReason, Logprobs
from specdec.types.sampling_params import VerifierName
from specdec.types.stats import SpeculationStats


class RequestOutput(NamedTuple):
    """Output of one step, or several (`stream_interval`), for one choice of a request.

    text: whole characters only; empty while a character or a stop string is incomplete.
    is_drafted: for each of token_ids, whether it is an accepted draft token.
    finish_reason: None while the choice runs. stop_reason: the stop string or stop token that
        ended it; None for an end-of-sequence token and for a length limit.
    num_cached_tokens: prompt tokens whose KV this choice found in the prefix cache.
    num_output_tokens, speculation: totals of all choices of the request so far.
    num_steps: the number of steps that produced token_ids.
    is_last: whether all choices have ended, so that this is the request's last output.
    verifier: the method that verifies draft tokens.
    logprobs: of token_ids, where requested. prompt_logprobs: of the prompt's tokens from the second
        on, complete, with the first output of the request.
    error: why the request failed; the other fields are meaningless then.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    speculation: SpeculationStats
    num_steps: int = 1
    num_cached_tokens: int = 0
    choice: int = 0
    is_drafted: tuple[bool, ...] = ()
    is_last: bool = False
    stop_reason: str | int | None = None
    verifier: VerifierName = "coupled"
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: SpecdecError | None = None

    @classmethod
    def of(
        cls,
        seq: Sequence,
        choices: Choices,
        tokens: BufferedTokens,
        stop: Stop | None,
    ) -> RequestOutput:
        """Return the output for tokens that were added to `seq`, with the text decoded so far."""
        return cls(
            request_id=seq.request.request_id,
            token_ids=tokens.token_ids,
            text=seq.detokenizer.take() if stop is None else seq.detokenizer.flush(),
            finish_reason=stop.finish_reason if stop else None,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_output_tokens=choices.num_output_tokens,
            speculation=choices.speculation,
            num_steps=tokens.num_steps,
            num_cached_tokens=seq.num_cached_tokens,
            choice=seq.choice,
            is_drafted=tokens.is_drafted,
            is_last=not choices.unfinished,
            stop_reason=stop.stop_reason if stop else None,
            verifier=seq.rules.verifier.name,
            logprobs=tokens.logprobs,
            prompt_logprobs=seq.prompt_report.take(),
        )
