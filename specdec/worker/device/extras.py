"""Needs of a few rows of a step on the device beyond temperature, truncation and noise.

These are changes of the logits, by penalties, biases, bad words, min_tokens and masks of a grammar,
and log-probabilities. The host packs what it knows of them into one further copy; a step without
such a row has none. The tokens that the host does not know yet, of the step before and of drafts
on the device, are counted there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.sampling.device.device_trees import VerifiedChains
from specdec.sampling.logprobs import logprob_table, padded
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import StepRow
from specdec.types.sampling.sampling_spec import ListedTokens
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.input.buffers import PendingLogprobs, copy_to_device, copy_to_host
from specdec.worker.device.input.edit_collector import (
    NO_PLACE,
    EditArrays,
    EditCollector,
    least_known,
)
from specdec.worker.device.seen_tokens import SeenTokens, count_tokens
from specdec.worker.device.state import DeviceState


@dataclass(frozen=True)
class StepExtras:
    """The further needs of the rows of a step, on the device.

    edits: of its logits. draft_edits: of those of a head, one row for each sequence. counted: rows
    of the step and of `seen` of the sequences with penalties that sample. logprob_rows: those that
    request log-probabilities. given: the tokens that these name, padded. listed: what each of
    these requests, in order, by row.
    """

    edits: LogitEdits
    draft_edits: LogitEdits
    counted: Tensor  # [P, 2] int64
    seen: Tensor | None
    logprob_rows: Tensor  # [L] int64
    given: Tensor  # [L, num_given] int64
    listed: dict[int, ListedTokens]

    def edit(self, logits: Tensor, paths: Tensor, positions: Tensor, shard: VocabShard) -> None:
        """Change logits [B * Q, V] in place.

        paths: [C, num_drafts] int64, the drafts before `edits.rows`. positions: [B * Q] int64.
        """
        shard.ops.edit(logits, self.edits, paths, positions, shard.first_token)

    def count(self, verified: VerifiedChains, shard: VocabShard) -> None:
        """Count the new tokens of the sequences with penalties."""
        if self.seen is not None:
            rows, places = self.counted.unbind(1)
            tokens, counts = verified.token_ids[rows], verified.counts[rows]
            count_tokens(self.seen, places, tokens, counts, shard.first_token)

    def logprob_logits(self, logits: Tensor, query_len: int) -> tuple[Tensor, Tensor]:
        """Return logits that `edit` leaves alone, and the rows of those that are requested."""
        offsets = torch.arange(query_len, device=logits.device)
        rows = (self.logprob_rows[:, None] * query_len + offsets).flatten()
        if self.edits.is_empty:
            return logits, rows
        return logits[rows], torch.arange(len(rows), device=logits.device)

    def logprobs(
        self, kept: tuple[Tensor, Tensor], token_ids: Tensor, places: Tensor, shard: VocabShard
    ) -> Tensor:
        """Return `logprob_table` of the tokens [B, Q] of the rows that request them.

        kept: from `logprob_logits`. places: [B, Q], which sampled token each one was. A collective
        call.
        """
        (logits, rows), own = kept, self.logprob_rows
        rows = rows.view(-1, places.shape[1]).gather(1, places[own]).flatten()
        most, given = max(each.num_best for each in self.listed.values()), None
        if self.given.shape[1]:
            given = self.given.repeat_interleave(places.shape[1], 0)
        return logprob_table(logits, rows, token_ids[own].flatten(), most, shard, given)

    def pending_logprobs(self, table: Tensor) -> PendingLogprobs:
        """Begin the copy of a table to the host."""
        return PendingLogprobs(copy_to_host(table), self.listed)


class ExtrasPacker:
    """Packs the further needs of steps on the host, and has the device count tokens."""

    def __init__(self, state: DeviceState, device: torch.device) -> None:
        """state: of the steps, whose places the counts have too."""
        self._state, self._device = state, device
        self._seen = SeenTokens(state.padding_place, device)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what the device has counted of sequences that were released, or run by the host."""
        self._seen.forget(seq_ids)

    def pack(
        self, rows: Sequence[StepRow], states: Sequence[SequenceState], query_len: int
    ) -> StepExtras | None:
        """Copy what the rows of a step need; None where they need nothing. Does not wait.

        query_len: rows of logits of each sequence.
        """
        needing = [
            (index, row, state)
            for index, (row, state) in enumerate(zip(rows, states, strict=True))
            if state.has_extras or row.grammar_mask is not None
        ]
        if not needing:
            return None
        edits, draft_edits, counted = EditCollector(), EditCollector(), []
        for index, row, state in needing:
            _follow(row, state)
            if not row.samples:
                continue
            place = self._place(row, state)
            if place != NO_PLACE:
                counted.append((index, place))
            edits.add(index * query_len, row, state, place)
            if row.drafting.num_next:
                draft_edits.add_logits(index, state, place, least_known(row, state))
        listed = {
            index: own
            for index, row, state in needing
            if row.samples and (own := state.admission.rules.listed_tokens) is not None
        }
        return self._copied(edits.arrays(), draft_edits.arrays(), counted, listed)

    def _place(self, row: StepRow, state: SequenceState) -> int:
        """Return the place of a sequence with penalties, whose tokens the device then counts."""
        if not state.admission.rules.has_penalties:
            return NO_PLACE
        place = self._state.place(row.seq_id)
        assert state.history is not None, "penalties need the tokens"
        self._seen.hold(row.seq_id, place, state.history, state.processor.tokens)
        return place

    def _copied(
        self,
        edits: EditArrays,
        draft_edits: EditArrays,
        counted: Sequence[tuple[int, int]],
        listed: dict[int, ListedTokens],
    ) -> StepExtras | None:
        if not listed and not any(each.size for each in (*edits, *draft_edits)):
            return None
        own = np.array(counted, np.int64).reshape(-1, 2)
        given = np.array(padded(listed.values()), np.int64)
        arrays = (own, np.array([*listed], np.int64), given, *edits, *draft_edits)
        on_device = copy_to_device(arrays, self._device)
        seen = self._seen.table if counted else None
        first_draft_edit = len(arrays) - len(draft_edits)
        return StepExtras(
            edits=_edits(on_device[3:first_draft_edit], seen),
            draft_edits=_edits(on_device[first_draft_edit:], seen),
            counted=on_device[0],
            seen=seen,
            logprob_rows=on_device[1],
            given=on_device[2],
            listed=listed,
        )


def _follow(row: StepRow, state: SequenceState) -> None:
    """Store the known tokens of a row, as `BatchState.update_histories` does."""
    if state.history is not None and not row.is_pending:
        state.history.follow(row.num_computed_tokens, row.known, is_end=row.samples)


def _edits(tensors: Sequence[Tensor], seen: Tensor | None) -> LogitEdits:
    """Return the edits of the tensors of an `EditArrays`."""
    changes, masks, biased, banned = tensors
    return LogitEdits(changes, masks.view(torch.int32), biased, banned, seen)
