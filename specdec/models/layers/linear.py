"""Linear layers, embedding and output head; each reads its shard of a checkpoint.

`matrix.py` stores and multiplies the weights; `CheckpointReader.quantization` selects the
quantization method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.backend import KernelBackend
from specdec.kernels.reference.packed_weight import PackedWeight, joined
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.traits import NO_TRANSFORM, DecoderTraits, LogitTransform
from specdec.models.layers.matrix import FullMatrix, Matrix, NativeMatrix, make_matrix, row_blocks
from specdec.models.layers.quantized_matrix import QuantizedMatrix
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.errors import UnsupportedModelError

EmbeddingTable = Tensor | NativeMatrix
"""[V_local, hidden_size], one row per token."""


@dataclass(frozen=True)
class WeightPart:
    """One projection of a fused layer, and the output rows that a rank holds.

    name: prefix of its tensors in the checkpoint, `weight` and, if has_bias, `bias`.
    out_features: rows of these tensors, which may hold other projections too.
    order: the place in its head of each row that is stored, where each head is reordered.
    """

    name: str
    out_features: int
    rows: range
    has_bias: bool = False
    order: tuple[int, ...] | None = None

    def read(self, reader: CheckpointReader, in_features: int, dtype: torch.dtype) -> Tensor:
        """Return the rows of the weight, [len(rows), in_features]."""
        shape = (self.out_features, in_features)
        found = reader.read(f"{self.name}.weight", shape, rows=self.rows, dtype=dtype)
        return in_order(found, self.order)

    def read_packed(self, reader: CheckpointReader, in_features: int) -> PackedWeight | None:
        """Return the rows of the weight as the files have them; None as `CheckpointReader`."""
        shape = (self.out_features, in_features)
        found = reader.read_packed(f"{self.name}.weight", shape, self.rows, range(in_features))
        if found is None or self.order is None:
            return found
        places = torch.arange(len(self.rows), device=reader.device)
        return found.take(in_order(places, self.order))

    def read_bias(self, reader: CheckpointReader) -> Tensor:
        """Return the rows of the bias, [len(rows)]; zeros without one."""
        if not self.has_bias:
            return torch.zeros(len(self.rows), dtype=reader.dtype, device=reader.device)
        shape = (self.out_features,)
        bias = reader.read(f"{self.name}.bias", shape, rows=self.rows)
        return in_order(bias, self.order)


def in_order(rows: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return rows of whole heads, those of each in an order as in WeightPart."""
    if order is None:
        return rows
    heads: Tensor = rows.unflatten(0, (-1, len(order)))
    return heads[:, list(order)].flatten(0, 1)


def weight_parts(
    prefix: str,
    names: Sequence[str],
    sizes: Sequence[int],
    rows: Sequence[range],
    *,
    has_bias: bool,
    orders: Sequence[tuple[int, ...] | None] | None = None,
) -> list[WeightPart]:
    """Return the projections of a fused layer.

    names: of the tensor of each, or of one that holds the rows of all. sizes: rows of each; rows:
    those of this rank, in its projection. orders: see WeightPart.
    """
    is_one = len(names) < len(sizes)
    assert len(names) == (1 if is_one else len(sizes))
    starts = accumulate(sizes, initial=0) if is_one else repeat(0)
    parts = zip(repeat(names[0]) if is_one else names, sizes, starts, rows, strict=False)
    return [
        WeightPart(
            f"{prefix}.{name}",
            sum(sizes) if is_one else size,
            range(start + own.start, start + own.stop),
            has_bias,
            None if orders is None else orders[index],
        )
        for index, (name, size, start, own) in enumerate(parts)
    ]


@dataclass(frozen=True)
class Projection:
    """One projection of a linear layer as the checkpoint has it, and the part that a rank holds.

    name, order: as in WeightPart. shape: [out_features, in_features] of the tensor. outputs,
    inputs: the rank's rows and columns of it; the rows of a layer's projections follow each other.
    """

    name: str
    shape: tuple[int, int]
    outputs: range
    inputs: range
    order: tuple[int, ...] | None = None


