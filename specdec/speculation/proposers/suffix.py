"""Suffix decoding (Oliaro et al. 2024, SuffixDecoding, arXiv 2411.04975).

The end of a sequence is looked up in suffix trees: of the sequence itself, of earlier outputs with
the same cache_salt and adapter, and of a static corpus. The longer the match, the more tokens are
drafted; each draft token is the most frequent continuation, as long as that is frequent enough.
"""

from __future__ import annotations

import collections.abc
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from specdec.config.speculation.methods import SuffixConfig
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.speculation.proposers.base import (
    DraftRequest,
    IngestBudget,
    Proposal,
    ProposalAhead,
    ProposerMemory,
    SynchronousProposer,
)
from specdec.speculation.proposers.corpus import MAX_CORPUS_TOKENS, CorpusTrees, Encode
from specdec.speculation.proposers.suffix_tree import (
    BYTES_PER_TOKEN,
    NO_CONTINUATION,
    Branches,
    Continuation,
    OnlineSuffixTree,
    SuffixTree,
    Tokens,
)
from specdec.types.drafts.draft_tree import merged, paths

_MAX_NEW_TOKENS = 1024
"""Most tokens to ingest in one step, of all running sequences together, and as many of finished
outputs. Each costs some 10 µs; a prompt of 30,000 at once would delay all requests by a third of a
second."""

_MAX_TOKENS_AHEAD = 4
_MAX_LOOKUPS_AHEAD = 32
"""Most tokens to look a draft up after, ahead, for a sequence and for a step; each sequence has at
least one. A lookup takes tens of microseconds."""

_MATCHES_PER_TREE = 8
"""Lengths of matches whose branches fill a tree of drafts; each takes some ten microseconds."""

MAX_NODES = 2**20
"""Most nodes of all trees together; about as many tokens, unless outputs repeat each other."""

_TOKENS_PER_NODE = 2
"""Limit of the tokens of all outputs together, those that wait too, for each node of the trees."""

_NODE_BYTES = 170
MAX_CACHE_BYTES = _NODE_BYTES * MAX_NODES
"""Memory of MAX_NODES nodes; 160 bytes a node and 4 a token were measured."""

_Match = tuple[SuffixTree, Tokens, int]
"""A tree, the end of a text, and the number of its last tokens that the tree has."""

Tenant = tuple[str, int]
"""The cache_salt and the adapter of requests: only those with the same ones share outputs."""


@dataclass
class _State:
    """A sequence, and its suffix tree since the first request for a draft."""

    seq: Sequence
    tree: OnlineSuffixTree | None = None


