"""Which token a row of logits is defined to be, over a vocabulary that is split by rank."""

from specdec.sampling.masks import apply_token_masks
from specdec.sampling.sampler import SamplingBatch, sample

__all__ = ["SamplingBatch", "apply_token_masks", "sample"]
