"""Suffix decoding (Oliaro et al. 2024, SuffixDecoding, arXiv 2411.04975): what mostly followed.

The end of a sequence is looked up in two suffix trees: of its own prompt and output, and of earlier
outputs of the same cache_salt. The longer the match, the more tokens are drafted; a draft follows
the most frequent token, as long as that is frequent enough.
"""

from __future__ import annotations

import collections.abc
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.speculation.proposers.base import DraftRequest, Proposal, ReadingBudget
from specdec.speculation.proposers.output_cache import OutputCache
from specdec.speculation.proposers.suffix_tree import (
    NO_CONTINUATION,
    Continuation,
    GrowingText,
    SuffixTree,
    Tokens,
)

_MAX_NEW_TOKENS = 1024
"""To take in in one step, of all sequences together, and as many of outputs that have ended. Each
costs some 10 µs, and a prompt of 30,000 at once would hold up everybody for a third of a second."""


@dataclass(frozen=True)
class SuffixLimits:
    """How far to look back and ahead; the names are vLLM's.

    max_tree_depth: most tokens of a match and its draft together.
    max_cached_requests: how many earlier outputs are kept; the oldest goes first, 0 keeps none.
    max_spec_factor: most tokens drafted for each token of the match.
    min_token_prob: least probability of a draft, by the counts, at which it goes on.
    """

    max_tree_depth: int
    max_cached_requests: int
    max_spec_factor: float
    min_token_prob: float


@dataclass
class _Known:
    """A sequence that was asked about, and its text once something was to be drafted."""

    seq: Sequence
    text: GrowingText | None = None


class SuffixProposer:
    """Drafts what mostly followed the sequence's last tokens, in itself or in earlier outputs."""

    def __init__(self, limits: SuffixLimits) -> None:
        self._limits = limits
        self._known: dict[int, _Known] = {}
        self._proposals: list[Proposal] = []
        self._reading = ReadingBudget(0)
        self.cache = OutputCache(limits.max_tree_depth, limits.max_cached_requests)

    def begin(self, requests: collections.abc.Sequence[DraftRequest]) -> None:
        """Looks the drafts up at once."""
        self.cache.tend(_MAX_NEW_TOKENS)
        self._reading = ReadingBudget(_MAX_NEW_TOKENS)
        self._proposals = [self._propose(request) for request in requests]

    def collect(self) -> list[Proposal]:
        """What `begin` found; a sequence without a match, or not read yet, has an empty draft."""
        return self._proposals

    def release(self, seq_id: int) -> None:
        """Drops a sequence's tree; keeps the output of one that has ended."""
        known = self._known.pop(seq_id, None)
        if known is not None and known.seq.status is SequenceStatus.FINISHED:
            seq = known.seq
            self.cache.add(seq.request.cache_salt, seq.token_ids[seq.num_prompt_tokens :])

    def _propose(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        known = self._known.setdefault(seq.seq_id, _Known(seq))
        draft = self._draft(known, request.max_tokens) if request.max_tokens else NO_CONTINUATION
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], tuple(draft.token_ids))

    def _draft(self, known: _Known, max_tokens: int) -> Continuation:
        text = known.text = known.text or GrowingText(self._limits.max_tree_depth)
        if not self._read(known.seq, text):
            return NO_CONTINUATION
        context = text.token_ids[-self._limits.max_tree_depth :]
        own = self._best(text.tree, context, text.num_matched, max_tokens)
        tree = self.cache.tree(known.seq.request.cache_salt)
        if tree is None:
            return own
        others = self._best(tree, context, _num_matched(tree, context), max_tokens)
        return max(own, others, key=lambda draft: draft.score)

    def _read(self, seq: Sequence, text: GrowingText) -> bool:
        """Takes in what is new of a sequence, as far as may be; whether that is all of it."""
        start = len(text.token_ids)
        end = start + self._reading.grant(seq.num_tokens - start)
        for token in seq.token_ids[start:end]:
            text.append(token)
        return end == seq.num_tokens

    def _best(
        self, tree: SuffixTree, context: Tokens, num_matched: int, max_tokens: int
    ) -> Continuation:
        """The draft with the highest score, of matches of up to `num_matched` tokens."""
        best, limits = NO_CONTINUATION, self._limits
        depth, factor = limits.max_tree_depth, limits.max_spec_factor
        for length, count in _lengths(depth, factor, max_tokens, num_matched):
            if count <= best.score:
                break  # no token counts more than 1
            place = tree.find(context[-length:])
            assert place is not None, "a match that is none"
            draft = tree.continuation(place, count, limits.min_token_prob)
            if draft.score > best.score:
                best = draft
        return best


def _num_matched(tree: SuffixTree, context: Tokens) -> int:
    """How many of the last tokens the tree has; with them it has every shorter end."""
    lengths = range(1, min(len(context), tree.max_depth - 1) + 1)
    return bisect_left(lengths, True, key=lambda length: tree.find(context[-length:]) is None)


@lru_cache(maxsize=4096)
def _lengths(
    max_depth: int, max_factor: float, max_tokens: int, num_matched: int
) -> tuple[tuple[int, int], ...]:
    """Each number of tokens that may be drafted, the most first, with the longest match for it.

    Shorter matches for as many tokens were never better (docs/benchmarks/README.md), and to
    try them too took most of the time.
    """
    tolerance = 1e-6  # of a factor such as 0.1 that is a little less as a float
    longest = {
        min(max_tokens, int(length * max_factor + tolerance), max_depth - length): length
        for length in range(1, min(num_matched, max_depth - 1) + 1)
    }
    return tuple((longest[count], count) for count in sorted(longest, reverse=True) if count > 0)
