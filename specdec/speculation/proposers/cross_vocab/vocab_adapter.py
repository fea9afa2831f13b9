"""Adapters between the vocabulary of the target and that of a draft model."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from specdec.sequences.sequence import Sequence
from specdec.text.vocab_map import VocabularyMap
from specdec.types.messages import SequenceAdmission

_STAND_IN = 0
"""Token that replaces those that the draft model lacks: special ones, or ones without text."""


@dataclass(frozen=True)
class DraftView:
    """A sequence in the draft model's tokens.

    token_ids: in the draft's vocabulary; the list grows with later views.
    num_kept: number of leading tokens that are unchanged since the view before.
    num_settled: number of leading tokens that will never change.
    is_whole: whether the view reaches the sequence's end.
    """

    token_ids: list[int]
    num_kept: int
    num_settled: int
    is_whole: bool = True


class VocabAdapter(Protocol):
    """Converts between the tokens of the target and those of a draft model, for every sequence.

    A sequence's tokens only ever grow, until it is released.
    """

    def view(self, seq: Sequence) -> DraftView:
        """Return the sequence in the draft's tokens; a long one takes several calls."""

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """Return how many tokens to draft for `max_tokens` of the target's."""

    def to_target(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """Return the target's tokens, at most `max_tokens`, of drafted ones that continue `seq`."""

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """Return the admission of a sequence to the draft worker, in the draft's vocabulary."""

    def release(self, seq_id: int) -> None:
        """Drop the state of a sequence; an unknown one is no error."""


class SameVocabulary:
    """Adapter for equal vocabularies: the identity."""

    def view(self, seq: Sequence) -> DraftView:
        """Return the sequence's own tokens."""
        return DraftView(seq.token_ids, seq.num_tokens, seq.num_tokens)

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """Return `max_tokens`."""
        del seq
        return max_tokens

    def to_target(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """Return the tokens unchanged."""
        del seq, max_tokens
        return tuple(token_ids)

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """Return the admission with everything that shapes a draft's logits."""
        return seq.draft_admission

    def release(self, seq_id: int) -> None:
        """Do nothing: there is no state."""


class EqualIds:
    """Adapter for equal text tokens with other special tokens or another padding.

    Example: Qwen's models, whose vocabularies are padded to different sizes.
    """

    def __init__(self, vocabulary: VocabularyMap) -> None:
        self._to_draft = vocabulary.target_to_draft
        self._to_target = vocabulary.draft_to_target
        self._views: dict[int, list[int]] = {}

    def view(self, seq: Sequence) -> DraftView:
        """Return the sequence's own tokens, with a stand-in where the draft lacks one."""
        token_ids = self._views.setdefault(seq.seq_id, [])
        num_kept = len(token_ids)
        new = self._to_draft[seq.token_ids[num_kept:]]
        token_ids.extend(np.where(new < 0, _STAND_IN, new).tolist())
        return DraftView(token_ids, num_kept, len(token_ids))

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """Return `max_tokens`."""
        del seq
        return max_tokens

    def to_target(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """Return the tokens up to the first that the target lacks."""
        del seq, max_tokens
        return known_prefix(self._to_target[list(token_ids)].tolist())

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """Return the full admission, or a plain one if the draft lacks one of the tokens."""
        if (self._to_draft[seq.token_ids] < 0).any():
            return plain_admission(seq)
        admission = seq.draft_admission
        token_ids = self._to_draft[list(admission.token_ids)].tolist()
        return replace(admission, token_ids=tuple(token_ids))

    def release(self, seq_id: int) -> None:
        """Drop a sequence's tokens."""
        self._views.pop(seq_id, None)


def plain_admission(seq: Sequence) -> SequenceAdmission:
    """Return an admission for any vocabulary: no logits processors by token, lower acceptance."""
    return SequenceAdmission(seq.seq_id, seq.num_prompt_tokens, seq.rules.without_tokens)


def known_prefix(token_ids: collections.abc.Sequence[int]) -> tuple[int, ...]:
    """Return the ids before the first -1."""
    end = next((index for index, token in enumerate(token_ids) if token < 0), len(token_ids))
    return tuple(token_ids[:end])
