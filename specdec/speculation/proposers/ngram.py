"""Prompt lookup (Saxena 2023): drafts what followed the last tokens where they occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from specdec.config.speculation.methods import NgramConfig
from specdec.speculation.proposers.base import (
    DraftRequest,
    IngestBudget,
    Proposal,
    ProposalAhead,
    ProposerMemory,
    SynchronousProposer,
)
from specdec.types.drafts.draft_tree import merged

_MAX_NEW_ENTRIES = 16_384
"""Most index entries to add in one step, over all sequences, which takes a few milliseconds. A
token adds one entry for each n-gram length."""

_MAX_OCCURRENCES = 64
"""Most earlier occurrences of a text's end to look at for drafts ahead, and for trees."""

_MAX_DRAFTS_AHEAD = 256
"""Most drafts ahead in one step, over all sequences; each takes some microseconds."""

_POSITION_BYTES = 4


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

    def follower_after(self, token_ids: Sequence[int], token: int) -> int | None:
        """Return what `update` and `follower` would, if `token` followed the indexed text."""
        end = tuple(token_ids[-self._sizes[0] :])
        for size in self._sizes:
            ngram = (*end, token)[-size:]
            if ngram == end[-size:]:
                return len(token_ids)  # `token` follows an earlier occurrence
            found = self._followers.get(ngram)
            if found is not None:
                return found
        return None


