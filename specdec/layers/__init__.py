"""Tensor-parallel layers; each reads its own share of a checkpoint."""

from specdec.layers.embedding import VocabEmbedding, VocabHead
from specdec.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightPart
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import RotaryEmbedding, Rotation

__all__ = [
    "ColumnParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "RowParallelLinear",
    "VocabEmbedding",
    "VocabHead",
    "WeightPart",
]
