"""A text that grows, with the tree of its suffixes."""

from __future__ import annotations

from array import array

from specdec.proposers.suffix_tree import SuffixTree, Tokens

BYTES_PER_TOKEN = 300
"""Of a text with its tree; 200 to 280 were measured."""


class GrowingText:
    """A text and its suffix tree, which is kept up as tokens are appended.

    A suffix enters the tree once it differs from every earlier one, or has the tree's full depth;
    until then it is an earlier piece that comes again, and `num_matched` is the length of the
    longest such one: how many of the last tokens have occurred before (as in Ukkonen 1995). Each
    token costs O(max_depth), and mostly far less.
    """

    def __init__(self, max_depth: int) -> None:
        self.tree = SuffixTree(max_depth)
        self.token_ids: Tokens = array("i")
        self._num_added = 0

    @property
    def num_matched(self) -> int:
        """How many of the last tokens, less than max_depth, have occurred in the same order."""
        return len(self.token_ids) - self._num_added

    def append(self, token: int) -> None:
        """Adds the text's next token."""
        text, tree = self.token_ids, self.tree
        text.append(token)
        while self._num_added < len(text) and (
            self.num_matched >= tree.max_depth or tree.find(text[self._num_added :]) is None
        ):
            tree.add(text, self._num_added)
            self._num_added += 1
