"""Suffix tree of bounded depth: counts each short piece of some texts, and its continuations.

Each position of a text begins a suffix, cut to `max_depth` tokens. A path from the root spells a
piece, and its count is the number of suffixes that begin with the piece. Paths without branches are
one node, whose label is a slice of a text, so there are at most two nodes for each position (Weiner
1973; with counts: Oliaro et al. 2024, SuffixDecoding, section 4).

Nodes are rows of flat arrays: a million objects would take several times the memory, and the
garbage collector would stall the service to traverse them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from specdec.types.drafts.draft_tree import BASE

BYTES_PER_TOKEN = 300
"""Memory of a token with its share of the tree; 200 to 280 bytes were measured."""


class OnlineSuffixTree:
    """Text and its suffix tree, which is extended with every appended token.

    A suffix enters the tree once it differs from every earlier one, or has the tree's full depth.
    Until then it repeats an earlier piece; `num_matched` is the length of the longest such suffix,
    the active point of Ukkonen 1995. Each token costs O(max_depth), and mostly far less.
    """

    def __init__(self, max_depth: int) -> None:
        self.tree = SuffixTree(max_depth)
        self.token_ids: Tokens = array("i")
        self._num_added = 0

    @property
    def num_matched(self) -> int:
        """Number of the last tokens, below max_depth, that have occurred before in this order."""
        return len(self.token_ids) - self._num_added

    def append(self, token: int) -> None:
        """Append the text's next token."""
        text, tree = self.token_ids, self.tree
        text.append(token)
        while self._num_added < len(text) and (
            self.num_matched >= tree.max_depth or tree.find(text[self._num_added :]) is None
        ):
            tree.add(text, self._num_added)
            self._num_added += 1


Tokens: TypeAlias = "array[int]"
"""Token ids as int32; slices of them compare fast."""

_ROOT = 0
_UNKNOWN = -1
_NOTHING: Tokens = array("i")


class Place(NamedTuple):
    """End of a path: after the first `offset` tokens of a node's label."""

    node: int
    offset: int


class Continuation(NamedTuple):
    """Most frequent continuation of a place, token by token.

    score: the sum over its tokens of the share of suffixes that continue to there, which is the
        expected number of correct tokens.
    """

    token_ids: Tokens
    score: float


