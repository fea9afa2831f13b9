"""Sampling of tokens from logits.

Logits processors, truncation, Gumbel noise and argmax over a vocabulary that is split across ranks.
Acceptance of draft tokens belongs in `verifiers`, resolving a request's parameters in `engine`.
"""

from specdec.sampling.argmax import all_ranks_argmax
from specdec.sampling.distribution import (
    Distribution,
    TokenWeights,
    TopTokens,
    VocabShard,
    highest_probs,
    scale_by_confidence,
)
from specdec.sampling.gumbel import NoiseKeys, Stream, uniforms
from specdec.sampling.logits_processors import (
    BatchLogitsProcessor,
    LogitsProcessor,
    apply_token_masks,
)
from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.sampler import SamplingBatch, sample
from specdec.sampling.token_history import TokenHistory

__all__ = [
    "BatchLogitsProcessor",
    "Distribution",
    "LogitsProcessor",
    "NoiseKeys",
    "SamplingBatch",
    "Stream",
    "TokenHistory",
    "TokenWeights",
    "TopTokens",
    "VocabShard",
    "all_ranks_argmax",
    "apply_token_masks",
    "highest_probs",
    "sample",
    "scale_by_confidence",
    "token_logprobs",
    "uniforms",
]
