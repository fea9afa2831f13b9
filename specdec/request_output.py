"""What the engine tells of a request, step by step."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from specdec.ending import Ending
from specdec.errors import SpecdecError
from specdec.finish_reason import FinishReason
from specdec.sampling_params import VerifierName
from specdec.sequence import Choices, Sequence
from specdec.stats import SpeculationStats
from specdec.step import Logprobs


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one choice of a request.

    text: whole characters only; may be empty while a character or a stop string is incomplete.
    num_accepted_tokens: so many of token_ids, the first ones, were drafted and accepted.
    finish_reason: None while the choice goes on. stop_reason: the stop string or stop token that
        ended it; None for an end-of-sequence token and for a limit of length.
    num_output_tokens, speculation: of all choices of the request so far.
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
    choice: int = 0
    num_accepted_tokens: int = 0
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
        token_ids: Many[int],
        ending: Ending | None,
        logprobs: Logprobs | None = None,
        num_accepted_tokens: int = 0,
    ) -> RequestOutput:
        """What is told of tokens that were added to `seq`, with the text that is certain by now."""
        return cls(
            request_id=seq.request.request_id,
            token_ids=tuple(token_ids),
            text=seq.detokenizer.take() if ending is None else seq.detokenizer.flush(),
            finish_reason=ending.finish_reason if ending else None,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_output_tokens=choices.num_output_tokens,
            speculation=replace(choices.speculation),
            choice=seq.choice,
            num_accepted_tokens=num_accepted_tokens,
            is_last=not choices.unfinished,
            stop_reason=ending.stop_reason if ending else None,
            verifier=seq.rules.verifier.name,
            logprobs=logprobs,
            prompt_logprobs=seq.prompt_report.take(),
        )