class Branches(NamedTuple):
    """Most probable continuations of a place, as a tree of drafts.

    score: the sum over the nodes of the share of suffixes that continue to there, which is the
        expected number of correct tokens of a path.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    score: float


NO_CONTINUATION = Continuation(_NOTHING, 0.0)


class SuffixTree:
    """Counts of the suffixes that were added and not removed, each cut to `max_depth` tokens.

    A text that was passed to `add` may grow afterwards, but never change.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._counts = array("i", [0])
        self._texts: list[Tokens] = [_NOTHING]  # the label is texts[starts:ends], of any text
        self._starts = array("i", [0])
        self._ends = array("i", [0])
        self._children: list[dict[int, int] | None] = [None]  # by the first token of their labels
        self._best = array("i", [_UNKNOWN])  # the child with most suffixes, the latest of several
        self._unused: list[int] = []

    @property
    def num_nodes(self) -> int:
        """Nodes in use, the root aside."""
        return len(self._counts) - len(self._unused) - 1

    def add(self, text: Tokens, start: int) -> None:
        """Count the suffix that begins at `start`; it grows with the text up to the full depth.

        As long as the text may grow, that suffix must differ from all others before the text ends,
        or have its full depth.
        """
        stop = start + self.max_depth
        self._counts[_ROOT] += 1
        node, at = _ROOT, start
        while at < min(stop, len(text)):
            child = self._child(node, text[at])
            if child is None:
                self._attach(node, text[at], self._new_node(text, at, stop, count=1))
                return
            common = self._num_common(child, text, at, stop)
            if common < self._label_length(child):
                child = self._split(node, child, common)
            # The label refers to the newest text, so that old ones can be freed.
            self._texts[child], self._starts[child], self._ends[child] = text, at, at + common
            self._counts[child] += 1
            self._prefer(node, child)
            node, at = child, at + common

    def remove(self, text: Tokens, start: int) -> None:
        """Undo `add`, once the text no longer grows."""
        path = list(self._path(text, start))
        for parent, node in pairwise([_ROOT, *path]):
            self._counts[node] -= 1
            if self._best[parent] == node:
                self._best[parent] = _UNKNOWN
        self._counts[_ROOT] -= 1
        num_left = sum(self._counts[node] > 0 for node in path)
        if num_left < len(path):
            self._detach(path[num_left - 1] if num_left else _ROOT, path[num_left])
            for node in path[num_left:]:
                self._discard(node)
        if num_left:
            self._merge_only_child(path[num_left - 1])

    def find(self, tokens: Tokens) -> Place | None:
        """Return the end of the path that spells `tokens`, if there is one."""
        node, at, length = _ROOT, 0, 0
        while at < len(tokens):
            child = self._child(node, tokens[at])
            if child is None:
                return None
            start = self._starts[child]
            end = min(self._ends[child], start + len(tokens) - at)
            label = self._texts[child][start:end]
            length = len(label)
            if label != tokens[at : at + length]:
                return None
            node, at = child, at + length
        return Place(node, length)

    def continuation(self, place: Place, max_tokens: int, min_prob: float) -> Continuation:
        """Follow the most frequent tokens while their path has at least `min_prob`."""
        node, offset = place
        token_ids, score, prob = array("i"), 0.0, 1.0
        while True:
            start = self._starts[node] + offset
            end = min(self._ends[node], start + max_tokens - len(token_ids))
            label = self._texts[node][start:end]
            token_ids += label
            score += prob * len(label)
            child = self._best_child(node) if len(token_ids) < max_tokens else None
            if child is None:
                return Continuation(token_ids, score)
            prob *= self._counts[child] / self._counts[node]
            if prob < min_prob:
                return Continuation(token_ids, score)
            node, offset = child, 0

    def branches(self, place: Place, max_nodes: int, max_depth: int, min_prob: float) -> Branches:
        """Return the tokens with the most probable paths, best first, of at least `min_prob`."""
        token_ids: list[int] = []
        parents: list[int] = []
        score, num_pushed = 0.0, 0
        # (-probability, age, place before the token, parent, depth); of equal ones the oldest.
        heap: list[tuple[float, int, Place, int, int]] = []

        def push(prob: float, at: Place, parent: int, depth: int) -> None:
            nonlocal num_pushed
            if depth <= max_depth:
                for child, share in self._next_places(at):
                    if prob * share >= min_prob:
                        heappush(heap, (-prob * share, num_pushed, child, parent, depth))
                        num_pushed += 1

        push(1.0, place, BASE, 1)
        while heap and len(token_ids) < max_nodes:
            negative, _, at, parent, depth = heappop(heap)
            token_ids.append(self._texts[at.node][self._starts[at.node] + at.offset - 1])
            parents.append(parent)
            score -= negative
            push(-negative, at, len(token_ids) - 1, depth + 1)
        return Branches(tuple(token_ids), tuple(parents), score)

    def _next_places(self, place: Place) -> list[tuple[Place, float]]:
        """Return the places one token further with their shares, the most frequent first."""
        node, offset = place
        if offset < self._label_length(node):
            return [(Place(node, offset + 1), 1.0)]
        best, total = self._best_child(node), self._counts[node]
        children = (self._children[node] or {}).values()
        ordered = sorted(children, key=lambda each: (-self._counts[each], each != best))
        return [(Place(child, 1), self._counts[child] / total) for child in ordered]

    def check_integrity(self) -> None:
        """Assert that counts add up, and that no node is lost, empty or redundant."""
        num_seen, nodes = 0, [_ROOT]
        while nodes:
            node = nodes.pop()
            children = self._children[node] or {}
            counts = [self._counts[child] for child in children.values()]
            assert sum(counts) <= self._counts[node], "more suffixes below than above"
            assert all(count > 0 for count in counts), "a node without a suffix"
            is_only = counts == [self._counts[node]]
            assert node == _ROOT or not is_only, "a node that should be merged with its child"
            assert self._best[node] in (_UNKNOWN, *children.values()), "best child is not a child"
            if self._best[node] != _UNKNOWN:
                assert self._counts[self._best[node]] == max(counts), "not the best child"
            num_seen += len(children)
            nodes += children.values()
        assert num_seen == self.num_nodes, "nodes lost"

    def _child(self, node: int, token: int) -> int | None:
        children = self._children[node]
        return None if children is None else children.get(token)

    def _best_child(self, node: int) -> int | None:
        children = self._children[node]
        if not children:
            return None
        if self._best[node] == _UNKNOWN:
            self._best[node] = max(children.values(), key=self._counts.__getitem__)
        return self._best[node]

    def _prefer(self, node: int, child: int) -> None:
        """Update the best child after a child has become more frequent."""
        best = self._best[node]
        if best != _UNKNOWN and self._counts[child] >= self._counts[best]:
            self._best[node] = child

    def _label_length(self, node: int) -> int:
        return min(self._ends[node], len(self._texts[node])) - self._starts[node]

    def _num_common(self, node: int, text: Tokens, at: int, stop: int) -> int:
        """Return the length of the common prefix of a node's label and text[at:stop]."""
        start = self._starts[node]
        mine = text[at:stop]
        label = self._texts[node][start : min(self._ends[node], start + len(mine))]
        if label == mine[: len(label)]:
            return len(label)
        pairs = enumerate(zip(label, mine, strict=False))
        return next(index for index, (left, right) in pairs if left != right)

    def _path(self, text: Tokens, start: int) -> Iterator[int]:
        """Yield the nodes of a suffix that was added."""
        node, at, stop = _ROOT, start, min(start + self.max_depth, len(text))
        while at < stop:
            child = self._child(node, text[at])
            assert child is not None, "a suffix that was not added"
            yield child
            node, at = child, at + self._label_length(child)

    def _new_node(self, text: Tokens, start: int, end: int, count: int) -> int:
        if not self._unused:
            self._grow()
        node = self._unused.pop()
        self._texts[node], self._starts[node], self._ends[node] = text, start, end
        self._counts[node] = count
        return node

    def _grow(self) -> None:
        """Extend the arrays by half of their size."""
        size = len(self._counts)
        count = size // 2 + 8
        for column in (self._counts, self._starts, self._ends):
            column.extend([0] * count)
        self._best.extend([_UNKNOWN] * count)
        self._texts.extend([_NOTHING] * count)
        self._children.extend([None] * count)
        self._unused.extend(reversed(range(size, size + count)))

    def _discard(self, node: int) -> None:
        self._texts[node], self._children[node] = _NOTHING, None
        self._counts[node], self._best[node] = 0, _UNKNOWN
        self._unused.append(node)

    def _attach(self, node: int, token: int, child: int) -> None:
        children = self._children[node]
        if children is None:
            self._children[node], self._best[node] = {token: child}, child
        else:
            children[token] = child
            self._prefer(node, child)

    def _detach(self, node: int, child: int) -> None:
        children = self._children[node]
        assert children is not None
        del children[self._texts[child][self._starts[child]]]
        if not children:
            self._children[node] = None

    def _split(self, parent: int, node: int, length: int) -> int:
        """Split the first tokens of a node's label off into a new parent node, and return that."""
        text, start = self._texts[node], self._starts[node]
        upper = self._new_node(text, start, start + length, self._counts[node])
        siblings = self._children[parent]
        assert siblings is not None
        siblings[text[start]] = upper
        if self._best[parent] == node:
            self._best[parent] = upper
        self._starts[node] = start + length
        self._children[upper], self._best[upper] = {text[start + length]: node}, node
        return upper

    def _merge_only_child(self, node: int) -> None:
        """Merge a node with its only child where all its suffixes continue there."""
        children = self._children[node] or {}
        if len(children) != 1:
            return
        [child] = children.values()
        if self._counts[child] != self._counts[node]:
            return
        # Wherever the child's label occurs below this node, this node's label stands before it.
        self._starts[node], length = self._starts[child], self._label_length(node)
        self._starts[node] -= length
        self._texts[node], self._ends[node] = self._texts[child], self._ends[child]
        self._children[node], self._best[node] = self._children[child], self._best[child]
        self._discard(child)
