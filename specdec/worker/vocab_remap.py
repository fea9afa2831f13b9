"""A draft model's logits and draft tokens in the terms of the target's vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.text.vocab_map import VocabularyMap
from specdec.types.sharding import partition


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


class SharedTokens:
    """Keeps a draft model to the tokens that the target has too, where texts have equal ids.

    A drawn token that the target lacks could only be dropped, and to drop it for what it is would
    change the distribution of what is accepted by its chances (`specdec.sampling.verifiers.rejection`).
    """

    def __init__(self, vocabulary: VocabularyMap, tokens: range, device: torch.device) -> None:
        """tokens: of the draft, those whose logits this rank computes."""
        self._to_target = vocabulary.draft_to_target
        is_missing = self._to_target[tokens.start : tokens.stop] < 0
        self._is_missing = torch.from_numpy(is_missing).to(device)

    def keep(self, logits: Tensor) -> Tensor:
        """logits: [R, len(tokens)], changed in place: -inf where the target has no such token."""
        return logits.masked_fill_(self._is_missing, -torch.inf)

    def target_ids(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The target's ids of the draft's; any id for one that could not be drawn."""
        return np.maximum(self._to_target[token_ids], 0)
