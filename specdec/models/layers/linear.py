"""Linear layers, embedding, output head and norm; each reads its shard of a checkpoint.

`matrix.py` stores and multiplies the weights; `CheckpointReader.quantization` selects the
quantization method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.backend import KernelBackend
from specdec.kernels.rows import row_kernels
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers.matrix import FullMatrix, Matrix, NativeMatrix, make_matrix, row_blocks
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.errors import UnsupportedModelError

EmbeddingTable = Tensor | NativeMatrix
"""[V_local, hidden_size], one row per token."""


@dataclass(frozen=True)
class WeightPart:
    """One projection of a fused layer, and the output rows that a rank holds.

    name: prefix of its tensors in the checkpoint, `weight` and, if has_bias, `bias`.
    """

    name: str
    out_features: int
    rows: range
    has_bias: bool = False


class ColumnParallelLinear(nn.Module):
    """Fused projections of one input; each rank computes its shard of every output."""

    def __init__(self, reader: CheckpointReader, in_features: int, parts: list[WeightPart]) -> None:
        """Read this rank's rows of each part."""
        super().__init__()
        total = sum(len(part.rows) for part in parts)
        names = [f"{part.name}.weight" for part in parts]
        dtype = reader.exact_dtype(*names)
        weights = (
            reader.read(name, (part.out_features, in_features), rows=part.rows, dtype=dtype)
            for name, part in zip(names, parts, strict=True)
        )
        self.matrix = _read_matrix(reader, weights, (total, in_features))
        has_bias = any(part.has_bias for part in parts)
        self.bias = torch.cat(list(_biases(reader, parts))) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the parts side by side, [T, local outputs]; x: [T, in_features]."""
        if self.bias is None:
            return self.matrix.multiply(x)
        return self.matrix.multiply_add(self.bias, x)


class RowParallelLinear(nn.Module):
    """Projection with its input split over the ranks; an all-reduce sums the partial results."""

    def __init__(
        self,
        reader: CheckpointReader,
        name: str,
        shape: tuple[int, int],
        cols: range,
        group: TensorParallelGroup,
        *,
        has_bias: bool = False,
    ) -> None:
        """name: as in WeightPart. shape: [out_features, in_features]. cols: this rank's inputs."""
        super().__init__()
        weight_name = f"{name}.weight"
        dtype = reader.exact_dtype(weight_name)
        weight = reader.read(weight_name, shape, cols=cols, dtype=dtype)
        self.matrix = _read_matrix(reader, [weight], (shape[0], len(cols)))
        self.bias = reader.read(f"{name}.bias", shape[:1]) if has_bias and group.rank == 0 else None
        self.group = group

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return `residual`, if there is one, plus the projection, equal on every rank.

        x: [T, local inputs]; residual: [T, out_features]. Rank 0 adds residual and bias to the sum.
        """
        base = residual
        if self.bias is not None:
            base = self.bias if residual is None else residual + self.bias
        if self.group.rank != 0 or base is None:
            return self.group.all_reduce(self.matrix.multiply(x))
        return self.group.all_reduce(self.matrix.multiply_add(base, x))


class VocabHead(nn.Module):
    """Output head for this rank's shard of the vocabulary, or for selected tokens of it.

    Tokens that are not selected have no weights, and logits of -inf.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        name: str,
        shape: tuple[int, int],
        tokens: range,
        selected: Sequence[int] | None = None,
    ) -> None:
        """Read the rows of `tokens`; shape: [vocab_size, hidden_size].

        selected: of the whole vocabulary, ascending; None for all. Raises UnsupportedModelError
        where none of them is in `tokens`.
        """
        super().__init__()
        hidden_size = shape[1]
        dtype = reader.exact_dtype(name)
        parts = row_blocks(tokens, hidden_size)
        blocks = (reader.read(name, shape, rows=rows, dtype=dtype) for rows in parts)
        self.num_tokens, num_rows = len(tokens), len(tokens)
        self._places: Tensor | None = None  # of the selected tokens in the shard, ascending
        if selected is not None:
            pairs = zip(blocks, parts, strict=True)
            blocks = (block[_places(selected, rows)] for block, rows in pairs)
            self._places = _places(selected, tokens).to(reader.device)
            num_rows = len(self._places)
        if num_rows == 0:
            raise UnsupportedModelError(
                f"none of the {len(selected or ())} tokens that may be drafted is among those of a "
                f"rank, {tokens.start} to {tokens.stop - 1}; use fewer ranks or another list"
            )
        self.matrix = _read_matrix(reader, blocks, (num_rows, hidden_size))

    @property
    def is_reduced(self) -> bool:
        """Return whether it has selected tokens only."""
        return self._places is not None

    @property
    def table(self) -> EmbeddingTable | None:
        """Return the weights as the table of a tied embedding, without a copy.

        None where the head is quantized, which embeddings are not, or has selected tokens only.
        """
        if self._places is not None:
            return None
        match self.matrix:
            case FullMatrix(weight=weight):
                return weight.t()
            case NativeMatrix(is_quantized=False):
                return self.matrix
            case _:
                return None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V_local] of hidden states [R, hidden_size]."""
        logits = self.matrix.multiply(hidden)
        if self._places is None:
            return logits
        spread = logits.new_full((len(logits), self.num_tokens), -torch.inf)
        return spread.index_copy_(1, self._places, logits)


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
            return self.rows(token_ids)
        local = token_ids - self.tokens.start
        is_remote = (local < 0) | (local >= len(self.tokens))
        embedded = self.rows(local.masked_fill(is_remote, 0))
        return self.group.all_reduce(embedded.masked_fill_(is_remote[:, None], 0))

    def rows(self, indices: Tensor) -> Tensor:
        """Return local rows [T, hidden_size]; indices: [T] int64."""
        if isinstance(self.weight, NativeMatrix):
            return self.weight.rows(indices)
        return F.embedding(indices, self.weight).to(self.dtype)


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich 2019) over the last dimension.

    is_fused: whether `add` is one kernel, which saves a pass over the residual.
    """

    def __init__(self, reader: CheckpointReader, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.weight = reader.read(name, (size,))
        self.eps = eps
        self._kernels = row_kernels(reader.backend)
        self.is_fused = reader.backend is KernelBackend.TRITON
        self._scaled_weight = self.weight * math.sqrt(size)
        self._scaled_eps = torch.tensor(math.sqrt(size * eps), device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, [..., size]."""
        if x.dtype != torch.float32 or x.is_cuda or self.is_fused:
            return self._kernels.rms_norm(x, self.weight, self.eps)
        # On CPUs F.rms_norm runs a dozen operators, whose overhead exceeds the arithmetic of a few
        # rows. These are four: sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self._scaled_weight).div_(torch.hypot(norm, self._scaled_eps))

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual + x, and that normalized; all [T, size]."""
        return self._kernels.add_rms_norm(residual, x, self.weight, self.eps)


def _read_matrix(
    reader: CheckpointReader, blocks: Iterable[Tensor], shape: tuple[int, int]
) -> Matrix:
    return make_matrix(
        blocks, shape, reader.dtype, quantization=reader.quantization, backend=reader.backend
    )


def _places(token_ids: Sequence[int], tokens: range) -> Tensor:
    """Return the places in `tokens` of those of the tokens that are in it, [n] int64."""
    places = [token - tokens.start for token in token_ids if token in tokens]
    return torch.tensor(places, dtype=torch.int64)


def _biases(reader: CheckpointReader, parts: list[WeightPart]) -> Iterator[Tensor]:
    for part in parts:
        if part.has_bias:
            yield reader.read(f"{part.name}.bias", (part.out_features,), rows=part.rows)
        else:
            yield torch.zeros(len(part.rows), dtype=reader.dtype, device=reader.device)
