"""Earlier outputs, kept for requests to come: a suffix tree for each tenant, bounded over all."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.speculation.proposers.suffix_tree import SuffixTree, Tokens

MAX_NODES = 2**20
"""Of all trees together; about as many tokens."""

MAX_CACHE_BYTES = 170 * MAX_NODES
"""What they take then: 160 bytes a node and 4 a token were measured."""


@dataclass
class _Output:
    """The tree has its suffixes from `first` to before `end`."""

    tenant: str
    token_ids: Tokens
    first: int = 0
    end: int = 0


class OutputCache:
    """The latest outputs. Nothing in a tenant's tree comes from another tenant.

    The bounds hold over all tenants, and the oldest output goes first, whosever it is. What is
    added and dropped goes in and out a part at a time, as `tend` is called: a long output would
    hold up the service for as long as some steps take.
    """

    def __init__(self, max_depth: int, max_outputs: int, max_nodes: int = MAX_NODES) -> None:
        """Keeps `max_outputs` outputs at most, or none if that is 0."""
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._max_nodes = max_nodes
        self._coming: deque[_Output] = deque()
        self._outputs: deque[_Output] = deque()
        self._trees: dict[str, SuffixTree] = {}
        self._num_nodes = 0

    @property
    def num_outputs(self) -> int:
        """Those that are in a tree as a whole."""
        return len(self._outputs)

    @property
    def num_nodes(self) -> int:
        """Of all trees; what memory goes by."""
        return self._num_nodes

    def tree(self, tenant: str) -> SuffixTree | None:
        """The tree of a tenant's outputs; None while there are none."""
        return self._trees.get(tenant)

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Takes an output, to be kept; `tend` puts it into its tenant's tree."""
        # At most two nodes a token: what could not stay is not taken in, nor anything lost for it.
        if token_ids and self._max_outputs and 2 * len(token_ids) <= self._max_nodes:
            self._coming.append(_Output(tenant, array("i", token_ids)))

    def tend(self, max_tokens: int) -> None:
        """Puts so many tokens at most of what has come into trees, or takes old ones out first."""
        for _ in range(max_tokens):
            if self._has_too_much:
                self._drop_token()
            elif self._coming:
                self._take_in_token()
            else:
                return

    def check_integrity(self) -> None:
        """Asserts that all trees are whole, counted, and of somebody who has an output."""
        for tree in self._trees.values():
            tree.check_integrity()
        assert self._num_nodes == sum(tree.num_nodes for tree in self._trees.values())
        held = (*self._outputs, *self._coming)
        assert set(self._trees) == {each.tenant for each in held if each.end > each.first}

    @property
    def _has_too_much(self) -> bool:
        """So that something must go; an output of which a part has gone goes as a whole."""
        is_beyond = self.num_outputs > self._max_outputs or self._num_nodes > self._max_nodes
        return is_beyond or bool(self._outputs and self._outputs[0].first)

    def _take_in_token(self) -> None:
        output = self._coming[0]
        tree = self._trees.setdefault(output.tenant, SuffixTree(self._max_depth))
        num_before = tree.num_nodes
        tree.add(output.token_ids, output.end)
        self._num_nodes += tree.num_nodes - num_before
        output.end += 1
        if output.end == len(output.token_ids):
            self._outputs.append(self._coming.popleft())

    def _drop_token(self) -> None:
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
