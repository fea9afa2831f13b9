"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams from the target's own guesses.

Jacobi iteration guesses several tokens at once, runs the target on them, and takes the target's
next token after each as the next guess. Few guesses are right at their position, but the n-grams of
guesses and answers are typical for the target: they are pooled, and drafted where their context
matches (section 3).

Here the guesses of one sequence, its *window*, run after its drafts in the same row, each
attending to all before it. The paper gives every trail of guesses its own row under a mask and
verifies several n-grams at a time; this implementation verifies one.
"""

from __future__ import annotations

import collections.abc
from collections import OrderedDict

from specdec.config.speculation.methods import LookaheadConfig
from specdec.sequences.sequence import Lookahead, Sequence
from specdec.speculation.proposers.base import (
    DraftRequest,
    Proposal,
    ProposerMemory,
    SynchronousProposer,
)

Trail = tuple[int, ...]
"""A guess, last, and the tokens it derives from: each is the target's answer to the one before."""

_STRIDE = 7919
"""A prime; tokens this far apart in a text are unrelated."""

NGRAM_BYTES = 200
"""Memory of an n-gram; 172 to 194 bytes were measured for 2 to 16 tokens."""


class LookaheadProposer(SynchronousProposer):
    """Proposer of n-grams that the target generated, in the text or after guesses ahead of it.

    Its proposals also have guesses to run after the drafts.
    """

    def __init__(self, config: LookaheadConfig) -> None:
        self._ngram_size = config.lookahead_ngram_size
        self._pool_size = config.lookahead_pool_size
        self._windows: dict[int, _Window] = {}

    @staticmethod
    def memory(config: LookaheadConfig) -> ProposerMemory:
        """Return the memory of the pools of n-grams."""
        return ProposerMemory(bytes_per_sequence=config.lookahead_pool_size * NGRAM_BYTES)

    def take(self, requests: collections.abc.Sequence[DraftRequest]) -> list[Proposal]:
        """Pool the results of the last step, and look the drafts up where some are wanted."""
        return super().take([request for request in requests if request.max_tokens])

    def release(self, seq_id: int) -> None:
        """Drop a sequence's guesses and n-grams."""
        self._windows.pop(seq_id, None)

    def _propose(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        window = self._windows.get(seq.seq_id)
        if window is None:
            window = _Window(NgramPool(self._ngram_size, self._pool_size))
            self._windows[seq.seq_id] = window
        window.follow(seq)
        drafts = window.pool.draft(seq.token_ids, request.max_tokens)
        guesses = window.guess(seq, len(drafts), request.max_lookahead_tokens)
        return Proposal(
            seq.seq_id,
            seq.num_tokens,
            seq.token_ids[-1],
            drafts,
            lookahead_token_ids=guesses,
        )


class NgramPool:
    """Bounded pool of n-grams of 2 to `ngram_size` tokens.

    The last token of each is drafted after the others. Of n-grams that differ only in their last
    token, the latest is kept.
    """

    def __init__(self, ngram_size: int, max_ngrams: int) -> None:
        """Keep the latest `max_ngrams` n-grams of all lengths together."""
        self.max_context = ngram_size - 1
        self.max_ngrams = max_ngrams
        self._followers: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, context: collections.abc.Sequence[int], token: int) -> None:
        """Add the n-grams that end in `token` and begin within `context`, the tokens before it."""
        for size in range(1, min(self.max_context, len(context)) + 1):
            key = tuple(context[-size:])
            self._followers[key] = token
            self._followers.move_to_end(key)
        while len(self._followers) > self.max_ngrams:
            self._followers.popitem(last=False)

    def draft(self, text: collections.abc.Sequence[int], max_tokens: int) -> tuple[int, ...]:
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


class _Window:
    """Guesses of one sequence, and the n-grams of its text and of earlier guesses."""

    def __init__(self, pool: NgramPool) -> None:
        self.pool = pool
        self._num_pooled = 0  # tokens of the text
        self._guessed: list[Trail] = []  # after the drafts of the last proposal
        self._answered: list[Trail] = []  # the target's answers about tokens yet to come

    def follow(self, seq: Sequence) -> None:
        """Pool the new text, then the target's answers beyond it from the last step."""
        text, reach = seq.token_ids, self.pool.max_context
        # Of a text that is longer than the pool, only the end would remain.
        for position in range(max(self._num_pooled, len(text) - self.pool.max_ngrams), len(text)):
            self.pool.add(text[max(0, position - reach) : position], text[position])
        self._num_pooled = len(text)
        self._answered = []
        if seq.lookahead is not None:
            trails = self._pool_answers(seq, seq.lookahead)
            # The first of them is about the token after the first guess.
            self._answered = trails[seq.num_tokens - seq.lookahead.base_length - 1 :]

    def guess(self, seq: Sequence, num_drafts: int, count: int) -> tuple[int, ...]:
        """Return `count` guesses at the tokens that follow `num_drafts` drafts.

        A position without an answer of the target gets some token of the text, as in the authors'
        code.
        """
        self._guessed = self._answered[num_drafts : num_drafts + count]
        first, end = seq.num_tokens + num_drafts + len(self._guessed), seq.num_tokens + num_drafts
        for position in range(first, end + count):
            self._guessed.append((seq.token_ids[position * _STRIDE % seq.num_tokens],))
        return tuple(trail[-1] for trail in self._guessed)

    def _pool_answers(self, seq: Sequence, seen: Lookahead) -> list[Trail]:
        """Pool the target's answer after each guess, and return the trails that end in it."""
        trails = []
        for trail, token in zip(self._trails(seq, seen), seen.next_token_ids, strict=True):
            self.pool.add(trail, token)
            trails.append((*trail, token)[-self.pool.max_context :])
        return trails

    def _trails(self, seq: Sequence, seen: Lookahead) -> list[Trail]:
        """Return the trails of the guesses that were run; a draft derives from all before it."""
        reach = self.pool.max_context
        text = (*seq.token_ids[: seen.base_length][-reach:], *seen.draft_token_ids)
        num_known = len(text) - len(seen.draft_token_ids)
        ends = range(num_known + 1, len(text) + 1)
        drafted = [text[max(0, end - reach) : end] for end in ends]
        return drafted + self._guessed[: len(seen.lookahead_token_ids)]
