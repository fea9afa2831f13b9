"""Vocabulary-parallel token embedding and output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.distributed.group import TensorParallelGroup
from specdec.models.layers.matrix import FullMatrix, NativeMatrix, make_matrix, row_blocks
from specdec.models.weights.checkpoint import CheckpointReader

EmbeddingTable = Tensor | NativeMatrix
"""[V_local, hidden_size], one row per token."""


class VocabHead(nn.Module):
    """Output head for this rank's shard of the vocabulary."""

    def __init__(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], tokens: range
    ) -> None:
        """Read the rows of `tokens`; shape: [vocab_size, hidden_size]."""
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
            backend=reader.backend,
        )

    @property
    def table(self) -> EmbeddingTable | None:
        """Return the weights as the table of a tied embedding, without a copy.

        None where the head is quantized: embeddings are not.
        """
        match self.matrix:
            case FullMatrix(weight=weight):
                return weight.t()
            case NativeMatrix(is_quantized=False):
                return self.matrix
            case _:
                return None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V_local] of hidden states [R, hidden_size]."""
        return self.matrix.multiply(hidden)


class VocabEmbedding(nn.Module):
    """Vocabulary-parallel embedding; an all-reduce adds the rows that other ranks hold."""

    def __init__(
        self,
        weight: EmbeddingTable,
        tokens: range,
        group: TensorParallelGroup,
        dtype: torch.dtype,
    ) -> None:
        """weight: [V_local, hidden_size]; may be the `table` of a tied head.

        dtype: of the result; the table of a float32 model may be stored in 16 bits.
        """
        super().__init__()
        self.weight = weight
        self.dtype = dtype
        self.tokens = tokens
        self.group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size], equal on every rank; token_ids: [T] int64."""
        if self.group.size == 1:
            return self._rows(token_ids)
        local = token_ids - self.tokens.start
        is_remote = (local < 0) | (local >= len(self.tokens))
        embedded = self._rows(local.masked_fill(is_remote, 0))
        return self.group.all_reduce(embedded.masked_fill_(is_remote[:, None], 0))

    def _rows(self, indices: Tensor) -> Tensor:
        """Return local rows [T, hidden_size]; indices: [T] int64."""
        if isinstance(self.weight, NativeMatrix):
            return self.weight.rows(indices)
        return F.embedding(indices, self.weight).to(self.dtype)
