"""Verification: the number of accepted draft tokens and the token after them.

`coupled`, `rejection` and `block` are lossless; `typical`, `threshold` and `confidence` are not,
and `synthetic` is for measurements. Sampling of a row's token belongs in `sampling`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.coupled import verify_coupled, verify_equal
from specdec.sampling.verifiers.draft_batch import Draft, DraftBatch, VerifiedTokens
from specdec.sampling.verifiers.lossy import verify_confidence, verify_threshold, verify_typical
from specdec.sampling.verifiers.rejection import verify_block, verify_rejection
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.sampling.sampling_params import VerifierName

Verify = Callable[[Tensor, SamplingBatch, DraftBatch, VocabShard], VerifiedTokens]

VERIFY: Mapping[VerifierName, Verify] = MappingProxyType(
    {
        "coupled": verify_coupled,
        "rejection": verify_rejection,
        "block": verify_block,
        "typical": verify_typical,
        "threshold": verify_threshold,
        "confidence": verify_confidence,
        "synthetic": verify_coupled,
    }
)
"""The function of each verifier; logits: [num_rows, num_tokens]."""

__all__ = ["VERIFY", "Draft", "DraftBatch", "VerifiedTokens", "verify_coupled", "verify_equal"]
