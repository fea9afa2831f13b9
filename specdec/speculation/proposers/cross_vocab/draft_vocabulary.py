"""Relation of a draft model's vocabulary to the target's, found once a service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec.speculation.proposers.cross_vocab.proposer import CrossVocabAdapter
from specdec.speculation.proposers.cross_vocab.vocab_adapter import (
    EqualIds,
    SameVocabulary,
    VocabAdapter,
)
from specdec.speculation.proposers.vocab_mapping import ModelVocabulary, map_vocabularies
from specdec.text.vocab_bytes import VocabBytes
from specdec.text.vocab_map import VocabularyMap


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
    def between(cls, draft: Path, target: Path) -> DraftVocabulary:
        """Compare the vocabularies of the models in two directories.

        Raise UnsupportedModelError for tokenizers that differ and cannot be compared.
        """
        if draft == target:
            return cls()
        models = [ModelVocabulary.from_directory(each) for each in (draft, target)]
        if models[0].equals(models[1]):
            return cls()
        shared = map_vocabularies(*models)
        if shared.has_equal_ids:
            return cls(shared)
        return cls(shared, *(each.spelling for each in models))

    def new_adapter(self) -> VocabAdapter:
        """Return an adapter without sequences."""
        if self.shared is None:
            return SameVocabulary()
        if self.draft is None or self.target is None:
            return EqualIds(self.shared)
        return CrossVocabAdapter(self.shared, self.draft, self.target)
