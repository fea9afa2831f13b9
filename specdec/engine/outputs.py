"""What the engine tells of a request, step by step."""

from __future__ import annotations

from typing import NamedTuple

from specdec.engine.stop_checker import Ending
from specdec.sequences.output_buffer import ToldTokens
from specdec.sequences.sequence import Choices, Sequence
from specdec.types.errors import SpecdecError
from specdec.types.messages import Logprobs
from specdec.types.responses import FinishReason
from specdec.types.sampling_params import VerifierName
from specdec.types.stats import SpeculationStats


class RequestOutput(NamedTuple):
    """What one step, or several (`stream_interval`), added to one choice of a request.

    text: whole characters only; may be empty while a character or a stop string is incomplete.
    is_drafted: of each of token_ids, whether it was drafted and accepted.
    finish_reason: None while the choice goes on. stop_reason: the stop string or stop token that
        ended it; None for an end-of-sequence token and for a limit of length.
    num_cached_tokens: those of the prompt whose KV this choice found in the prefix cache.
    num_output_tokens, speculation: of all choices of the request so far.
    num_steps: how many steps brought token_ids.
    is_last: whether all choices have ended, so that nothing more comes of the request.
    verifier: what decides which draft tokens are kept.
    logprobs: of token_ids, where asked for. prompt_logprobs: of the prompt's tokens from the second
        on, complete and once, with the first output of the request.
    error: why the request ended before its time; nothing else here counts then.
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
        told: ToldTokens,
        ending: Ending | None,
    ) -> RequestOutput:
        """What is told of tokens that were added to `seq`, with the text that is certain by now."""
        return cls(
            request_id=seq.request.request_id,
            token_ids=told.token_ids,
            text=seq.detokenizer.take() if ending is None else seq.detokenizer.flush(),
            finish_reason=ending.finish_reason if ending else None,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_output_tokens=choices.num_output_tokens,
            speculation=choices.speculation,
            num_steps=told.num_steps,
            num_cached_tokens=seq.num_cached_tokens,
            choice=seq.choice,
            is_drafted=told.is_drafted,
            is_last=not choices.unfinished,
            stop_reason=ending.stop_reason if ending else None,
            verifier=seq.rules.verifier.name,
            logprobs=told.logprobs,
            prompt_logprobs=seq.prompt_report.take(),
        )
