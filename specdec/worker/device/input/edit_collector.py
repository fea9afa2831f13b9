"""Collects on the host what the logits of a step need on the device beyond its sampling rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.kernels.reference.logit_edits import Change, Entry
from specdec.sampling.logits_processors import Columns, TokenMask, intersection
from specdec.types.messages import StepRow
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.input.rows import num_drafts

NO_PLACE = -1
"""The place of a sequence without penalties."""

_NO_MASK = -1
_ALWAYS = np.iinfo(np.int64).max
_NUM_INTEGERS = Change.REPETITION  # words of a Change before the penalties

Words = NDArray[np.int64]


class EditArrays(NamedTuple):
    """The arrays of a `LogitEdits`, on the host; masks in pairs of words."""

    changes: Words
    masks: Words
    biased: Words
    banned: Words


class EditCollector:
    """The changes of the rows of logits of a step so far."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, int, int]] = []
        self._penalties: list[tuple[float, float, float]] = []
        self._masks: list[TokenMask] = []
        self._mask_ids: dict[int, int] = {}
        self._biased: list[Words] = []
        self._banned: list[Words] = []

    def add(self, first: int, row: StepRow, state: SequenceState, place: int) -> None:
        """Add the changes of the logits of a step row, the first of which is row `first`.

        place: of its counts of tokens. A pending row has neither a grammar, nor bad words of
        several tokens: both need the token.
        """
        grammar, phrases = row.grammar_mask, state.processor.phrases
        assert not (row.is_pending and (grammar is not None or phrases))
        num_before = least_known(row, state)
        completed = _completions(row, state) if phrases else None
        for index in range(1 + num_drafts(row)):
            mask = None if grammar is None else grammar[index]
            ends = None if completed is None else next(completed)
            self.add_logits(first + index, state, place, num_before, mask, ends)

    def add_logits(
        self,
        row: int,
        state: SequenceState,
        place: int,
        num_before: int,
        grammar: TokenMask | None = None,
        completed: Columns | None = None,
    ) -> None:
        """Add the changes of one row of logits.

        num_before: tokens before it at least, for the device decides about min_tokens.
        grammar: its mask, if any. completed: last tokens of bad words that begin before it.
        """
        processor, rules = state.processor, state.processor.rules
        mask = intersection(grammar, processor.allowed)
        if place != NO_PLACE or mask is not None:
            self._changes.append((row, place, _NO_MASK if mask is None else self._mask_id(mask)))
            self._penalties.append(
                (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty)
            )
        if len(processor.biased):
            biases = processor.biases.astype(np.float64).view(np.int64)
            self._biased.append(_entries(row, processor.biased, biases))
        banned = processor.banned
        if completed is not None:
            banned = np.concatenate([banned, completed])
        if len(banned):
            self._banned.append(_entries(row, banned, _ALWAYS))
        num_output = num_before - state.admission.num_prompt_tokens
        if num_output < rules.min_tokens and (grammar is None or processor.allows_text(grammar)):
            ends = np.setdiff1d(processor.ends, banned)
            self._banned.append(_entries(row, ends, rules.min_tokens))

    def arrays(self) -> EditArrays:
        """Return all changes."""
        changes = np.empty((len(self._changes), len(Change)), np.int64)
        if self._changes:
            changes[:, :_NUM_INTEGERS] = self._changes
            changes[:, _NUM_INTEGERS:] = np.array(self._penalties).view(np.int64)
        return EditArrays(
            changes, self._packed_masks(), _joined(self._biased), _joined(self._banned)
        )

    def _mask_id(self, mask: TokenMask) -> int:
        """Return the number of a mask, which the drafts of a sequence may share."""
        if id(mask) not in self._mask_ids:
            self._mask_ids[id(mask)] = len(self._masks)
            self._masks.append(mask)  # which keeps its id from being used again
        return self._mask_ids[id(mask)]

    def _packed_masks(self) -> Words:
        """Return the masks, padded with tokens that are not allowed."""
        width = max(map(len, self._masks), default=0)
        packed = np.zeros((len(self._masks), width + width % 2), np.int32)
        for own, mask in zip(packed, self._masks, strict=True):
            own[: len(mask)] = mask
        return packed.view(np.int64)


def least_known(row: StepRow, state: SequenceState) -> int:
    """Return the tokens before what a row samples, at least where these are pending."""
    return state.num_tokens if row.is_pending else row.known_end


def _completions(row: StepRow, state: SequenceState) -> Iterator[Columns]:
    """Yield the last tokens of the bad words that begin before each place of a row."""
    history = state.history
    assert history is not None, "bad words need the tokens"
    for path in row.paths:
        history.follow(row.known_end, [row.drafts[node] for node in path], is_end=True)
        completed = state.processor.completed_by(history)
        history.truncate(row.known_end)
        yield completed


def _entries(row: int, columns: Columns, values: Words | int) -> Words:
    entries = np.empty((len(columns), len(Entry)), np.int64)
    entries[:, Entry.ROW], entries[:, Entry.COLUMN], entries[:, Entry.VALUE] = row, columns, values
    return entries


def _joined(parts: Sequence[Words]) -> Words:
    return np.concatenate(parts) if parts else np.empty((0, len(Entry)), np.int64)
