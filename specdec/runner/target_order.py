"""A draft model's logits in the order of the target's vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.parallel import TensorParallelGroup, partition
from specdec.vocabulary import VocabularyMap


class TargetOrder:
    """Arranges logits so that column t is the target's token t, whose noise they are drawn with.

    Noise is laid out by the target's ids (`specdec.sampling`), so the logits have to be too. Each
    rank of the draft gets all its ranks' logits and keeps a share of the target's order. A draft
    token then costs a row of logits, sent to each rank: dear for a target, but not beside the
    forward pass of a draft, which has few ranks and few rows.
    """

    def __init__(
        self, vocabulary: VocabularyMap, group: TensorParallelGroup, device: torch.device
    ) -> None:
        self.size = len(vocabulary.target_to_draft)
        to_draft = torch.tensor(vocabulary.target_to_draft, dtype=torch.int64, device=device)
        self.draft_ids = to_draft.clamp(min=0)  # [size]; logits without a number draw any token
        self._group = group
        self._shares = partition(len(vocabulary.draft_to_target), group.size)
        share = group.share_of(self.size)
        self.first_token = share.start
        # Of the tokens of the target that this rank keeps:
        self._columns = self.draft_ids[share.start : share.stop]
        self._is_missing = to_draft[share.start : share.stop] < 0

    def arrange(self, logits: Tensor) -> Tensor:
        """logits: [R, tokens of the draft that this rank holds]; a collective call.

        Returns [R, tokens of the target that this rank keeps]; -inf where the draft has none.
        """
        return self._gather(logits)[:, self._columns].masked_fill(self._is_missing, -torch.inf)

    def _gather(self, logits: Tensor) -> Tensor:
        """[R, draft vocab_size]."""
        if self._group.size == 1:
            return logits
        widest = max(map(len, self._shares))
        padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        ranks = zip(self._group.all_gather(padded), self._shares, strict=True)
        return torch.cat([part[:, : len(share)] for part, share in ranks], dim=1)
