"""Earlier outputs, kept for requests to come: a suffix tree for each tenant, bounded over all."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Many

from specdec.proposers.suffix_tree import SuffixTree, Tokens

MAX_NODES = 2**20
"""Of all trees together; about as many tokens."""

MAX_CACHE_BYTES = 170 * MAX_NODES
"""What they take then: 160 bytes a node and 4 a token were measured."""


class OutputCache:
    """The latest outputs. Nothing in a tenant's tree comes from another tenant.

    The bounds hold over all tenants, and the oldest output goes first, whosever it is.
    """

    def __init__(self, max_depth: int, max_outputs: int, max_nodes: int = MAX_NODES) -> None:
        """Keeps `max_outputs` outputs at most, or none if that is 0."""
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._max_nodes = max_nodes
        self._outputs: deque[tuple[str, Tokens]] = deque()
        self._trees: dict[str, SuffixTree] = {}
        self._num_nodes = 0

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    @property
    def num_nodes(self) -> int:
        """Of all trees; what memory goes by."""
        return self._num_nodes

    def tree(self, tenant: str) -> SuffixTree | None:
        """The tree of a tenant's outputs; None while there are none."""
        return self._trees.get(tenant)

    def add(self, tenant: str, token_ids: Many[int]) -> None:
        """Keeps an output, and drops the oldest ones to make room."""
        # At most two nodes a token: what could not stay is not taken in, nor anything lost for it.
        if not token_ids or not self._max_outputs or 2 * len(token_ids) > self._max_nodes:
            return
        output = array("i", token_ids)
        tree = self._trees.setdefault(tenant, SuffixTree(self._max_depth))
        num_before = tree.num_nodes
        for start in range(len(output)):
            tree.add(output, start)
        self._num_nodes += tree.num_nodes - num_before
        self._outputs.append((tenant, output))
        while len(self._outputs) > self._max_outputs or self._num_nodes > self._max_nodes:
            self._drop_oldest()

    def check_integrity(self) -> None:
        """Asserts that all trees are whole, counted, and of somebody who has an output."""
        for tree in self._trees.values():
            tree.check_integrity()
        assert self._num_nodes == sum(tree.num_nodes for tree in self._trees.values())
        assert set(self._trees) == {tenant for tenant, _ in self._outputs}

    def _drop_oldest(self) -> None:
        tenant, output = self._outputs.popleft()
        tree = self._trees[tenant]
        num_before = tree.num_nodes
        for start in range(len(output)):
            tree.remove(output, start)
        self._num_nodes -= num_before - tree.num_nodes
        if not tree.num_nodes:
            del self._trees[tenant]
