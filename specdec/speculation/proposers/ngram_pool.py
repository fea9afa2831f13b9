"""A bounded pool of n-grams: which token came last after each few tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NGRAM_BYTES = 200
"""What an n-gram takes; 172 to 194 were measured, for 2 to 16 tokens."""


class NgramPool:
    """N-grams of 2 to `ngram_size` tokens, the last of which is drafted after the others.

    Of n-grams that differ in their last token alone, the latest is kept.
    """

    def __init__(self, ngram_size: int, max_ngrams: int) -> None:
        """Keeps the latest `max_ngrams`, counting each length."""
        self.max_context = ngram_size - 1
        self.max_ngrams = max_ngrams
        self._followers: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, context: Sequence[int], token: int) -> None:
        """Takes in the n-grams that end in `token` and begin within `context`, before it."""
        for size in range(1, min(self.max_context, len(context)) + 1):
            key = tuple(context[-size:])
            self._followers[key] = token
            self._followers.move_to_end(key)
        while len(self._followers) > self.max_ngrams:
            self._followers.popitem(last=False)

    def draft(self, text: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Continues `text`, token by token, by the longest n-gram that fits while there is one."""
        tokens = list(text[-self.max_context :])
        num_before = len(tokens)
        while len(tokens) < num_before + max_tokens:
            token = self._follower(tokens)
            if token is None:
                break
            tokens.append(token)
        return tuple(tokens[num_before:])

    def _follower(self, tokens: list[int]) -> int | None:
        for size in range(self.max_context, 0, -1):
            token = self._followers.get(tuple(tokens[-size:]))
            if token is not None:
                return token
        return None
