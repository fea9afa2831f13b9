"""Which tokens two vocabularies have in common.

A draft model whose tokenizer is not the target's can draft in the tokens that both have: the
token-level intersection of Timor et al., "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202, section 4 (TLI).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specdec.errors import InvalidValueError
from specdec.model_config import ModelConfig
from specdec.sampling_rules import SamplingRules
from specdec.spelling import Spelling
from specdec.tokenizer import Tokenizer

_Text = TypeVar("_Text", bytes, str)

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


@dataclass(frozen=True)
class ModelVocabulary:
    """A tokenizer, and how many tokens its model has: often more, padded, and seldom fewer."""

    tokenizer: Tokenizer
    size: int

    @classmethod
    def from_directory(cls, directory: Path) -> ModelVocabulary:
        """Raises UnsupportedModelError where the files make no model or no tokenizer."""
        return cls(Tokenizer(directory), ModelConfig.from_directory(directory).vocab_size)

    @cached_property
    def spelling(self) -> Spelling:
        """Raises UnsupportedModelError for a tokenizer whose tokens cannot be read as bytes."""
        return Spelling(self.tokenizer)

    def equals(self, other: ModelVocabulary) -> bool:
        """Whether the same ids stand for the same tokens, padding included."""
        same_tokens = self.tokenizer.vocabulary == other.tokenizer.vocabulary
        return self.size == other.size and same_tokens


def map_vocabularies(draft: ModelVocabulary, target: ModelVocabulary) -> VocabularyMap:
    """Pairs tokens of equal text, special ones of equal name, and those that end a text.

    Raises UnsupportedModelError for a tokenizer that is neither byte-level nor SentencePiece-like.
    """
    texts, target_texts = draft.spelling, target.spelling
    has_equal_ids = texts.ordinary == target_texts.ordinary
    if has_equal_ids:  # then several tokens of one text need not be told apart
        pairs = {token_id: token_id for token_id in texts.ordinary}
    else:
        pairs = _common(texts.ids_by_text(), target_texts.ids_by_text())
    pairs |= _special_pairs(draft.tokenizer, target.tokenizer)
    to_target = np.full(draft.size, -1, dtype=np.int32)
    to_draft = np.full(target.size, -1, dtype=np.int32)
    for draft_id, target_id in pairs.items():
        if draft_id < draft.size and target_id < target.size:
            to_target[draft_id], to_draft[target_id] = target_id, draft_id
    return VocabularyMap(to_target, to_draft, has_equal_ids)


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


def _special_pairs(draft: Tokenizer, target: Tokenizer) -> dict[int, int]:
    pairs = _common(_special_ids(draft), _special_ids(target))
    draft_end, target_end = draft.end_token_id, target.end_token_id
    if draft_end is None or target_end is None:
        return pairs
    if draft_end not in pairs and target_end not in pairs.values():
        pairs[draft_end] = target_end
    return pairs


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    special = tokenizer.special_token_ids
    return {text: token for text, token in tokenizer.vocabulary.items() if token in special}


def _common(draft: Mapping[_Text, int], target: Mapping[_Text, int]) -> dict[int, int]:
    """The target's ids of what both know, by the draft's."""
    return {draft[text]: target[text] for text in draft.keys() & target.keys()}
