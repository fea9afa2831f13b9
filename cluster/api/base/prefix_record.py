"""The prefixes that a replica has computed, recorded where replicas are chosen."""

from __future__ import annotations

from collections import OrderedDict

from cluster.api.base.routing_hint import RoutingHint

DEFAULT_CACHE_TOKENS = 2**20
"""Capacity of a replica's prefix cache until the replica has reported it."""

PREFIX_WORTH = 2
"""Additional load of a replica that a token of its prefix is worth: it saves a token now, and a
conversation that moves takes room in a second cache."""


class PrefixRecord:
    """The prefixes that a replica has computed, up to the capacity of its cache.

    Like the cache, it forgets the least recently used ones first, and of a prompt its end first.
    """

    def __init__(self, max_tokens: int = DEFAULT_CACHE_TOKENS) -> None:
        self._tokens: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._num_tokens = 0
        self._max_tokens = max_tokens

    def limit(self, max_tokens: int) -> None:
        """Set the capacity."""
        self._max_tokens = max_tokens
        self._evict()

    def matched_tokens(self, hint: RoutingHint) -> int:
        """Return the length of the longest recorded prefix of a prompt, in tokens."""
        matched = 0
        for key in hint.prefix_keys:
            if (tokens := self._tokens.get(key)) is None:
                break
            matched += tokens
        return matched

    def add(self, hint: RoutingHint) -> None:
        """Record all prefixes of a prompt."""
        pairs = zip(reversed(hint.prefix_keys), reversed(hint.tokens_by_key), strict=True)
        for key, tokens in pairs:
            self._num_tokens += tokens - self._tokens.get(key, 0)
            self._tokens[key] = tokens
            self._tokens.move_to_end(key)
        self._evict()

    def _evict(self) -> None:
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= self._tokens.popitem(last=False)[1]


def work_tokens(hint: RoutingHint, matched_tokens: int) -> int:
    """Return the tokens that a replica has to compute."""
    return max(0, hint.prompt_tokens - matched_tokens) + hint.output_tokens