class ColumnParallelLinear(nn.Module):
    """Fused projections of one input; each rank computes its shard of every output."""

    def __init__(self, reader: CheckpointReader, in_features: int, parts: list[WeightPart]) -> None:
        """Read this rank's rows of each part."""
        super().__init__()
        matrix = _packed_matrix(reader, in_features, parts)
        if matrix is None:
            total = sum(len(part.rows) for part in parts)
            dtype = reader.exact_dtype(*(f"{part.name}.weight" for part in parts))
            weights = (part.read(reader, in_features, dtype) for part in parts)
            matrix = _read_matrix(reader, weights, (total, in_features))
        self.matrix = matrix
        has_bias = any(part.has_bias for part in parts)
        self.bias = torch.cat([part.read_bias(reader) for part in parts]) if has_bias else None
        self.projections = tuple(
            Projection(
                part.name,
                (part.out_features, in_features),
                part.rows,
                range(in_features),
                part.order,
            )
            for part in parts
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the parts side by side, [T, local outputs]; x: [T, in_features]."""
        if self.bias is None:
            return self.matrix.multiply(x)
        return self.matrix.multiply_add(self.bias, x)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return what `forward` does, in float32."""
        output = self.matrix.multiply_to_float32(x)
        return output if self.bias is None else output + self.bias


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
        matrix = _packed(reader, reader.read_packed(weight_name, shape, range(shape[0]), cols))
        if matrix is None:
            dtype = reader.exact_dtype(weight_name)
            weight = reader.read(weight_name, shape, cols=cols, dtype=dtype)
            matrix = _read_matrix(reader, [weight], (shape[0], len(cols)))
        self.matrix = matrix
        self.bias = reader.read(f"{name}.bias", shape[:1]) if has_bias and group.rank == 0 else None
        self.projections = (Projection(name, shape, range(shape[0]), cols),)
        self.group = group

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the projection, plus `residual` if given, equal on every rank.

        x: [T, local inputs]; residual: [T, out_features]. Rank 0 adds residual and bias to the sum.
        """
        base = self.bias if residual is None else residual
        if self.group.rank != 0 or base is None:
            return self.group.all_reduce(self.matrix.multiply(x))
        if residual is not None and self.bias is not None:
            base = residual + self.bias
        return self.group.all_reduce(self.matrix.multiply_add(base, x))


class VocabHead(nn.Module):
    """Output head for this rank's shard of the vocabulary, or for selected tokens of it.

    Tokens that are not selected have no weights, and logits of -inf.

    places: of the selected tokens in the shard, ascending; None where it has all tokens.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        name: str,
        shape: tuple[int, int],
        tokens: range,
        selected: Sequence[int] | None = None,
        transform: LogitTransform = NO_TRANSFORM,
    ) -> None:
        """Read the rows of `tokens`; shape: [vocab_size, hidden_size].

        selected: of the whole vocabulary, ascending; None for all. transform: of the products, to
        logits. Raises UnsupportedModelError where no selected token is in `tokens`.
        """
        super().__init__()
        self.transform = transform
        hidden_size = shape[1]
        dtype = reader.exact_dtype(name)
        parts = row_blocks(tokens, hidden_size)
        blocks = (reader.read(name, shape, rows=rows, dtype=dtype) for rows in parts)
        self.num_tokens, num_rows = len(tokens), len(tokens)
        self.places: Tensor | None = None
        if selected is not None:
            pairs = zip(blocks, parts, strict=True)
            blocks = (block[_places(selected, rows)] for block, rows in pairs)
            self.places = _places(selected, tokens).to(reader.device)
            num_rows = len(self.places)
        if num_rows == 0:
            raise UnsupportedModelError(
                f"none of the {len(selected or ())} tokens that may be drafted is among those of a "
                f"rank, {tokens.start} to {tokens.stop - 1}; use fewer ranks or another list"
            )
        self.matrix = _read_matrix(reader, blocks, (num_rows, hidden_size))

    @property
    def is_reduced(self) -> bool:
        """Return whether it has selected tokens only."""
        return self.places is not None

    @property
    def table(self) -> EmbeddingTable | None:
        """Return the weights as the table of a tied embedding, without a copy.

        None where the head is quantized, which embeddings are not, or has selected tokens only.
        """
        if self.places is not None:
            return None
        match self.matrix:
            case FullMatrix(weight=weight):
                return weight.t()
            case NativeMatrix(is_quantized=False):
                return self.matrix
            case _:
                return None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V_local] of hidden states [R, hidden_size], in float32.

        Logits in 16 bits often have two equal maxima, between which rounding decides.
        """
        logits = transform_logits(self.transform, self.matrix.multiply_to_float32(hidden))
        if self.places is None:
            return logits
        spread = logits.new_full((len(logits), self.num_tokens), -torch.inf)
        return spread.index_copy_(1, self.places, logits)


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


def embedding_scale(traits: DecoderTraits, dtype: torch.dtype) -> float:
    """Return the factor of the embeddings of a model with activations of `dtype`.

    Gemma keeps it as a tensor of that type, with which it was trained: 50.5 in place of the square
    root of 2560 in bfloat16.
    """
    scale = traits.embedding_scale
    return float(torch.tensor(scale, dtype=dtype)) if traits.rounds_embedding_scale else scale


def transform_logits(transform: LogitTransform, logits: Tensor) -> Tensor:
    """Apply a transform to logits in place, and return them."""
    if transform.scale != 1.0:
        logits.mul_(transform.scale)
    if transform.softcap is not None:
        logits.div_(transform.softcap).tanh_().mul_(transform.softcap)
    return logits


def _packed_matrix(
    reader: CheckpointReader, in_features: int, parts: Sequence[WeightPart]
) -> Matrix | None:
    """Return the matrix of several projections, packed as in the files; None if it cannot be."""
    found = []
    for part in parts:
        if (packed := part.read_packed(reader, in_features)) is None:
            return None
        found.append(packed)
    return _packed(reader, joined(found))


def _packed(reader: CheckpointReader, weight: PackedWeight | None) -> Matrix | None:
    if weight is None:
        return None
    return QuantizedMatrix(weight, is_invariant=reader.backend is KernelBackend.INVARIANT)


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
