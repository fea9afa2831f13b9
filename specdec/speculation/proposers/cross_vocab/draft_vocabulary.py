"""Relation of a draft model's vocabulary to the target's, determined once a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from specdec.config.engine import DEFAULT_MODEL_OPTIONS, ModelOptions
from specdec.models.config.model_config import ModelConfig
from specdec.speculation.proposers.cross_vocab.vocab_adapter import (
    CrossVocabAdapter,
    EqualIds,
    VocabAdapter,
)
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_bytes import VocabBytes
from specdec.text.vocab_map import VocabularyMap

_Text = TypeVar("_Text", bytes, str)


@dataclass(frozen=True)
class ModelVocabulary:
    """A tokenizer, and the number of tokens of its model: often more (padding), seldom fewer."""

    tokenizer: Tokenizer
    size: int

    @classmethod
    def from_directory(
        cls, directory: Path, options: ModelOptions = DEFAULT_MODEL_OPTIONS
    ) -> ModelVocabulary:
        """Read a model's files. Raise UnsupportedModelError if they are not supported."""
        return cls(Tokenizer(directory), ModelConfig.from_directory(directory, options).vocab_size)

    @cached_property
    def spelling(self) -> VocabBytes:
        """VocabBytes of the tokens as bytes. Raises UnsupportedModelError if they have none."""
        return VocabBytes(self.tokenizer)

    def equals(self, other: ModelVocabulary) -> bool:
        """Return whether equal ids are equal tokens, padding included."""
        same_tokens = self.tokenizer.vocabulary == other.tokenizer.vocabulary
        return self.size == other.size and same_tokens


@dataclass(frozen=True)
class DraftVocabulary:
    """Relation of two vocabularies, from which adapters are made.

    shared: the tokens that both models have; None for equal vocabularies.
    draft, target: spellings of their tokenizers; None where no text needs retokenization.
    """

    shared: VocabularyMap | None = None
    draft: VocabBytes | None = None
    target: VocabBytes | None = None

    @classmethod
    def between(
        cls, draft: Path, target: Path, options: ModelOptions = DEFAULT_MODEL_OPTIONS
    ) -> DraftVocabulary:
        """Compare the vocabularies of the models in two directories.

        options: of the target, whose overrides may change the number of its tokens. Raise
        UnsupportedModelError for tokenizers that differ and cannot be compared.
        """
        if draft == target:
            return cls()
        models = (
            ModelVocabulary.from_directory(draft),
            ModelVocabulary.from_directory(target, options),
        )
        if models[0].equals(models[1]):
            return cls()
        shared = map_vocabularies(*models)
        if shared.has_equal_ids:
            return cls(shared)
        return cls(shared, *(each.spelling for each in models))

    @property
    def drafts_ahead(self) -> bool:
        """Return whether the draft model can continue its drafts token by token.

        Not with another tokenizer: a draft that is accepted in part may be other tokens in the
        longer text.
        """
        return self.draft is None or self.target is None

    def new_adapter(self) -> VocabAdapter:
        """Return an adapter without sequences."""
        if self.shared is None:
            return VocabAdapter()
        if self.draft is None or self.target is None:
            return EqualIds(self.shared)
        return CrossVocabAdapter(self.shared, self.draft, self.target)


def map_vocabularies(draft: ModelVocabulary, target: ModelVocabulary) -> VocabularyMap:
    """Pair tokens of equal text, special ones of equal name, and those that end a text.

    Raise UnsupportedModelError for a tokenizer that is neither byte-level nor SentencePiece-like.
    """
    texts, target_texts = draft.spelling, target.spelling
    has_equal_ids = texts.ordinary == target_texts.ordinary
    if has_equal_ids:  # also where several tokens have the same text
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
    """Return the target's ids of common texts by the draft's ids."""
    return {draft[text]: target[text] for text in draft.keys() & target.keys()}
