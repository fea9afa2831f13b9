"""The output of a request, step by step."""

from __future__ import annotations

from typing import NamedTuple

from specdec.types.errors import SpecdecError
from specdec.types.messages import Logprobs
from specdec.types.responses import FinishReason
from specdec.types.sampling_params import VerifierName
from specdec.types.stats import SpeculationStats


class EngineOutput(NamedTuple):
    """Output that one step, or several (`stream_interval`), added to one choice of a request.

    text: whole characters only; may be empty while a character or a stop string is incomplete.
    is_drafted: for each of token_ids, whether it was drafted and accepted.
    finish_reason: None while the choice continues. stop_reason: the stop string or stop token that
        ended it; None for an end-of-sequence token and for a limit of length.
    num_cached_tokens: those of the prompt whose KV this choice found in the prefix cache.
    num_output_tokens, speculation: of all choices of the request so far.
    num_steps: number of steps that produced token_ids.
    is_last: whether all choices have ended.
    verifier: decides which draft tokens are accepted.
    logprobs: of token_ids, if requested. prompt_logprobs: of the prompt's tokens from the second
        on, complete and only with the first output of the request.
    error: why the request failed; the other fields have no meaning then.
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
