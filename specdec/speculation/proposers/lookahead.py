"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams from the target's own guesses.

Jacobi iteration guesses many tokens at once, has the target say what follows each of them, and
takes that for the next guesses. Few guesses come true where they stand, but what the target says
after them is how it writes: its n-grams are pooled, and drafted wherever they fit (section 3).

Here the guesses of one sequence, its *window*, run behind its drafts in the same row, each seeing
all before it. The paper gives every trail of guesses a row of its own, under a mask, and verifies
several n-grams at a time; this verifies one.
"""

from __future__ import annotations

import collections.abc

from specdec.sequences.sequence import Lookahead, Sequence
from specdec.speculation.proposers.base import DraftRequest, Proposal
from specdec.speculation.proposers.ngram_pool import NgramPool

Trail = tuple[int, ...]
"""A guess, last, and the tokens it came of: each is what the target said after the one before."""

_STRIDE = 7919
"""A prime; tokens this far apart in a text have nothing to do with each other."""


class LookaheadProposer:
    """Drafts n-grams that the target wrote itself, in the text or in guesses ahead of it."""

    def __init__(self, ngram_size: int, pool_size: int) -> None:
        """Keeps `pool_size` n-grams of 2 to `ngram_size` tokens for each sequence."""
        self._ngram_size = ngram_size
        self._pool_size = pool_size
        self._windows: dict[int, _Window] = {}
        self._proposals: list[Proposal] = []

    def begin(self, requests: collections.abc.Sequence[DraftRequest]) -> None:
        """Takes in what the last step has shown, and looks the drafts up at once."""
        self._proposals = [self._propose(request) for request in requests if request.max_tokens]

    def collect(self) -> list[Proposal]:
        """Drafts, perhaps empty, and the guesses to run behind them."""
        return self._proposals

    def release(self, seq_id: int) -> None:
        """Drops a sequence's guesses and n-grams."""
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


class _Window:
    """The guesses of one sequence, and the n-grams of its text and of earlier guesses."""

    def __init__(self, pool: NgramPool) -> None:
        self.pool = pool
        self._num_pooled = 0  # tokens of the text
        self._asked: list[Trail] = []  # of the guesses that the last proposal had behind its drafts
        self._coming: list[Trail] = []  # of what the target said of the tokens that are to come

    def follow(self, seq: Sequence) -> None:
        """Pools the new text, then what the last step has shown beyond it."""
        text, reach = seq.token_ids, self.pool.max_context
        # Of a text that is longer than the pool, only the end could stay.
        for position in range(max(self._num_pooled, len(text) - self.pool.max_ngrams), len(text)):
            self.pool.add(text[max(0, position - reach) : position], text[position])
        self._num_pooled = len(text)
        self._coming = []
        if seq.lookahead is not None:
            shown = self._shown(seq, seq.lookahead)
            # The first of them is about the token behind the first guess.
            self._coming = shown[seq.num_tokens - seq.lookahead.base_length - 1 :]

    def guess(self, seq: Sequence, num_drafts: int, count: int) -> tuple[int, ...]:
        """`count` guesses at the tokens that come `num_drafts` tokens later.

        Where nothing is known of one, it is some token of the text, as in the authors' code.
        """
        self._asked = self._coming[num_drafts : num_drafts + count]
        first, end = seq.num_tokens + num_drafts + len(self._asked), seq.num_tokens + num_drafts
        for position in range(first, end + count):
            self._asked.append((seq.token_ids[position * _STRIDE % seq.num_tokens],))
        return tuple(trail[-1] for trail in self._asked)

    def _shown(self, seq: Sequence, seen: Lookahead) -> list[Trail]:
        """Pools what the target said after each guess, and returns the trails that end in it."""
        trails = []
        for trail, token in zip(self._trails(seq, seen), seen.next_token_ids, strict=True):
            self.pool.add(trail, token)
            trails.append((*trail, token)[-self.pool.max_context :])
        return trails

    def _trails(self, seq: Sequence, seen: Lookahead) -> list[Trail]:
        """Of the guesses that were run; a draft came of the text and the drafts before it."""
        reach = self.pool.max_context
        text = (*seq.token_ids[: seen.base_length][-reach:], *seen.draft_token_ids)
        num_known = len(text) - len(seen.draft_token_ids)
        ends = range(num_known + 1, len(text) + 1)
        drafted = [text[max(0, end - reach) : end] for end in ends]
        return drafted + self._asked[: len(seen.lookahead_token_ids)]
