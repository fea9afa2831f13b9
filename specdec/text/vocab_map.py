"""The map between the tokens that two vocabularies share.

A draft model with another tokenizer than the target's can draft the tokens that both have: the
token-level intersection of Timor et al., "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202, section 4 (TLI).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_spec import SamplingRules

MIN_SHARED_PART = 0.25
"""Minimum fraction of the smaller vocabulary that is shared; below it few drafts are accepted."""


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """One-to-one map of the tokens that draft and target share; -1 marks the others.

    has_equal_ids: whether every text token has the same id in both, so that only special tokens and
        padding may differ.
    """

    draft_to_target: NDArray[np.int32]  # [draft vocab_size]
    target_to_draft: NDArray[np.int32]  # [target vocab_size]
    has_equal_ids: bool

    @property
    def num_shared(self) -> int:
        return int((self.draft_to_target >= 0).sum())


def drafts_text(rules: SamplingRules) -> bool:
    """Return whether a draft model with another vocabulary drafts text, from all its tokens.

    Otherwise it drafts shared tokens only, with the noise of the target's ids.
    """
    return rules.temperature == 0


def require_enough_shared(mapped: VocabularyMap, field: str, name: str) -> None:
    """Raise InvalidValueError for `field` if too few tokens are shared for useful drafts."""
    smaller = min(len(mapped.draft_to_target), len(mapped.target_to_draft))
    part = mapped.num_shared / smaller
    if part < MIN_SHARED_PART:
        limit = (
            f"a model that shares {MIN_SHARED_PART:.0%} of the smaller vocabulary with the target; "
            f"this one shares {part:.0%}"
        )
        raise InvalidValueError(field, name, limit)
