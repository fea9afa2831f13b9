"""Constraint of one sequence's drafts and outputs by its grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.text.grammar.matcher import Grammar, mask_words


@dataclass(frozen=True, eq=False)
class ConstrainedDraft:
    """Draft tokens, with the mask of the tokens allowed at each of them and after the last.

    masks: int32 [len(token_ids) + 1, num_words], as in StepRow.grammar_mask.
    """

    token_ids: tuple[int, ...]
    masks: NDArray[np.int32]


class OutputConstraint:
    """The grammar of one sequence, advanced by verified tokens only.

    Every method raises GrammarError once the grammar has failed.
    """

    def __init__(
        self,
        grammar: Grammar,
        num_prompt_tokens: int,
        min_tokens: int,
        end_token_ids: Collection[int],
    ) -> None:
        """end_token_ids: masked before `min_tokens`, unless no other token is allowed."""
        self._matcher = grammar.matcher()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_followed = num_prompt_tokens
        self._min_tokens = min_tokens
        self._no_end_mask = ~mask_words(end_token_ids, len(grammar.text_mask) * 32)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance to the end of the sequence's `token_ids`, from the last known token."""
        for index in range(self._num_followed, len(token_ids)):
            self._matcher.advance(token_ids[index])
            self._num_followed = index + 1

    def extend(self, draft: Sequence[int], limit: int) -> ConstrainedDraft:
        """Return the valid prefix of `draft`, with forced tokens inserted; at most `limit` tokens.

        A forced token that differs from the draft ends the draft; further forced tokens follow.
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
        """Return the whole `draft` with its masks, valid or not.

        For sampled drafts: dropping a token because of its value would change the output
        distribution (Leviathan et al. 2023, appendix A.1, tests every sampled token).
        """
        masks = self._matcher.masks_along(draft)
        for offset in range(len(masks)):
            masks[offset] = self._without_end(masks[offset], offset)
        return ConstrainedDraft(tuple(draft), masks)

    def _mask(self, offset: int) -> NDArray[np.int32]:
        """Return the allowed tokens, `offset` draft tokens after the last verified one."""
        return self._without_end(self._matcher.allowed_mask(), offset)

    def _without_end(self, mask: NDArray[np.int32], offset: int) -> NDArray[np.int32]:
        if self._num_followed - self._num_prompt_tokens + offset >= self._min_tokens:
            return mask
        others = mask & self._no_end_mask
        return others if others.any() else mask
