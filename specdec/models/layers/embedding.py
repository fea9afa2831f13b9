"""Token embedding and output head, both split by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.distributed.group import TensorParallelGroup
from specdec.models.layers.matrix import FullMatrix, NativeMatrix, make_matrix, row_blocks
from specdec.models.weights.checkpoint import CheckpointReader

EmbeddingTable = Tensor | NativeMatrix
"""[V_local, hidden_size]: a row for each token."""


class VocabHead(nn.Module):
    """Logits of this rank's slice of the vocabulary."""

    def __init__(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], tokens: range
    ) -> None:
        """`shape` is [vocab_size, hidden_size]; `tokens` are the ids whose rows are read."""
        super().__init__()
        hidden_size = shape[1]
        dtype = reader.exact_dtype(name)
        blocks = (
            reader.read(name, shape, rows=rows, dtype=dtype)
            for rows in row_blocks(tokens, hidden_size)
        )
        local_shape = (len(tokens), hidden_size)
        self.matrix = make_matrix(
            blocks,
            local_shape,
            reader.dtype,
            quantization=reader.quantization,
            kernels=reader.kernels,
            device=reader.device,
        )

    @property
    def table(self) -> EmbeddingTable | None:
        """The same numbers as a tied embedding's table, without a copy.

        None where the head is quantized: an embedding is not.
        """
        match self.matrix:
            case FullMatrix(weight=weight):
                return weight.t()
            case NativeMatrix(is_quantized=False):
                return self.matrix
            case _:
                return None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size]; returns [R, V_local]."""
        return self.matrix.multiply(hidden)


class VocabEmbedding(nn.Module):
    """Rows of the embedding; a token that another rank holds comes from there by the sum."""

    def __init__(
        self,
        weight: EmbeddingTable,
        tokens: range,
        group: TensorParallelGroup,
        dtype: torch.dtype,
    ) -> None:
        """weight: [V_local, hidden_size]; a tied head's `table` serves, without a copy.

        dtype: of the rows that come out; a float32 model's table may be shorter.
        """
        super().__init__()
        self.weight = weight
        self.dtype = dtype
        self.tokens = tokens
        self.group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] int64; returns [T, hidden_size], equal on every rank."""
        if self.group.size == 1:
            return self._rows(token_ids)
        local = token_ids - self.tokens.start
        is_elsewhere = (local < 0) | (local >= len(self.tokens))
        embedded = self._rows(local.masked_fill(is_elsewhere, 0))
        return self.group.all_reduce(embedded.masked_fill_(is_elsewhere[:, None], 0))

    def _rows(self, indices: Tensor) -> Tensor:
        """indices: [T], from 0; returns [T, hidden_size]."""
        if isinstance(self.weight, NativeMatrix):
            return self.weight.rows(indices)
        return F.embedding(indices, self.weight).to(self.dtype)
