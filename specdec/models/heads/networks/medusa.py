"""Medusa heads: x <- x + SiLU(W x + b) for each layer, then an output head (Cai et al. 2024)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.heads.formats.medusa import MedusaShape
from specdec.models.heads.networks.adapted import RowHead
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


class MedusaHeads(RowHead):
    """One rank of Medusa heads, whose state is the features, [B, hidden_size]."""

    reads_drafts = False

    def __init__(self, shape: MedusaShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__(shape, target)
        self.target_ids = _read_target_ids(shape, reader, target)
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
