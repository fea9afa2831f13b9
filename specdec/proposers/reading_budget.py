"""How much text a lookup may take in during one step, before others are held up by it."""

from __future__ import annotations

from specdec.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

_ALWAYS_GRANTED = MAX_NUM_SPECULATIVE_TOKENS + 1
"""What a step brings a sequence at most: so whoever is up to date stays so."""


class ReadingBudget:
    """Tokens left for one step, shared by whoever has a long text to take in.

    A text that is not taken in whole has no drafts yet; the next step goes on with it.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def grant(self, num_tokens: int) -> int:
        """How many of `num_tokens` new ones a sequence may take in now."""
        granted = min(num_tokens, max(self._num_left, _ALWAYS_GRANTED))
        self._num_left = max(0, self._num_left - granted)
        return granted
