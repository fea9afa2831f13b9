"""Network of bigram heads: the scores after the last token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import ForwardBatch, on_device
from specdec.models.heads.networks.base import DeviceDrafts, HeadCapabilities
from specdec.models.heads.networks.target import TargetRank
from specdec.models.weights.checkpoint import CheckpointReader
from tests.specdec.bigram.layout import BigramShape


class BigramHead(nn.Module):
    """One rank of a table, a DeviceStateHead; its state is the last tokens, [B] int64."""

    num_kv_layers = 0
    reads_drafts = True
    capabilities = HeadCapabilities(on_device=DeviceDrafts.STATES)
    target_ids: Tensor | None = None

    def __init__(self, shape: BigramShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        self.taps, self.feature_size = shape.taps, shape.feature_size
        self.max_draft_tokens: int | None = shape.max_draft_tokens
        self.vocab_size, self.vocab_slice = shape.draft_vocab_size, target.vocab_slice
        self.device = target.device
        size = (self.vocab_size, self.vocab_size)
        self.scores = reader.read("scores.weight", size, rows=self.vocab_slice)

    def new_kv_cache(self, num_slots: int) -> None:
        """See DraftHead."""

    def features(self, states: Tensor) -> Tensor:
        """See DraftHead."""
        return states

    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> Tensor:
        """See DraftHead."""
        return on_device(pairs.input_ids, self.device)

    def begin_on_device(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """See DeviceStateHead."""
        return token_ids

    def logits(self, state: Tensor, index: int) -> Tensor:
        """See DraftHead."""
        return self.scores[:, state].T.contiguous()

    def advance(self, state: Tensor, token_ids: Sequence[int], index: int) -> Tensor:
        """See DraftHead."""
        return state.new_tensor(token_ids)

    def advance_on_device(self, state: Tensor, token_ids: Tensor, index: int) -> Tensor:
        """See DeviceStateHead."""
        return token_ids

    def select(self, state: Tensor, rows: Sequence[int]) -> Tensor:
        """See DraftHead."""
        return state[list(rows)]
