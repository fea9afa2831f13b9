"""What one sequence's grammar makes of each of its steps: a draft, and what may come along it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.text.grammar.matcher import Grammar, mask_words


@dataclass(frozen=True, eq=False)
class ConstrainedDraft:
    """Draft tokens, and what may come in place of each and after the last.

    masks: int32 [len(token_ids) + 1, num_words], as in StepRow.grammar_mask.
    """

    token_ids: tuple[int, ...]
    masks: NDArray[np.int32]


class OutputConstraint:
    """Holds one sequence to its grammar; goes by verified tokens alone.

    Every method raises GrammarError, then and ever after, where the grammar cannot go on.
    """

    def __init__(
        self,
        grammar: Grammar,
        num_prompt_tokens: int,
        min_tokens: int,
        end_token_ids: Collection[int],
    ) -> None:
        """end_token_ids: kept back before `min_tokens`, but where nothing else may come."""
        self._matcher = grammar.matcher()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_followed = num_prompt_tokens
        self._min_tokens = min_tokens
        self._no_end_mask = ~mask_words(end_token_ids, len(grammar.text_mask) * 32)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Goes on to the end of the sequence's `token_ids`, of which it knows the beginning."""
        for index in range(self._num_followed, len(token_ids)):
            self._matcher.advance(token_ids[index])
            self._num_followed = index + 1

    def extend(self, draft: Sequence[int], limit: int) -> ConstrainedDraft:
        """The part of `draft` that may come, with the tokens that must come in their places.

        At most `limit` tokens. A draft that guessed another token than the one that must come goes
        no further; what must come goes on without it.
        """
        tokens: list[int] = []
        masks = [self._mask(0)]
        while len(tokens) < limit and not self._matcher.is_finished:
            forced = self._matcher.forced_tokens(limit - len(tokens))
            following = forced or draft[len(tokens) : len(tokens) + 1]
            if not following or (not forced and not self._matcher.num_valid(following)):
                break
            if tuple(draft[len(tokens) : len(tokens) + len(following)]) != tuple(following):
                draft = ()
            for token in following:
                self._matcher.advance(token)
                tokens.append(token)
                masks.append(self._mask(len(tokens)))
        self._matcher.rollback(len(tokens))
        return ConstrainedDraft(tuple(tokens), np.stack(masks))

    def along(self, draft: Sequence[int]) -> ConstrainedDraft:
        """The whole of `draft`, whatever may come of it.

        For one that was sampled: to drop a token for what it is would change the distribution of
        what is accepted (Leviathan et al. 2023, appendix A.1, takes every drawn token to its test).
        """
        masks = self._matcher.masks_along(draft)
        for offset in range(len(masks)):
            masks[offset] = self._without_end(masks[offset], offset)
        return ConstrainedDraft(tuple(draft), masks)

    def _mask(self, offset: int) -> NDArray[np.int32]:
        """What may come now, `offset` draft tokens after the last verified one."""
        return self._without_end(self._matcher.allowed_mask(), offset)

    def _without_end(self, mask: NDArray[np.int32], offset: int) -> NDArray[np.int32]:
        if self._num_followed - self._num_prompt_tokens + offset >= self._min_tokens:
            return mask
        others = mask & self._no_end_mask
        return others if others.any() else mask
