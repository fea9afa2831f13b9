"""Tensor-parallel layers; each reads its own shard of a checkpoint.

Arithmetic that needs more than torch belongs in `kernels`.
"""

from specdec.models.layers.embedding import VocabEmbedding, VocabHead
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightPart
from specdec.models.layers.norm import RMSNorm
from specdec.models.layers.rotary import RotaryEmbedding, Rotation

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
