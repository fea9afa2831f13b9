"""Which tokens two vocabularies have in common.

A draft model whose tokenizer is not the target's can draft in the tokens that both have: the
token-level intersection of Timor et al., "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202, section 4 (TLI).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.types.errors import InvalidValueError
from specdec.types.sampling_spec import SamplingRules

MIN_SHARED_PART = 0.25
"""With less of the smaller vocabulary in common, drafts would hardly ever be right."""


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """The tokens that a draft and a target model both have, one to one; -1 marks the others.

    has_equal_ids: whether every token of text has the same id in both, so that at most special
        tokens and padding differ.
    """

    draft_to_target: NDArray[np.int32]  # [draft vocab_size]
    target_to_draft: NDArray[np.int32]  # [target vocab_size]
    has_equal_ids: bool

    @property
    def num_shared(self) -> int:
        return int((self.draft_to_target >= 0).sum())


def drafts_text(rules: SamplingRules) -> bool:
    """Whether a draft model with another vocabulary draws from all its tokens, for their text.

    Otherwise it draws from those of the map, with the noise of the target's.
    """
    return rules.temperature == 0


def require_enough_shared(mapped: VocabularyMap, field: str, name: str) -> None:
    """Raises InvalidValueError for `field` if too few tokens are shared for useful drafts."""
    smaller = min(len(mapped.draft_to_target), len(mapped.target_to_draft))
    part = mapped.num_shared / smaller
    if part < MIN_SHARED_PART:
        limit = (
            f"a model that shares {MIN_SHARED_PART:.0%} of the smaller vocabulary with the target; "
            f"this one shares {part:.0%}"
        )
        raise InvalidValueError(field, name, limit)
