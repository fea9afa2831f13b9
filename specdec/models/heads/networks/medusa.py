"""Medusa heads: x <- x + SiLU(W x + b) for each layer, then an output head (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch
from specdec.models.heads.formats.medusa import MedusaShape
from specdec.models.heads.networks.adapted import AdaptedNetwork, RowState
from specdec.models.heads.networks.base import DeviceDrafts, HeadCapabilities
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.target import TargetRank
from specdec.models.heads.networks.vocabulary import checked_ids
from specdec.models.heads.tensors import HeadTensors
from specdec.models.layers.linear import VocabHead
from specdec.models.weights.checkpoint import CheckpointReader


class ResidualBlock(nn.Module):
    """The residual layers of one head."""

    def __init__(
        self, shape: MedusaShape, reader: CheckpointReader, prefix: str, target: TargetRank
    ) -> None:
        super().__init__()
        size = (shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            SharedInputLinear(
                reader, f"{prefix}.{layer}", size, target.group, has_bias=shape.has_bias
            )
            for layer in range(shape.num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, hidden_size]; x: [B, hidden_size]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(AdaptedNetwork):
    """One rank of Medusa heads, a DraftHead without KV."""

    num_kv_layers = 0
    reads_drafts = False
    capabilities = HeadCapabilities(on_device=DeviceDrafts.STATES)

    def __init__(self, shape: MedusaShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        self.taps, self.feature_size = shape.taps, shape.feature_size
        self.max_draft_tokens: int | None = shape.max_draft_tokens
        self.vocab_size = shape.draft_vocab_size
        self.vocab_slice = target.group.share_of(shape.draft_vocab_size)
        self.target_ids = _read_target_ids(shape, reader, target)
        self.device, self.dtype = target.device, target.dtype
        self.blocks = nn.ModuleList(
            ResidualBlock(shape, reader, f"blocks.{head}", target)
            for head in range(shape.num_heads)
        )
        vocab_shape = (shape.draft_vocab_size, shape.hidden_size)
        lm_heads = [
            VocabHead(reader, name, vocab_shape, self.vocab_slice) for name in shape.lm_head_names
        ]
        own = lm_heads or [target.lm_head]
        self.lm_heads = nn.ModuleList(own if len(own) > 1 else own * shape.num_heads)

    @property
    def has_plain_logits(self) -> bool:
        """Return whether logits are the output heads' products, neither scaled nor bounded."""
        return all(
            isinstance(each, VocabHead) and each.transform.is_identity for each in self.lm_heads
        )

    def new_kv_cache(self, num_slots: int) -> None:
        """See DraftHead."""

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        del runs
        return states.to(self.dtype)

    @torch.inference_mode()
    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> RowState:
        """Return the features, [B, hidden_size]: each head reads them on demand."""
        return RowState.of(features.to(self.dtype), pairs)

    def begin_on_device(self, features: Tensor, token_ids: Tensor) -> RowState:
        """See DeviceStateHead."""
        return RowState(features.to(self.dtype))

    @torch.inference_mode()
    def logits(self, state: RowState, index: int) -> Tensor:
        """See DraftHead."""
        with self.running(state.runs):
            hidden = self.blocks[index](state.values)
        logits: Tensor = self.lm_heads[index](hidden)
        return logits

    def advance(self, state: RowState, token_ids: Sequence[int], index: int) -> RowState:
        """Return the same state: no head reads the drafts before it."""
        return state

    def advance_on_device(self, state: RowState, token_ids: Tensor, index: int) -> RowState:
        """See DeviceStateHead."""
        return state

    def select(self, state: RowState, rows: Sequence[int]) -> RowState:
        """See DraftHead."""
        return state.select(rows)


def _read_target_ids(
    shape: MedusaShape, reader: CheckpointReader, target: TargetRank
) -> Tensor | None:
    """Return the target's id of each draft token, [draft_vocab_size]; None if they are equal.

    Output heads with a row for each token of the target are then read with the rows of these.
    """
    if not shape.has_token_map:
        return None
    tensors = reader.tensors
    assert isinstance(tensors, HeadTensors)
    ids = checked_ids(tensors.slice("token_map"), target.config.vocab_size)
    if shape.stored_vocab_size != shape.draft_vocab_size:
        reader.tensors = tensors.with_rows(shape.lm_head_names, ids)
    return ids.to(target.device)
