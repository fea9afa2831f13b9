"""MLP speculators: a state that each token is mixed into (Wertheimer et al. 2024).

state <- GELU(LN(W state + c e(token))), from the target's hidden state; c keeps the variance.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.heads.formats.mlp_speculator import MlpSpeculatorShape
from specdec.models.heads.networks.adapted import RowHead, RowState
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.target import TargetRank
from specdec.models.layers.linear import VocabEmbedding, VocabHead
from specdec.models.weights.checkpoint import CheckpointReader

_EPS = 1e-6


class MlpSpeculator(RowHead):
    """One rank of an MLP speculator; its state is [B, inner_size]."""

    def __init__(
        self, shape: MlpSpeculatorShape, reader: CheckpointReader, target: TargetRank
    ) -> None:
        super().__init__(shape, target)
        self.scales_input = shape.scales_input
        state_weight = 0.5 ** (0.5 / shape.num_heads)
        self.token_scale = math.sqrt((1 - state_weight**2) * shape.inner_size / 2) / state_weight
        heads = range(shape.num_stored_heads)
        self.embeddings = nn.ModuleList(_embedding(shape, reader, i, target) for i in heads)
        self.projections = nn.ModuleList(
            SharedInputLinear(reader, f"proj.{i}", shape.projection(i), target.group)
            for i in range(shape.num_projections)
        )
        self.norms = nn.ModuleList(StateNorm(shape, reader, f"ln.{i}") for i in heads)
        vocab_shape = (shape.draft_vocab_size, shape.inner_size)
        self.lm_heads = nn.ModuleList(
            VocabHead(reader, f"head.{i}.weight", vocab_shape, self.vocab_slice) for i in heads
        )

    @torch.inference_mode()
    def logits(self, state: RowState, index: int) -> Tensor:
        """See DraftHead."""
        logits: Tensor = _item(self.lm_heads, index)(state.values)
        return logits

    def _next(self, state: RowState, token_ids: Tensor, index: int) -> RowState:
        values = state.values
        if index == 0 and self.scales_input:
            values = _scaled(values) / math.sqrt(2)
        with self.running(state.runs):
            projected = _item(self.projections, index)(values)
        embedded = _item(self.embeddings, index)(token_ids)
        # In 16 bits the rounding of torch.add with alpha depends on an element's place on CPUs.
        mixed = torch.add(projected.float(), embedded.float(), alpha=self.token_scale)
        return state._replace(values=F.gelu(_item(self.norms, index)(mixed.to(projected.dtype))))


class StateNorm(nn.Module):
    """Division by the root mean square, then a scale and a shift."""

    def __init__(self, shape: MlpSpeculatorShape, reader: CheckpointReader, name: str) -> None:
        super().__init__()
        self.weight = reader.read(f"{name}.weight", (shape.inner_size,))
        self.bias = reader.read(f"{name}.bias", (shape.inner_size,))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, inner_size]; x: [B, inner_size]."""
        return _scaled(x) * self.weight + self.bias


def _scaled(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt()).to(x.dtype)


def _embedding(
    shape: MlpSpeculatorShape, reader: CheckpointReader, index: int, target: TargetRank
) -> VocabEmbedding:
    name = f"emb.{index}.weight"
    full = (shape.draft_vocab_size, shape.inner_size)
    table = reader.read(name, full, rows=target.vocab_slice).clone()
    return VocabEmbedding(table, target.vocab_slice, target.group, reader.dtype)


def _item(modules: nn.ModuleList, index: int) -> nn.Module:
    """Return module `index`, or the last one: tied heads share it."""
    return modules[min(index, len(modules) - 1)]
