"""Hydra heads: x <- R x + SiLU(W x) of the hidden state and the drafted tokens' embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.heads.formats.hydra import HydraShape
from specdec.models.heads.networks.adapted import RowHead, RowState
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.target import TargetRank
from specdec.models.layers.linear import VocabHead
from specdec.models.weights.checkpoint import CheckpointReader


class ResidualLayer(nn.Module):
    """One layer of a head; the first one projects its residual, too."""

    def __init__(
        self, shape: HydraShape, reader: CheckpointReader, head: int, layer: int, target: TargetRank
    ) -> None:
        super().__init__()
        prefix = f"blocks.{head}.{layer}"
        size = (shape.hidden_size, shape.input_size(head, layer))
        self.linear = SharedInputLinear(
            reader, f"{prefix}.linear", size, target.group, has_bias=True
        )
        self.residual: nn.Module = nn.Identity()
        if layer == 0:
            self.residual = SharedInputLinear(
                reader, f"{prefix}.res_connection", size, target.group, has_bias=True
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, hidden_size]; x: [B, input_size]."""
        output: Tensor = self.residual(x) + F.silu(self.linear(x))
        return output


class BiasedHead(nn.Module):
    """This rank's part of an output head with a bias."""

    def __init__(
        self, shape: HydraShape, reader: CheckpointReader, head: int, target: TargetRank
    ) -> None:
        super().__init__()
        name, own = f"lm_heads.{head}", target.vocab_slice
        size = (shape.draft_vocab_size, shape.hidden_size)
        self.head = VocabHead(reader, f"{name}.weight", size, own)
        self.bias: Tensor | None = None
        if shape.has_head_bias:
            self.bias = reader.read(f"{name}.bias", size[:1], rows=own)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, V_local]; x: [B, hidden_size]."""
        logits: Tensor = self.head(x)
        return logits if self.bias is None else logits + self.bias


class HydraHeads(RowHead):
    """One rank of Hydra heads.

    Its state is [B, (i + 2) * hidden_size] of head i: feature, then embeddings in order.
    """

    def __init__(self, shape: HydraShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__(shape, target)
        self.embed_tokens = target.embed_tokens
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    ResidualLayer(shape, reader, head, layer, target)
                    for layer in range(shape.num_layers)
                )
            )
            for head in range(shape.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            BiasedHead(shape, reader, head, target) for head in range(shape.num_heads)
        )

    def _next(self, state: RowState, token_ids: Tensor, index: int) -> RowState:
        inputs, embedded = state.values, self.embed_tokens(token_ids)
        return state._replace(values=torch.cat([inputs, embedded.to(inputs.dtype)], dim=1))
