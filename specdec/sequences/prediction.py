"""Predicted outputs: a text that a request expects its output to resemble, as a source of drafts.

An edited file repeats most of the original. The cursor follows the output along the predicted
tokens and drafts what comes next there. Where the output leaves the prediction, the cursor looks
for the output's last tokens in it, nearest to the place where it was lost. As with any draft, the
verifier decides which tokens become output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.types.stats import SpeculationStats

METHOD = "prediction"
"""The drafting method under which these drafts are counted."""

MAX_DRAFT_TOKENS = 16
"""Longest draft. A longer one adds little: 16 accepted tokens have 17 for the price of a step."""

_FIRST_DRAFT_TOKENS = 8
_MIN_DRAFT_TOKENS = 2
_MIN_MATCH = 2
"""Least number of last output tokens by which a lost place is found again."""
_LONG_MATCH = 4
_MAX_MATCH = 8


class PredictionCursor:
    """The place of one output in the predicted tokens.

    stats: the drafts that were made here and verified.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """token_ids: the prediction. num_prompt_tokens: where the output begins in its text."""
        self._predicted: NDArray[np.int32] = np.asarray(token_ids, np.int32)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_read = num_prompt_tokens  # tokens of the text
        self._place: int | None = 0  # of the next token; None where it is lost
        self._lost_at = 0
        self._is_guess = False  # whether no token has confirmed the place yet
        self._num_draft_tokens = _FIRST_DRAFT_TOKENS
        self.stats = SpeculationStats()

    @property
    def has_place(self) -> bool:
        """Return whether it had a draft behind the last text."""
        return self._place is not None and self._place < len(self._predicted)

    def draft(self, text: Sequence[int], most: int = MAX_DRAFT_TOKENS) -> tuple[int, ...]:
        """Return what the prediction has behind the end of `text`, at most `most` tokens.

        text: prompt and output; that of an earlier call is its beginning.
        """
        self._follow(text)
        if self._place is None:
            return ()
        count = min(most, self._num_draft_tokens)
        return tuple(self._predicted[self._place : self._place + count].tolist())

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count a verified draft, and adapt the length of the next one."""
        self.stats = self.stats.after_draft(num_drafted, num_accepted)
        if num_accepted < num_drafted:
            self._num_draft_tokens = max(_MIN_DRAFT_TOKENS, self._num_draft_tokens // 2)
        elif num_drafted >= self._num_draft_tokens:
            self._num_draft_tokens = min(MAX_DRAFT_TOKENS, 2 * self._num_draft_tokens)

    def _follow(self, text: Sequence[int]) -> None:
        """Move along the new tokens of a text, and look for the place where they go on."""
        new = text[self._num_read :]
        if not new:
            return
        self._num_read = len(text)
        was_lost = self._place is None
        for token in new:
            if self._place is None:
                break
            if self._place < len(self._predicted) and self._predicted[self._place] == token:
                self._place, self._is_guess = self._place + 1, False
            else:
                was_lost = was_lost or self._is_guess
                self._lost_at, self._place = self._place, None
        if self._place is None:
            self._place = self._found(text, was_lost=was_lost)

    def _found(self, text: Sequence[int], *, was_lost: bool) -> int | None:
        """Return where the output goes on in the prediction; None where that is not known.

        At first it is taken to have replaced one token, unless a long match is found: a short match
        is often elsewhere.
        """
        place = self._find(text, _MIN_MATCH if was_lost else _LONG_MATCH)
        self._is_guess = place is None and not was_lost and self._lost_at + 1 < len(self._predicted)
        return self._lost_at + 1 if self._is_guess else place

    def _find(self, text: Sequence[int], least: int) -> int | None:
        """Return the place behind the longest match of the output's end, at least `least` tokens.

        Of several the next one ahead of where the cursor was lost, else the last one before it.
        """
        end = text[max(self._num_prompt_tokens, len(text) - _MAX_MATCH) :]
        places = np.arange(1, len(self._predicted))  # each is behind the tokens before it
        length = 0
        while length < len(end):
            longer = places[places > length]
            longer = longer[self._predicted[longer - 1 - length] == end[-1 - length]]
            if not len(longer):
                break
            places, length = longer, length + 1
        if length < least:
            return None
        ahead = places[places >= self._lost_at]
        return int(ahead[0] if len(ahead) else places[-1])
