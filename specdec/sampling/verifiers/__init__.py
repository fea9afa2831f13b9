"""Verification: the number of accepted draft tokens and the token after them; a module each.

`coupled`, `rejection` and `block` are lossless; `typical` and `threshold` are not. Sampling of a
row's token belongs in `sampling`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from specdec.sampling import SamplingBatch, VocabShard
from specdec.sampling.verifiers.block import verify_block
from specdec.sampling.verifiers.coupled import verify_coupled
from specdec.sampling.verifiers.draft_batch import Draft, DraftBatch, VerifiedTokens
from specdec.sampling.verifiers.greedy import verify_greedy
from specdec.sampling.verifiers.rejection import verify_rejection
from specdec.sampling.verifiers.threshold import verify_threshold
from specdec.sampling.verifiers.typical import verify_typical
from specdec.types.sampling_params import VerifierName

Verify = Callable[[Tensor, SamplingBatch, DraftBatch, VocabShard], VerifiedTokens]

VERIFY: Mapping[VerifierName, Verify] = MappingProxyType(
    {
        "coupled": verify_coupled,
        "rejection": verify_rejection,
        "block": verify_block,
        "typical": verify_typical,
        "threshold": verify_threshold,
    }
)
"""The function of each verifier."""

__all__ = [
    "VERIFY",
    "Draft",
    "DraftBatch",
    "VerifiedTokens",
    "Verify",
    "verify_block",
    "verify_coupled",
    "verify_greedy",
    "verify_rejection",
    "verify_threshold",
    "verify_typical",
]
