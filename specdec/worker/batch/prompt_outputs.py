"""Log-probabilities of prompts, which some rows of a step yield beside their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from specdec.sampling.logprobs import prompt_logprobs
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import PromptLogprobs, StepRow
from specdec.worker.batch.batch_state import BatchState


def prompt_logprobs_of(
    rows: Sequence[StepRow],
    hidden: Tensor,  # [T, hidden_size]
    state: BatchState,
    compute_logits: Callable[[Tensor], Tensor],
    shard: VocabShard,
) -> tuple[PromptLogprobs, ...]:
    """Return log-probabilities of the prompt tokens after those of rows, where requested.

    A collective call.
    """
    if not state.has_prompt_logprobs:
        return ()
    return tuple(_of_rows(rows, hidden, state, compute_logits, shard))


def _of_rows(
    rows: Sequence[StepRow],
    hidden: Tensor,
    state: BatchState,
    compute_logits: Callable[[Tensor], Tensor],
    shard: VocabShard,
) -> Iterator[PromptLogprobs]:
    first = 0
    for row in rows:
        listed = state.rules(row.seq_id).listed_prompt_tokens
        if listed is not None and (tokens := state.next_prompt_tokens(row)):
            own = hidden[first : first + len(tokens)]
            logprobs = prompt_logprobs(own, tokens, listed, compute_logits, shard)
            yield PromptLogprobs(row.seq_id, row.num_computed_tokens + 1, logprobs)
        first += len(row.token_ids)
