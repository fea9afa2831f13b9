"""Token embedding and output head, both split by vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.checkpoint import CheckpointReader
from specdec.layers.quantization import FullMatrix, make_matrix, row_blocks
from specdec.parallel import TensorParallelGroup


class VocabHead(nn.Module):
    """Logits of this rank's slice of the vocabulary."""

    def __init__(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], tokens: range
    ) -> None:
        """`shape` is [vocab_size, hidden_size]; `tokens` are the ids whose rows are read."""
        super().__init__()
        hidden_size = shape[1]
        blocks = (reader.read(name, shape, rows=rows) for rows in row_blocks(tokens, hidden_size))
        local_shape = (len(tokens), hidden_size)
        self.matrix = make_matrix(reader.quantization, blocks, local_shape, reader.dtype)

    @property
    def table(self) -> Tensor | None:
        """The same numbers as a tied embedding's table, [V_local, hidden_size], without a copy.

        None where the head is quantized: an embedding is not.
        """
        return self.matrix.weight.t() if isinstance(self.matrix, FullMatrix) else None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size]; returns [R, V_local]."""
        return self.matrix.multiply(hidden)


class VocabEmbedding(nn.Module):
    """Rows of the embedding; a token that another rank holds comes from there by the sum."""

    def __init__(self, weight: Tensor, tokens: range, group: TensorParallelGroup) -> None:
        """weight: [V_local, hidden_size]; a tied head's `table` serves, without a copy."""
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
