"""Layout of the drafts that a head makes on the device, in the words of a row."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DraftLayout(NamedTuple):
    """Words of a row's draft: the number of its tokens, the tokens, their parents and confidences.

    max_tokens: of a draft; 0 where no head drafts. has_parents: whether drafts may be trees, whose
    parents are written after the tokens; those of chains have no meaning.
    """

    max_tokens: int = 0
    has_parents: bool = False
    has_confidences: bool = False

    @property
    def width(self) -> int:
        """Words of a row; 0 without a head."""
        if not self.max_tokens:
            return 0
        return 1 + self.max_tokens * (1 + self.has_parents + self.has_confidences)

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
        return drafts[:, 1 + self.max_tokens * (1 + self.has_parents) :]


NO_DRAFTS = DraftLayout()
"""Layout where no head drafts."""
