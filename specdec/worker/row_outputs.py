"""What some rows of a step yield beside their tokens: predictions of guesses, prompt logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from specdec.kernels.sample import RowArgmax
from specdec.sampling.logprobs import prompt_logprobs
from specdec.sampling.vocab_shard import VocabShard, all_ranks_argmax
from specdec.types.messages import PromptLogprobs, StepRow
from specdec.worker.batch_state import BatchState
from specdec.worker.step_rows import positions_of_guesses


def lookahead_tokens(
    rows: Sequence[StepRow], argmax: RowArgmax, shard: VocabShard
) -> dict[int, tuple[int, ...]]:
    """Return the argmax after each guess, by sequence with lookahead tokens; a collective call.

    argmax: of this rank's logits of the last known token and the guesses of each row.
    """
    if not (positions := positions_of_guesses(rows)):
        return {}
    guesses = argmax.take(torch.tensor(positions, device=argmax.values.device))
    best = iter(all_ranks_argmax(guesses, shard).token_ids.tolist())
    return {
        row.seq_id: tuple(islice(best, row.num_guesses)) for row in rows if row.num_lookahead_tokens
    }


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
        num_best = state.rules(row.seq_id).prompt_logprobs
        if num_best is not None and (tokens := state.next_prompt_tokens(row)):
            own = hidden[first : first + len(tokens)]
            logprobs = prompt_logprobs(own, tokens, num_best, compute_logits, shard)
            yield PromptLogprobs(row.seq_id, row.num_computed_tokens + 1, logprobs)
        first += len(row.token_ids)
