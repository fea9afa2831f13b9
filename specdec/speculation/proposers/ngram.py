"""Prompt lookup (Saxena 2023): what followed the last few tokens when they last occurred."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.speculation.proposers.base import DraftRequest, Proposal, ReadingBudget

_MAX_NEW_ENTRIES = 16_384
"""To add to indices in one step, over all sequences: a few milliseconds' work. A token makes one
of each length that is looked up."""


class NgramIndex:
    """Where each n-gram of one growing text was last followed by something."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def update(self, token_ids: Sequence[int], budget: ReadingBudget) -> bool:
        """Indexes tokens that are new since the last call; each is visited once.

        Returns whether none is left.
        """
        end = self._num_indexed + budget.grant(len(token_ids) - self._num_indexed)
        for position in range(self._num_indexed, end):
            for size in self._sizes:
                if position >= size:
                    self._followers[tuple(token_ids[position - size : position])] = position
        self._num_indexed = end
        return end == len(token_ids)

    def follower(self, token_ids: Sequence[int]) -> int | None:
        """Position that followed the last occurrence of the longest n-gram that ends the text."""
        for size in self._sizes:
            found = self._followers.get(tuple(token_ids[-size:]))
            if found is not None:
                return found
        return None


class NgramProposer:
    """Drafts by lookup in the sequence's own prompt and output."""

    def __init__(self, min_n: int, max_n: int) -> None:
        """Looks up n-grams of `max_n` tokens first, then shorter ones down to `min_n`."""
        self._min_n = min_n
        self._max_n = max_n
        self._indices: dict[int, NgramIndex] = {}
        self._reading = ReadingBudget(0)
        self._proposals: list[Proposal] = []

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Looks the drafts up at once."""
        self._reading = ReadingBudget(_MAX_NEW_ENTRIES // (self._max_n - self._min_n + 1))
        self._proposals = [self._propose(request) for request in requests]

    def collect(self) -> list[Proposal]:
        """What `begin` found; a sequence without a match, or not read yet, has an empty draft."""
        return self._proposals

    def release(self, seq_id: int) -> None:
        """Drops the index of a sequence."""
        self._indices.pop(seq_id, None)

    def _propose(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        index = self._indices.setdefault(seq.seq_id, NgramIndex(self._min_n, self._max_n))
        is_whole = index.update(seq.token_ids, self._reading)
        follower = index.follower(seq.token_ids) if is_whole else None
        drafts = () if follower is None else copy_from(seq.token_ids, follower, request.max_tokens)
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], drafts)


def index_bytes_per_token(min_n: int, max_n: int) -> int:
    """The most that an index takes; of each length 100 to 124 and 8 a token were measured."""
    return sum(128 + 8 * size for size in range(min_n, max_n + 1))


def copy_from(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end the copy goes on with itself, as in LZ77."""
    period = len(token_ids) - start
    return tuple(token_ids[start + offset % period] for offset in range(count))
