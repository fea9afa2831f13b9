"""Token embedding and output head, both split by vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.checkpoint import CheckpointReader
from specdec.parallel import TensorParallelGroup


class VocabHead(nn.Module):
    """Logits of this rank's slice of the vocabulary."""

    def __init__(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], tokens: range
    ) -> None:
        """`shape` is [vocab_size, hidden_size]; `tokens` are the ids whose rows are read."""
        super().__init__()
        self.weight = reader.read(name, shape, rows=tokens).t().contiguous()  # [hidden, V_local]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size]; returns [R, V_local]."""
        return hidden @ self.weight


class VocabEmbedding(nn.Module):
    """Rows of the embedding; a token that another rank holds comes from there by the sum."""

    def __init__(self, weight: Tensor, tokens: range, group: TensorParallelGroup) -> None:
        """weight: [V_local, hidden_size]; a tied head's transposed view serves, without a copy."""
        super().__init__()
        self.weight = weight
        self.tokens = tokens
        self.group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] int64; returns [T, hidden_size], equal on every rank."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.tokens.start
        is_elsewhere = (local < 0) | (local >= len(self.tokens))
        embedded = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self.group.all_reduce(embedded.masked_fill_(is_elsewhere[:, None], 0))
