"""Cache of finished outputs: one suffix tree a tenant, bounded over all tenants."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.speculation.proposers.suffix_tree import SuffixTree, Tokens

MAX_NODES = 2**20
"""Most nodes of all trees together; about as many tokens."""

MAX_CACHE_BYTES = 170 * MAX_NODES
"""Memory of MAX_NODES nodes; 160 bytes a node and 4 a token were measured."""


@dataclass
class _Output:
    """An output; its tenant's tree has the suffixes from `first` to before `end`."""

    tenant: str
    token_ids: Tokens
    first: int = 0
    end: int = 0


class OutputCache:
    """The latest outputs. A tenant's tree holds outputs of that tenant only.

    The bounds hold over all tenants, and the oldest output is evicted first, whichever tenant it
    belongs to. `maintain` inserts and evicts a bounded number of tokens, since a long output at
    once would delay the running requests by several steps.
    """

    def __init__(self, max_depth: int, max_outputs: int, max_nodes: int = MAX_NODES) -> None:
        """Keep at most `max_outputs` outputs; none if that is 0."""
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._max_nodes = max_nodes
        self._pending: deque[_Output] = deque()
        self._outputs: deque[_Output] = deque()
        self._trees: dict[str, SuffixTree] = {}
        self._num_nodes = 0

    @property
    def num_outputs(self) -> int:
        """Outputs that are completely in a tree."""
        return len(self._outputs)

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees, which determine the memory."""
        return self._num_nodes

    def tree(self, tenant: str) -> SuffixTree | None:
        """Return the tree of a tenant's outputs; None while there are none."""
        return self._trees.get(tenant)

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Queue an output, which `maintain` inserts into its tenant's tree."""
        # A token takes two nodes at most. An output that would not fit must not evict others.
        if token_ids and self._max_outputs and 2 * len(token_ids) <= self._max_nodes:
            self._pending.append(_Output(tenant, array("i", token_ids)))

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
        assert self._num_nodes == sum(tree.num_nodes for tree in self._trees.values())
        held = (*self._outputs, *self._pending)
        assert set(self._trees) == {each.tenant for each in held if each.end > each.first}

    @property
    def _is_over_limit(self) -> bool:
        """Whether to evict; an output that is partly evicted is evicted completely."""
        is_beyond = self.num_outputs > self._max_outputs or self._num_nodes > self._max_nodes
        return is_beyond or bool(self._outputs and self._outputs[0].first)

    def _insert_token(self) -> None:
        output = self._pending[0]
        tree = self._trees.setdefault(output.tenant, SuffixTree(self._max_depth))
        num_before = tree.num_nodes
        tree.add(output.token_ids, output.end)
        self._num_nodes += tree.num_nodes - num_before
        output.end += 1
        if output.end == len(output.token_ids):
            self._outputs.append(self._pending.popleft())

    def _evict_token(self) -> None:
        output = self._outputs[0]
        tree = self._trees[output.tenant]
        num_before = tree.num_nodes
        tree.remove(output.token_ids, output.first)
        self._num_nodes -= num_before - tree.num_nodes
        output.first += 1
        if output.first == len(output.token_ids):
            self._outputs.popleft()
        if not tree.num_nodes:
            del self._trees[output.tenant]