class SuffixProposer(SynchronousProposer):
    """Proposer of the most frequent continuations, from the sequence itself and earlier outputs."""

    guesses_outcomes = True

    def __init__(self, config: SuffixConfig) -> None:
        self._max_depth = config.suffix_decoding_max_tree_depth
        self._max_factor = config.suffix_decoding_max_spec_factor
        self._min_prob = config.suffix_decoding_min_token_prob
        self._states: dict[int, _State] = {}
        self._budget = IngestBudget(0)
        self.cache = OutputCache(self._max_depth, config.suffix_decoding_max_cached_requests)
        self._corpus_path = config.lookup_corpus
        self.corpus = CorpusTrees(self._max_depth)

    @staticmethod
    def memory(config: SuffixConfig) -> ProposerMemory:
        """Return the memory of the cache of outputs, the corpus and the sequences' trees."""
        fixed_bytes = MAX_CACHE_BYTES if config.suffix_decoding_max_cached_requests else 0
        if config.lookup_corpus is not None:
            fixed_bytes += 2 * MAX_CORPUS_TOKENS * _NODE_BYTES
        return ProposerMemory(fixed_bytes=fixed_bytes, bytes_per_token=BYTES_PER_TOKEN)

    def load_corpus(self, encode: Encode) -> None:
        """Load the configured corpus, if any; see `CorpusTrees.load`."""
        if self._corpus_path is not None:
            self.corpus.load(self._corpus_path, encode)

    def take(self, requests: collections.abc.Sequence[DraftRequest]) -> list[Proposal]:
        """Look the drafts up; text beyond the budget is ingested in later steps."""
        self._begin_step()
        return super().take(requests)

    def propose_ahead(
        self, requests: collections.abc.Sequence[DraftRequest]
    ) -> list[ProposalAhead] | None:
        """Look drafts up after the pending ones and the likeliest tokens that may follow them.

        No tree is drafted ahead: a token selects a chain.
        """
        if any(request.wants_tree for request in requests):
            return None
        self._begin_step()
        count = min(_MAX_TOKENS_AHEAD, max(1, _MAX_LOOKUPS_AHEAD // max(1, len(requests))))
        return [
            ProposalAhead(each.seq.seq_id, self._drafts_ahead(each, count)) for each in requests
        ]

    def release(self, seq_id: int) -> None:
        """Drop a sequence's tree, and cache its output if it is finished."""
        state = self._states.pop(seq_id, None)
        if state is not None and state.seq.status is SequenceStatus.FINISHED:
            seq = state.seq
            self.cache.add(_tenant(seq), seq.token_ids[seq.num_prompt_tokens :])

    def _begin_step(self) -> None:
        self.cache.maintain(_MAX_NEW_TOKENS)
        self._budget = IngestBudget(_MAX_NEW_TOKENS)

    def _propose(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        base = seq.num_tokens, seq.token_ids[-1]
        matches = list(self._matches(seq)) if request.max_tokens else []
        if request.wants_tree:
            tokens, parents = self._tree(matches, request)
            return Proposal(seq.seq_id, *base, tokens, parents=parents)
        return Proposal(seq.seq_id, *base, self._chain(matches, request.max_tokens))

    def _drafts_ahead(self, request: DraftRequest, count: int) -> tuple[tuple[int, ...], ...]:
        """Return drafts after up to `count` tokens, each with its token first."""
        seq, pending, most = request.seq, request.pending_drafts, request.max_tokens
        tokens = self._next_tokens(self._matches(seq, pending), count) if most else ()
        chains = (
            (each, *self._chain(self._matches(seq, (*pending, each)), most)) for each in tokens
        )
        return tuple(each for each in chains if len(each) > 1)

    def _next_tokens(self, matches: Iterable[_Match], count: int) -> tuple[int, ...]:
        """Return the `count` most frequent tokens after the longest matches."""
        found = [
            tree.branches(place, count, 1, self._min_prob)
            for tree, context, num_matched in matches
            if num_matched and (place := tree.find(context[-num_matched:])) is not None
        ]
        found.sort(key=lambda each: -each.score)
        return tuple(dict.fromkeys(token for each in found for token in each.token_ids))[:count]

    def _chain(self, matches: Iterable[_Match], max_tokens: int) -> tuple[int, ...]:
        """Return the draft with the highest score."""
        drafts = (self._best(*match, max_tokens) for match in matches)
        draft = max(drafts, key=lambda each: each.score, default=NO_CONTINUATION)
        return tuple(draft.token_ids)

    def _matches(self, seq: Sequence, pending: tuple[int, ...] = ()) -> Iterator[_Match]:
        """Yield each tree with the text's end and the length of its longest match there.

        pending: tokens that may follow the text.
        """
        state = self._states.setdefault(seq.seq_id, _State(seq))
        own = state.tree = state.tree or OnlineSuffixTree(self._max_depth)
        if not self._ingest(seq, own):
            return
        context = (own.token_ids[-self._max_depth :] + array("i", pending))[-self._max_depth :]
        yield own.tree, context, _num_matched(own.tree, context) if pending else own.num_matched
        cached = self.cache.tree(_tenant(seq))
        corpus = self.corpus.trees(seq.request.cache_salt)
        for tree in (*((cached,) if cached is not None else ()), *corpus):
            yield tree, context, _num_matched(tree, context)

    def _ingest(self, seq: Sequence, tree: OnlineSuffixTree) -> bool:
        """Append a sequence's new tokens, within the budget; return whether the tree has all."""
        start = len(tree.token_ids)
        end = start + self._budget.grant(seq.num_tokens - start)
        for token in seq.token_ids[start:end]:
            tree.append(token)
        return end == seq.num_tokens

    def _best(
        self, tree: SuffixTree, context: Tokens, num_matched: int, max_tokens: int
    ) -> Continuation:
        """Return the draft with the highest score, of matches of up to `num_matched` tokens."""
        best = NO_CONTINUATION
        for length, count in _lengths(self._max_depth, self._max_factor, max_tokens, num_matched):
            if count <= best.score:
                break  # no token scores more than 1
            place = tree.find(context[-length:])
            assert place is not None, "the tree has no such match"
            draft = tree.continuation(place, count, self._min_prob)
            if draft.score > best.score:
                best = draft
        return best

    def _tree(
        self, matches: list[_Match], request: DraftRequest
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return tokens and parents of a tree of drafts: branches by score until it is full.

        The longest matches have the most certain continuations, and often a single one; those of
        shorter matches differ.
        """
        found = [
            self._branches(tree, context[-length:], request)
            for tree, context, num_matched in matches
            for length in range(num_matched, max(0, num_matched - _MATCHES_PER_TREE), -1)
        ]
        found.sort(key=lambda each: -each.score)
        continuations = [
            [each.token_ids[node] for node in path]
            for each in found
            for path in paths(each.parents)
        ]
        token_ids, parents = merged(continuations, request.max_nodes)
        return tuple(token_ids), tuple(parents)

    def _branches(self, tree: SuffixTree, end: Tokens, request: DraftRequest) -> Branches:
        """Return the branches after a match, as deep as a chain may be there."""
        place = tree.find(end)
        assert place is not None, "the tree has no such match"
        depth = _num_drafted(self._max_depth, self._max_factor, request.max_tokens, len(end))
        return tree.branches(place, request.max_nodes, depth, self._min_prob)


def _tenant(seq: Sequence) -> Tenant:
    return seq.request.cache_salt, seq.request.adapter_id


@dataclass
class _Output:
    """An output; its tenant's tree has the suffixes from `first` to before `end`."""

    tenant: Tenant
    token_ids: Tokens
    first: int = 0
    end: int = 0


class OutputCache:
    """The latest outputs: one suffix tree a tenant, which holds outputs of that tenant only.

    The bounds hold over all tenants, and the oldest output is evicted first, whichever tenant it
    belongs to. `maintain` inserts and evicts a bounded number of tokens, since a long output at
    once would delay the running requests by several steps. Where outputs end faster than that, the
    oldest of those that wait are dropped.
    """

    def __init__(self, max_depth: int, max_outputs: int, max_nodes: int = MAX_NODES) -> None:
        """Keep at most `max_outputs` outputs; none if that is 0."""
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._max_nodes = max_nodes
        self._pending: deque[_Output] = deque()
        self.num_pending_tokens = 0  # of outputs that are not completely in a tree
        self._outputs: deque[_Output] = deque()
        self._trees: dict[Tenant, SuffixTree] = {}
        self.num_nodes = 0  # of all trees, which determine the memory
        self.num_tokens = 0  # of outputs that are completely in a tree

    @property
    def num_outputs(self) -> int:
        """Outputs that are completely in a tree."""
        return len(self._outputs)

    def tree(self, tenant: Tenant) -> SuffixTree | None:
        """Return the tree of a tenant's outputs; None while there are none."""
        return self._trees.get(tenant)

    def add(self, tenant: Tenant, token_ids: collections.abc.Sequence[int]) -> None:
        """Queue an output, which `maintain` inserts into its tenant's tree."""
        # A token takes two nodes at most. An output that would not fit must not evict others.
        if token_ids and self._max_outputs and 2 * len(token_ids) <= self._max_nodes:
            self._pending.append(_Output(tenant, array("i", token_ids)))
            self.num_pending_tokens += len(token_ids)
            while self.num_pending_tokens > self._max_nodes:  # tokens that the trees cannot hold
                self._drop_pending()

    def maintain(self, max_tokens: int) -> None:
        """Evict tokens beyond the bounds, then insert queued ones, at most `max_tokens` in all."""
        for _ in range(max_tokens):
            if self._is_over_limit:
                self._evict_token()
            elif self._pending:
                self._insert_token()
            else:
                return

    def check_integrity(self) -> None:
        """Assert that all trees are consistent, counted, and of tenants with an output."""
        for tree in self._trees.values():
            tree.check_integrity()
        assert self.num_nodes == sum(tree.num_nodes for tree in self._trees.values())
        assert self.num_pending_tokens == sum(len(each.token_ids) for each in self._pending)
        assert self.num_tokens == sum(len(each.token_ids) for each in self._outputs)
        held = (*self._outputs, *self._pending)
        assert set(self._trees) == {each.tenant for each in held if each.end > each.first}

    @property
    def _is_over_limit(self) -> bool:
        """Return whether to evict; an output that is partly evicted is evicted completely."""
        is_beyond = (
            self.num_outputs > self._max_outputs
            or self.num_nodes > self._max_nodes
            or self.num_tokens + self.num_pending_tokens > _TOKENS_PER_NODE * self._max_nodes
        )
        return is_beyond or bool(self._outputs and self._outputs[0].first)

    def _drop_pending(self) -> None:
        """Drop the oldest output of which no token is in a tree."""
        oldest = 1 if self._pending[0].end else 0
        self.num_pending_tokens -= len(self._pending[oldest].token_ids)
        del self._pending[oldest]

    def _insert_token(self) -> None:
        output = self._pending[0]
        tree = self._trees.setdefault(output.tenant, SuffixTree(self._max_depth))
        num_before = tree.num_nodes
        tree.add(output.token_ids, output.end)
        self.num_nodes += tree.num_nodes - num_before
        output.end += 1
        if output.end == len(output.token_ids):
            self._outputs.append(self._pending.popleft())
            self.num_pending_tokens -= len(output.token_ids)
            self.num_tokens += len(output.token_ids)

    def _evict_token(self) -> None:
        output = self._outputs[0]
        tree = self._trees[output.tenant]
        num_before = tree.num_nodes
        tree.remove(output.token_ids, output.first)
        self.num_nodes -= num_before - tree.num_nodes
        output.first += 1
        if output.first == len(output.token_ids):
            self._outputs.popleft()
            self.num_tokens -= len(output.token_ids)
        if not tree.num_nodes:
            del self._trees[output.tenant]


def _num_matched(tree: SuffixTree, context: Tokens) -> int:
    """Return the length of the longest suffix of `context` in the tree; it has all shorter ones."""
    longest = min(len(context), tree.max_depth - 1)
    if tree.find(context[len(context) - longest :]) is not None:  # as often in a copied text
        return longest
    lengths = range(1, longest + 1)
    return bisect_left(lengths, True, key=lambda length: tree.find(context[-length:]) is None)


@lru_cache(maxsize=4096)
def _lengths(
    max_depth: int, max_factor: float, max_tokens: int, num_matched: int
) -> tuple[tuple[int, int], ...]:
    """Return (match length, number of draft tokens), the most draft tokens first.

    For each number only the longest match is tried: shorter ones were never better
    (docs/benchmarks/README.md), and trying them too took most of the time.
    """
    longest = {
        _num_drafted(max_depth, max_factor, max_tokens, length): length
        for length in range(1, min(num_matched, max_depth - 1) + 1)
    }
    return tuple((longest[count], count) for count in sorted(longest, reverse=True) if count > 0)


def _num_drafted(max_depth: int, max_factor: float, max_tokens: int, length: int) -> int:
    """Return how many tokens to draft after a match of `length` tokens."""
    tolerance = 1e-6  # a factor such as 0.1 may be slightly less as a float
    return min(max_tokens, int(length * max_factor + tolerance), max_depth - length)
