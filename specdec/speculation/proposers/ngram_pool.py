"""Bounded pool of n-grams: for each short context, the token that followed it last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NGRAM_BYTES = 200
"""Memory of an n-gram; 172 to 194 bytes were measured for 2 to 16 tokens."""


class NgramPool:
    """N-grams of 2 to `ngram_size` tokens; the last token of each is drafted after the others.

    Of n-grams that differ only in their last token, the latest is kept.
    """

    def __init__(self, ngram_size: int, max_ngrams: int) -> None:
        """Keep the latest `max_ngrams` n-grams of all lengths together."""
        self.max_context = ngram_size - 1
        self.max_ngrams = max_ngrams
        self._followers: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, context: Sequence[int], token: int) -> None:
        """Add the n-grams that end in `token` and begin within `context`, the tokens before it."""
        for size in range(1, min(self.max_context, len(context)) + 1):
            key = tuple(context[-size:])
            self._followers[key] = token
            self._followers.move_to_end(key)
        while len(self._followers) > self.max_ngrams:
            self._followers.popitem(last=False)

    def draft(self, text: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Continue `text` token by token, by the longest matching n-gram, while one matches."""
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
