"""The Markov head of DSpark: a low-rank bias of the logits by the token before.

vanilla: W2 W1[x]. gated: W2 (sigmoid(G [h; W1[x]]) * W1[x]). rnn: W2 tanh(o), with a state s and
z = [s; W1[x]; h], g = sigmoid(W_g z), s <- g * s + (1 - g) * tanh(W_c z), o = W_o z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.models.heads.formats.dflash import DFlashShape
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.target import TargetRank
from specdec.models.layers.linear import VocabEmbedding, VocabHead
from specdec.models.weights.checkpoint import CheckpointReader


@dataclass(frozen=True)
class MarkovState:
    """latent: [B, rank], which W2 multiplies. memory: [B, rank], of the recurrent kind."""

    latent: Tensor
    memory: Tensor

    def select(self, rows: Sequence[int]) -> MarkovState:
        """Return the state of some sequences."""
        return MarkovState(self.latent[list(rows)], self.memory[list(rows)])


class MarkovHead(nn.Module):
    """One rank of a Markov head."""

    def __init__(self, shape: DFlashShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        self.kind, self.rank = shape.markov_kind, shape.markov_rank
        vocab, rank = target.config.vocab_size, shape.markov_rank
        name = "markov_head.markov_w1.weight"
        table = reader.read(name, (vocab, rank), rows=target.vocab_slice).clone()
        self.w1 = VocabEmbedding(table, target.vocab_slice, target.group, reader.dtype)
        own = target.group.share_of(shape.draft_vocab_size)
        shape_w2 = (shape.draft_vocab_size, rank)
        self.w2 = VocabHead(reader, "markov_head.markov_w2.weight", shape_w2, own)
        projection = shape.markov_projection()
        self.projection: SharedInputLinear | None = None
        if projection is not None:
            part = "gate_proj" if self.kind == "gated" else "joint_proj"
            self.projection = SharedInputLinear(
                reader,
                f"markov_head.{part}",
                projection,
                target.group,
                has_bias=shape.markov_has_bias,
            )

    def begin(self, token_ids: Tensor, outputs: Tensor) -> MarkovState:
        """Return the state for the first draft token; outputs: [B, hidden_size] of its slot.

        token_ids: [B] int64, of the target, before it.
        """
        memory = outputs.new_zeros(len(outputs), self.rank)
        return self._next(memory, token_ids, outputs)

    def advance(self, state: MarkovState, token_ids: Tensor, outputs: Tensor) -> MarkovState:
        """Return the state after draft tokens [B]; outputs: [B, hidden_size] of the next slot."""
        return self._next(state.memory, token_ids, outputs)

    def bias(self, state: MarkovState) -> Tensor:
        """Return this rank's part of the bias, [B, len(vocab_slice)]."""
        bias: Tensor = self.w2(state.latent)
        return bias

    def _next(self, memory: Tensor, token_ids: Tensor, outputs: Tensor) -> MarkovState:
        embedded = self.w1(token_ids)
        if self.projection is None:
            return MarkovState(embedded, memory)
        if self.kind == "gated":
            gate = self.projection(torch.cat([outputs, embedded], dim=1)).sigmoid()
            return MarkovState(gate * embedded, memory)
        joint = self.projection(torch.cat([memory, embedded, outputs], dim=1))
        gate, candidate, output = joint.chunk(3, dim=1)
        gate = gate.sigmoid()
        memory = gate * memory + (1 - gate) * candidate.tanh()
        return MarkovState(output.tanh(), memory)
