"""Outputs of rows of a step beside their tokens: log-probabilities of prompts, and replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.sampling.logprobs import SLAB_LOGITS, prompt_logprobs
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import Logprobs, PromptLogprobs, StepRow
from specdec.worker.batch.batch_state import BatchState


def prompt_logprobs_of(
    rows: Sequence[StepRow],
    hidden: Tensor,  # [T, hidden_size]
    state: BatchState,
    compute_logits: Callable[[Tensor], Tensor],
    shard: VocabShard,
) -> tuple[PromptLogprobs, ...]:
    """Return log-probabilities of the prompt tokens after those of rows, where requested.

    Of a sequence whose rules have a replay, they are those of `OutputReplay`. A collective call.
    """
    if not state.has_prompt_logprobs:
        return ()
    found, first = list[PromptLogprobs](), 0
    for row in rows:
        rules = state.rules(row.seq_id)
        listed = rules.listed_prompt_tokens
        if listed is not None and rules.replay is not None:
            own = hidden[first : first + row.num_known_tokens]
            logprobs = _replayed(row, own, state, compute_logits, shard)
            found.append(PromptLogprobs(row.seq_id, row.num_computed_tokens + 1, logprobs))
        elif listed is not None and (tokens := state.next_prompt_tokens(row)):
            own = hidden[first : first + len(tokens)]
            logprobs = prompt_logprobs(own, tokens, listed, compute_logits, shard)
            found.append(PromptLogprobs(row.seq_id, row.num_computed_tokens + 1, logprobs))
        first += len(row.token_ids)
    return tuple(found)


def _replayed(
    row: StepRow,
    hidden: Tensor,  # [row.num_known_tokens, hidden_size]
    state: BatchState,
    compute_logits: Callable[[Tensor], Tensor],
    shard: VocabShard,
) -> Logprobs:
    """Return the comparison of the output that follows the tokens of a row, in slabs."""
    replay, num_prompt_tokens = state.output_replay(row)
    first = row.num_computed_tokens + 1 - num_prompt_tokens  # output position after the first token
    start, end = max(0, -first), min(row.num_known_tokens, replay.num_positions - first)
    step, parts = max(1, SLAB_LOGITS // shard.vocab_size), [Logprobs.nothing(1, 0)]
    for place in range(start, end, step):
        logits = compute_logits(hidden[place : min(place + step, end)])
        parts.append(replay.compare(logits, first + place, shard))
    return Logprobs.join(parts)
