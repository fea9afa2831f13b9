"""The seam between what the target reads and writes, and what a draft model does."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from specdec.sequences.sequence import Sequence
from specdec.text.vocab_map import VocabularyMap
from specdec.types.messages import SequenceAdmission

_STAND_IN = 0
"""What a draft model reads for a token that it has not: a special one, or one without text."""


@dataclass(frozen=True)
class Reading:
    """A sequence as the draft model reads it.

    token_ids: in the draft's vocabulary; the list grows with later readings. num_kept: how many of
        the first are as they were at the reading before. num_settled: how many of the first will
        never change. is_whole: whether it reaches the sequence's end.
    """

    token_ids: list[int]
    num_kept: int
    num_settled: int
    is_whole: bool = True


class Translation(Protocol):
    """Between the tokens of the target and those of a draft model, for every sequence.

    A sequence's tokens only ever grow, until it is released.
    """

    def read(self, seq: Sequence) -> Reading:
        """The sequence in the draft's tokens; may take several calls to reach its end."""

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """How many tokens the draft model should add for `max_tokens` of the target's."""

    def write(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """The target's tokens, `max_tokens` at most, for drafted ones that continue `seq`."""

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """What the draft worker has to know of a sequence, with no token that it does not have."""

    def release(self, seq_id: int) -> None:
        """Forgets a sequence; one that it never saw is no error."""


class SameVocabulary:
    """Draft and target have the same tokens: nothing is done."""

    def read(self, seq: Sequence) -> Reading:
        """The sequence's own tokens."""
        return Reading(seq.token_ids, seq.num_tokens, seq.num_tokens)

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """One for one."""
        del seq
        return max_tokens

    def write(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """The tokens themselves."""
        del seq, max_tokens
        return tuple(token_ids)

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """All that a draft can be shaped by."""
        return seq.draft_admission

    def release(self, seq_id: int) -> None:
        """There is nothing to forget."""


class EqualIds:
    """Draft and target have the same tokens of text, but other special ones or other padding.

    So Qwen's models, whose vocabularies are padded to sizes of their own.
    """

    def __init__(self, vocabulary: VocabularyMap) -> None:
        self._to_draft = vocabulary.target_to_draft
        self._to_target = vocabulary.draft_to_target
        self._readings: dict[int, list[int]] = {}

    def read(self, seq: Sequence) -> Reading:
        """The sequence's own tokens, a stand-in where the draft has no such token."""
        token_ids = self._readings.setdefault(seq.seq_id, [])
        num_kept = len(token_ids)
        new = self._to_draft[seq.token_ids[num_kept:]]
        token_ids.extend(np.where(new < 0, _STAND_IN, new).tolist())
        return Reading(token_ids, num_kept, len(token_ids))

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """One for one."""
        del seq
        return max_tokens

    def write(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """The tokens up to one that the target has not."""
        del seq, max_tokens
        return known_prefix(self._to_target[list(token_ids)].tolist())

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """All that a draft can be shaped by, unless the draft lacks one of the tokens."""
        if (self._to_draft[seq.token_ids] < 0).any():
            return plain_admission(seq)
        admission = seq.draft_admission
        token_ids = self._to_draft[list(admission.token_ids)].tolist()
        return replace(admission, token_ids=tuple(token_ids))

    def release(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._readings.pop(seq_id, None)


def plain_admission(seq: Sequence) -> SequenceAdmission:
    """What holds in any vocabulary: drafts are not shaped by tokens, and so guess worse."""
    return SequenceAdmission(seq.seq_id, seq.num_prompt_tokens, seq.rules.without_tokens)


def known_prefix(token_ids: collections.abc.Sequence[int]) -> tuple[int, ...]:
    """The ids before the first -1."""
    end = next((index for index, token in enumerate(token_ids) if token < 0), len(token_ids))
    return tuple(token_ids[:end])
