"""Layout of the drafts that are made on the device, in the words of a row."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DraftLayout(NamedTuple):
    """Words of a row's draft: the number of its tokens, the tokens, their parents and confidences.

    With lookups the last word is 1 for a draft of these, 0 for that of a head.

    max_tokens: of a draft; 0 where nothing drafts. has_parents: whether drafts may be trees, whose
    parents are written after the tokens; those of chains have no meaning.
    """

    max_tokens: int = 0
    has_parents: bool = False
    has_confidences: bool = False
    has_lookups: bool = False

    @property
    def width(self) -> int:
        """Words of a row; 0 where nothing drafts."""
        if not self.max_tokens:
            return 0
        of_tokens = self.max_tokens * (1 + self.has_parents + self.has_confidences)
        return 1 + of_tokens + self.has_lookups

    def tokens(self, drafts: Tensor) -> Tensor:
        """Return the numbers of tokens and the tokens, [num_rows, 1 + max_tokens].

        drafts: [num_rows, width] int64, as in the next two.
        """
        return drafts[:, : 1 + self.max_tokens]

    def parents(self, drafts: Tensor) -> Tensor:
        """Return the parents of the tokens, [num_rows, max_tokens]."""
        assert self.has_parents, "a layout of chains"
        return drafts[:, 1 + self.max_tokens : 1 + 2 * self.max_tokens]

    def confidences(self, drafts: Tensor) -> Tensor:
        """Return the confidences of the tokens, [num_rows, max_tokens]; none without them."""
        start = 1 + self.max_tokens * (1 + self.has_parents)
        return drafts[:, start : start + self.max_tokens * self.has_confidences]

    def lookups(self, drafts: Tensor) -> Tensor:
        """Return whether each draft is of a lookup, [num_rows, 1]; [num_rows, 0] without any."""
        return drafts[:, self.width - self.has_lookups :]


NO_DRAFTS = DraftLayout()
"""Layout where nothing drafts."""
