"""Requests that compare an earlier output with the model, in the pass that computes a prompt."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from specdec.sequences.sequence import EngineRequest
from specdec.text.grammar.matcher import Grammar, OutputConstraint
from specdec.types.errors import InvalidValueError
from specdec.types.messages import Logprobs
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions
from specdec.types.sampling.sampling_spec import Replay, SamplingRules

MAX_MASK_BYTES = 2**28
"""Limit of the masks of a grammar in one message to a rank."""

_NO_DRAFTS = SpeculationOptions(enabled=False)


def replay_request(request: EngineRequest, replay: Replay, priority: int = 0) -> EngineRequest:
    """Return a request whose first output has the comparison of `replay` as prompt_logprobs.

    request: of the output, with its whole prompt. The pass over prompt and output samples one more
    token, which has no meaning, and ends.
    """
    params = replace(
        request.params,
        n=1,
        stop=(),
        min_tokens=min(request.params.min_tokens, len(replay.token_ids)),
        max_tokens=len(replay.token_ids),
        logprobs=None,
        prompt_logprobs=0,
        logprob_token_ids=(),
        speculation=_NO_DRAFTS,
    )
    return replace(
        request,
        params=params,
        priority=priority,
        receipt=False,
        thinking_budget=None,
        allow_training=False,
        queue_deadline_s=math.inf,
        resume_token_ids=replay.token_ids[:-1],
        prediction=None,
        detokenize=False,
        replay=replay,
    )


def with_replay(rules: SamplingRules, request: EngineRequest) -> SamplingRules:
    """Return the rules of a replay, with the masks of its grammar. Raises InvalidValueError."""
    replay = request.replay
    assert replay is not None, "no output to replay"
    if request.grammar is not None:
        grammar = request.grammar.of_choice(replay.choice)
        replay = replay._replace(grammar_masks=_masks(rules, request, grammar, replay))
    return replace(rules, choice=replay.choice, replay=replay)


def _masks(rules: SamplingRules, request: EngineRequest, grammar: Grammar, replay: Replay) -> bytes:
    num_bytes = len(replay.token_ids) * grammar.text_mask.nbytes
    if num_bytes > MAX_MASK_BYTES:
        limit = f"at most {MAX_MASK_BYTES} bytes of masks for the whole output"
        raise InvalidValueError("structured_output", f"{num_bytes} bytes of masks", limit)
    return grammar_masks(grammar, request.params, rules.end_token_ids, replay.token_ids)


def grammar_masks(
    grammar: Grammar, params: SamplingParams, end_token_ids: Sequence[int], output: Sequence[int]
) -> bytes:
    """Return the mask of each position of an output, int32 [len(output), num_words] as bytes."""
    constraint = OutputConstraint(grammar, 0, params.min_tokens, end_token_ids)
    return constraint.along(output[:-1]).masks.tobytes()


async def comparison_in(outputs: AsyncIterator[EngineOutput]) -> Logprobs:
    """Return the comparison in the outputs of `replay_request`, which its first one has."""
    async for output in outputs:
        if output.prompt_logprobs is not None:
            return output.prompt_logprobs
    raise AssertionError("a replay without a comparison")
