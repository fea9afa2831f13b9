"""Mapping of a draft model's logits and tokens to the target's vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.row_ops import RowOps
from specdec.sampling.vocab_shard import VocabShard
from specdec.text.vocab_map import VocabularyMap
from specdec.types.sharding import partition


class VocabRemap:
    """Permutation of draft logits into the target's order: column t is the target's token t.

    Coupled sampling uses the noise of the target's token ids (`specdec.sampling`), so the logits
    must be in that order. Each rank of the draft gathers the logits of all ranks and keeps its
    shard of the target's vocabulary. A draft token costs an all-gather of a row of logits, which is
    small beside the forward pass of a draft model with few ranks and few rows.
    """

    def __init__(
        self,
        vocabulary: VocabularyMap,
        group: TensorParallelGroup,
        device: torch.device,
        ops: RowOps,
    ) -> None:
        """ops: as in VocabShard."""
        size = len(vocabulary.target_to_draft)
        to_draft = torch.tensor(vocabulary.target_to_draft, dtype=torch.int64, device=device)
        self.draft_ids = to_draft.clamp(min=0)  # [size]; a row of NaN samples an arbitrary token
        self._shares = partition(len(vocabulary.draft_to_target), group.size)
        share = group.share_of(size)
        self.shard = VocabShard(group, share.start, size, ops)
        # Of the target's tokens in this rank's shard:
        self._columns = self.draft_ids[share.start : share.stop]
        self._is_missing = to_draft[share.start : share.stop] < 0

    def apply(self, logits: Tensor) -> Tensor:
        """Permute logits [R, draft tokens of this rank]; a collective call.

        Returns [R, target tokens of this rank]; -inf for tokens that the draft lacks.
        """
        return self._gather(logits)[:, self._columns].masked_fill(self._is_missing, -torch.inf)

    def _gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks, [R, draft vocab_size]."""
        if self.shard.group.size == 1:
            return logits
        widest = max(map(len, self._shares))
        padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        ranks = zip(self.shard.group.all_gather(padded), self._shares, strict=True)
        return torch.cat([part[:, : len(share)] for part, share in ranks], dim=1)


class SharedTokenMask:
    """Mask of the draft tokens that the target has too, for vocabularies with equal ids.

    A sampled token that the target lacks would have to be dropped, and dropping a token because of
    its value would bias rejection sampling (`specdec.sampling.verifiers.rejection`).
    """

    def __init__(self, vocabulary: VocabularyMap, tokens: range, device: torch.device) -> None:
        """Build the mask of `tokens`, the draft tokens whose logits this rank computes."""
        self._to_target = vocabulary.draft_to_target
        is_missing = self._to_target[tokens.start : tokens.stop] < 0
        self._is_missing = torch.from_numpy(is_missing).to(device)

    def apply(self, logits: Tensor) -> Tensor:
        """Set logits [R, len(tokens)] of tokens that the target lacks to -inf, in place."""
        return logits.masked_fill_(self._is_missing, -torch.inf)

    def target_ids(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the target's ids of draft tokens; an arbitrary id for tokens it lacks."""
        return np.maximum(self._to_target[token_ids], 0)