class OccurrenceIndex:
    """Index from each n-gram of one size, 0 included, to all its occurrences in a growing text."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: dict[tuple[int, ...], int] = {}  # the position after the last occurrence
        self._earlier = array("i")  # by position, that after the occurrence before; -1 for none

    def update(self, token_ids: Sequence[int], budget: IngestBudget) -> bool:
        """Index new tokens like `NgramIndex.update`."""
        start = len(self._earlier)
        end = start + budget.grant(len(token_ids) - start)
        for position in range(start, end):
            if position < self._size:
                self._earlier.append(-1)
                continue
            ngram = tuple(token_ids[position - self._size : position])
            self._earlier.append(self._last.get(ngram, -1))
            self._last[ngram] = position
        return end == len(token_ids)

    def followers(self, token_ids: Sequence[int]) -> list[int]:
        """Return the positions after occurrences of the text's final n-gram, the latest first.

        At most _MAX_OCCURRENCES, the text's end not counted.
        """
        if len(token_ids) < self._size:
            return []
        position = self._last.get(tuple(token_ids[len(token_ids) - self._size :]), -1)
        found: list[int] = []
        while position >= 0 and len(found) < _MAX_OCCURRENCES:
            if position < len(token_ids):
                found.append(position)
            position = self._earlier[position]
        return found

    def next_tokens(self, token_ids: Sequence[int]) -> set[int] | None:
        """Return the tokens that have followed the text's final n-gram; None if it is too frequent.

        A token that has not followed it cannot complete a longer n-gram that occurred before.
        """
        tokens: set[int] = set()
        if len(token_ids) < self._size:
            return tokens
        ngram = tuple(token_ids[len(token_ids) - self._size :])
        position = self._last.get(ngram, -1)
        for _ in range(_MAX_OCCURRENCES):
            if position < 0:
                return tokens
            tokens.add(token_ids[position])
            position = self._earlier[position]
        return None


class NgramProposer(SynchronousProposer):
    """Proposer that looks n-grams up in the sequence's own prompt and output."""

    def __init__(self, config: NgramConfig) -> None:
        self._min_n = config.prompt_lookup_min
        self._max_n = config.prompt_lookup_max
        self._indices: dict[int, NgramIndex] = {}
        self._occurrences: dict[int, OccurrenceIndex] = {}  # made for drafts ahead
        self._budget = IngestBudget(0)

    @staticmethod
    def memory(config: NgramConfig) -> ProposerMemory:
        """Return the memory of the indices."""
        min_n, max_n = config.prompt_lookup_min, config.prompt_lookup_max
        # The n-grams of size 0 are one entry for the whole text.
        bytes_per_token = index_bytes_per_token(max(1, min_n - 1), max_n) + _POSITION_BYTES
        return ProposerMemory(bytes_per_token=bytes_per_token)

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Look the drafts up; text beyond the budget is indexed in later steps."""
        self._budget = IngestBudget(_MAX_NEW_ENTRIES // (self._max_n - self._min_n + 1))
        return super().take(requests)

    def release(self, seq_id: int) -> None:
        """Drop the index of a sequence."""
        self._indices.pop(seq_id, None)
        self._occurrences.pop(seq_id, None)

    def _propose(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        index = self._indices.setdefault(seq.seq_id, NgramIndex(self._min_n, self._max_n))
        is_whole = index.update(seq.token_ids, self._budget)
        follower = index.follower(seq.token_ids) if is_whole else None
        if follower is not None and request.wants_tree:
            return self._propose_tree(request, follower)
        drafts = () if follower is None else copy_from(seq.token_ids, follower, request.max_tokens)
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], drafts)

    def _propose_tree(self, request: DraftRequest, follower: int) -> Proposal:
        """Draft what followed several occurrences; the first path is the chain of `follower`."""
        seq, text = request.seq, request.seq.token_ids
        occurrences = self._occurrences.setdefault(seq.seq_id, OccurrenceIndex(self._min_n - 1))
        occurrences.update(text, self._budget)
        lengths = {each: self._match_length(text, each) for each in occurrences.followers(text)}
        matches = sorted(
            (each for each, length in lengths.items() if length >= self._min_n),
            key=lambda each: (-lengths[each], -each),
        )
        starts = dict.fromkeys((follower, *matches))
        continuations = [copy_from(text, start, request.max_tokens) for start in starts]
        tokens, parents = merged(continuations, request.max_nodes)
        return Proposal(seq.seq_id, seq.num_tokens, text[-1], tuple(tokens), parents=tuple(parents))

    def _match_length(self, text: Sequence[int], follower: int) -> int:
        """Return how many tokens before `follower` end the text too, at most the longest n-gram."""
        most = min(self._max_n, follower)
        lengths = range(1, most + 1)
        return next((n - 1 for n in lengths if text[follower - n] != text[-n]), most)

    def propose_ahead(self, requests: Sequence[DraftRequest]) -> list[ProposalAhead] | None:
        """See AheadProposer; None also for texts that are not indexed yet."""
        budget = IngestBudget(_MAX_NEW_ENTRIES // (self._max_n - self._min_n + 2))
        proposals: list[ProposalAhead] = []
        num_left = _MAX_DRAFTS_AHEAD
        for request in requests:
            drafts = self._drafts_ahead(request, budget)
            if drafts is None or len(drafts) > num_left:
                return None
            num_left -= len(drafts)
            proposals.append(ProposalAhead(request.seq.seq_id, drafts))
        return proposals

    def _drafts_ahead(
        self, request: DraftRequest, budget: IngestBudget
    ) -> tuple[tuple[int, ...], ...] | None:
        seq_id, text = request.seq.seq_id, request.seq.token_ids
        index = self._indices.setdefault(seq_id, NgramIndex(self._min_n, self._max_n))
        is_whole = index.update(text, budget)
        if not request.max_tokens:
            return ()
        occurrences = self._occurrences.setdefault(seq_id, OccurrenceIndex(self._min_n - 1))
        if not (occurrences.update(text, budget) and is_whole):
            return None
        tokens = occurrences.next_tokens(text)
        if tokens is None:
            return None
        followers = ((token, index.follower_after(text, token)) for token in tokens)
        return tuple(
            (token, *copy_after(text, token, follower, request.max_tokens))
            for token, follower in followers
            if follower is not None
        )


def index_bytes_per_token(min_n: int, max_n: int) -> int:
    """Return the most memory of an index; for each length 100 to 124 + 8n bytes were measured."""
    return sum(128 + 8 * size for size in range(min_n, max_n + 1))


def copy_from(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from `start` on; past the end the copy repeats, as in LZ77."""
    period = len(token_ids) - start
    return tuple(token_ids[start + offset % period] for offset in range(count))


def copy_after(token_ids: Sequence[int], token: int, start: int, count: int) -> tuple[int, ...]:
    """Return what `copy_from` returns for the text with `token` appended."""
    copied = tuple(token_ids[start : start + count])
    return copied if len(copied) == count else copy_from((*copied, token), 0, count)
