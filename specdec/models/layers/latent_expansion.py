"""The matrices that expand latents to the keys and values of heads (`kv_b_proj` of DeepSeek)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.backend import KernelBackend
from specdec.kernels.cpu import PANEL_OUTPUTS, native_library
from specdec.models.config.attention.latent import Latent
from specdec.models.config.model_config import ModelConfig
from specdec.models.layers.linear import Projection
from specdec.models.layers.matrix import NativeMatrix
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import HeadShard, head_rows


class HeadMatrices(Protocol):
    """A matrix for each of this rank's heads."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return the products [heads, T, out_features] with x [heads, T, in_features]."""
        ...


@dataclass(frozen=True)
class PlainHeadMatrices:
    """Matrices of heads in torch, HeadMatrices."""

    weights: Tensor  # [heads, in_features, out_features]

    def multiply(self, x: Tensor) -> Tensor:
        """See HeadMatrices."""
        return torch.bmm(x, self.weights)


@dataclass(frozen=True)
class InvariantHeadMatrices:
    """HeadMatrices whose products have the same bits for a row in any batch."""

    weights: Tensor  # [heads, in_features, out_features]

    def multiply(self, x: Tensor) -> Tensor:
        """See HeadMatrices."""
        from specdec.kernels.triton.products import multiply_heads  # imports Triton

        output = x.new_empty(*x.shape[:2], self.weights.shape[2])
        multiply_heads(x.transpose(0, 1), self.weights, output.transpose(0, 1))
        return output


@dataclass
class TorchExpansion:
    """Both halves for torch: plain_dim to rank, applied to queries, and rank to value_dim."""

    to_keys: HeadMatrices
    to_values: HeadMatrices


@dataclass(frozen=True)
class NativeExpansion:
    """Both halves for the native kernels: heads one below the other, each in whole panels.

    Those of a model in bfloat16 multiply activations in float32, as those in float16 do.
    """

    to_keys: NativeMatrix  # of each head [rank, plain_dim]
    to_values: NativeMatrix  # of each head [value_dim, rank]


class LatentExpansion(nn.Module):
    """This rank's heads of the projection from latents to keys and values, in its two halves.

    In the absorbed form the half of the keys is applied to queries, and the half of the values to
    what heads attend to. projections: as in a linear layer, for adapters.
    """

    def __init__(
        self,
        config: ModelConfig,
        latent: Latent,
        reader: CheckpointReader,
        name: str,
        heads: HeadShard,
    ) -> None:
        """Read the matrices of `heads`. name: prefix of the tensor."""
        super().__init__()
        self.latent, self.num_heads = latent, len(heads.query)
        size = latent.plain_dim + latent.value_dim
        shape, rows = (config.num_heads * size, latent.rank), head_rows(heads.query, size)
        self.projections = (Projection(name, shape, rows, range(latent.rank)),)
        weight, is_native = f"{name}.weight", reader.backend is KernelBackend.CPU
        dtype = reader.exact_dtype(weight) if is_native else None
        whole = reader.read(weight, shape, rows=rows, dtype=dtype)
        to_keys, to_values = self.halves(whole)
        self._matrices: TorchExpansion | NativeExpansion
        if is_native:
            keys, values = _stacked(to_keys.transpose(1, 2)), _stacked(to_values)
            self._matrices = NativeExpansion(keys, values)
        else:
            is_invariant = reader.backend is KernelBackend.INVARIANT
            kind = InvariantHeadMatrices if is_invariant else PlainHeadMatrices
            transposed = to_values.transpose(1, 2).contiguous()
            self._matrices = TorchExpansion(kind(to_keys.contiguous()), kind(transposed))

    def halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of this rank's heads [heads * (plain_dim + value_dim), N] by half.

        The results are [heads, plain_dim, N] and [heads, value_dim, N].
        """
        sizes = self.latent.plain_dim, self.latent.value_dim
        keys, values = rows.view(self.num_heads, sum(sizes), -1).split(sizes, dim=1)
        return keys, values

    @property
    def in_torch(self) -> TorchExpansion:
        """The halves, whose matrices adapters replace by those with updates."""
        assert isinstance(self._matrices, TorchExpansion)
        return self._matrices

    @property
    def native(self) -> NativeExpansion:
        """The halves for the native kernels."""
        assert isinstance(self._matrices, NativeExpansion)
        return self._matrices


def _stacked(matrices: Tensor) -> NativeMatrix:
    """Return matrices [N, out_features, in_features], one below the other in whole panels."""
    library = native_library()
    assert library is not None, "the backend was selected without its library"
    padding = -matrices.shape[1] % PANEL_OUTPUTS
    blocks = [F.pad(each, (0, 0, 0, padding)) for each in matrices]
    shape = (len(blocks) * len(blocks[0]), matrices.shape[2])
    return NativeMatrix(blocks, shape, torch.float32, None, library)
