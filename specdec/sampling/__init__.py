"""Which token a row of logits is defined to be, over a vocabulary that is split by rank."""

from specdec.sampling.distribution import (
    Distribution,
    ListedTokens,
    TokenWeights,
    VocabShard,
    scale_by_confidence,
)
from specdec.sampling.noise import NoiseKeys, Stream, uniforms
from specdec.sampling.sampler import SamplingBatch, sample

__all__ = [
    "Distribution",
    "ListedTokens",
    "NoiseKeys",
    "SamplingBatch",
    "Stream",
    "TokenWeights",
    "VocabShard",
    "sample",
    "scale_by_confidence",
    "uniforms",
]
