"""Prompt lookup (Saxena 2023): drafts what followed the last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.config.methods import NgramConfig
from specdec.speculation.proposers.base import (
    DraftRequest,
    IngestBudget,
    Proposal,
    ProposerMemory,
    SynchronousProposer,
)

_MAX_NEW_ENTRIES = 16_384
"""Most index entries to add in one step, over all sequences, which takes a few milliseconds. A
token adds one entry for each n-gram length."""


class NgramIndex:
    """Index from each n-gram of a growing text to the position after its last occurrence."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def update(self, token_ids: Sequence[int], budget: IngestBudget) -> bool:
        """Index tokens that are new since the last call, each once, as far as the budget allows.

        Return whether all are indexed.
        """
        end = self._num_indexed + budget.grant(len(token_ids) - self._num_indexed)
        for position in range(self._num_indexed, end):
            for size in self._sizes:
                if position >= size:
                    self._followers[tuple(token_ids[position - size : position])] = position
        self._num_indexed = end
        return end == len(token_ids)

    def follower(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after the last occurrence of the text's longest final n-gram."""
        for size in self._sizes:
            found = self._followers.get(tuple(token_ids[-size:]))
            if found is not None:
                return found
        return None


class NgramProposer(SynchronousProposer):
    """Proposer that looks n-grams up in the sequence's own prompt and output."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self._min_n = config.prompt_lookup_min
        self._max_n = config.prompt_lookup_max
        self._indices: dict[int, NgramIndex] = {}
        self._budget = IngestBudget(0)

    @staticmethod
    def memory(config: NgramConfig) -> ProposerMemory:
        """Return the memory of the indices."""
        lengths = config.prompt_lookup_min, config.prompt_lookup_max
        return ProposerMemory(bytes_per_token=index_bytes_per_token(*lengths))

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Look the drafts up; text beyond the budget is indexed in later steps."""
        self._budget = IngestBudget(_MAX_NEW_ENTRIES // (self._max_n - self._min_n + 1))
        super().begin(requests)

    def release(self, seq_id: int) -> None:
        """Drop the index of a sequence."""
        self._indices.pop(seq_id, None)

    def _propose(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        index = self._indices.setdefault(seq.seq_id, NgramIndex(self._min_n, self._max_n))
        is_whole = index.update(seq.token_ids, self._budget)
        follower = index.follower(seq.token_ids) if is_whole else None
        drafts = () if follower is None else copy_from(seq.token_ids, follower, request.max_tokens)
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], drafts)


def index_bytes_per_token(min_n: int, max_n: int) -> int:
    """Return the most memory of an index; for each length 100 to 124 + 8n bytes were measured."""
    return sum(128 + 8 * size for size in range(min_n, max_n + 1))


def copy_from(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from `start` on; past the end the copy repeats, as in LZ77."""
    period = len(token_ids) - start
    return tuple(token_ids[start + offset % period] for offset in range(count))
