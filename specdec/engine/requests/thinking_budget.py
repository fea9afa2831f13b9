"""Thinking budgets: reasoning that is longer than a number of tokens is ended.

The answer is generated up to the budget, as if it ended there. If its reasoning is still open, the
mark that ends it is appended, and the sequence is computed again from the cached prefix, in its
seat: it remains one request. Where the grammar of a request permits no mark, as within a call that
began in the reasoning, or a stop token of the mark would end the answer before min_tokens, the
sequence goes on without it.
"""

from __future__ import annotations

from collections.abc import Set

from specdec.engine.requests.stop_checker import AT_LIMIT, Stop, append
from specdec.sequences.sequence import Sequence
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import GrammarError
from specdec.types.request import ThinkingBudget


class ThinkingBudgets:
    """Ends the reasoning of sequences that reach their budgets."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Set[int], max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len

    def reach(self, seq: Sequence) -> tuple[tuple[int, ...], Stop | None]:
        """Return the tokens that are appended to a sequence at its budget, and why it ends there.

        Without a token for the answer after the mark it ends without the mark. It has no budget
        from now on, and the open_length of its other limits.
        """
        budget, seq.thinking_budget = seq.thinking_budget, None
        assert budget is not None, "no budget is reached"
        max_length = seq.max_length(self._max_model_len)
        seq.open_length = seq.longest_open(self._max_model_len)
        if len(seq.token_ids) >= max_length:
            return (), AT_LIMIT
        if not self._is_open(seq, budget) or _ends_early(seq, budget):
            return (), None
        if len(seq.token_ids) + len(budget.closing_ids) >= max_length:
            return (), AT_LIMIT
        if not _is_permitted(seq, budget.closing_ids):
            return (), None
        return self._close(seq, budget.closing_ids)

    def _is_open(self, seq: Sequence, budget: ThinkingBudget) -> bool:
        """Return whether the output ends in reasoning. Its text is made once, here.

        That takes time in proportion to its length, for each sequence of a step one after another.
        """
        output = seq.token_ids[seq.num_prompt_tokens :]
        skips = seq.params.skip_special_tokens
        return budget.is_open(self._tokenizer.decode_long(output, skip_special_tokens=skips))

    def _close(
        self, seq: Sequence, closing_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Stop | None]:
        """Append the mark, up to a token or a stop string that ends the text."""
        for count, token_id in enumerate(closing_ids, 1):
            stop = append(seq, token_id, self._eos_token_ids, self._max_model_len)
            if stop is not None:
                return closing_ids[:count], stop
        return closing_ids, None


def _is_permitted(seq: Sequence, closing_ids: tuple[int, ...]) -> bool:
    """Return whether the grammar of a sequence, if any, permits the mark."""
    try:
        return seq.constraint is None or seq.constraint.permits(seq.token_ids, closing_ids)
    except GrammarError:
        return False  # it is reported when the sequence is scheduled


def _ends_early(seq: Sequence, budget: ThinkingBudget) -> bool:
    """Return whether a stop token of the mark stands before min_tokens."""
    too_early = budget.closing_ids[: max(0, seq.params.min_tokens - seq.num_output_tokens)]
    return not set(seq.params.stop_token_ids).isdisjoint(too_early)
