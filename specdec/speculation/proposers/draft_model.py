"""Drafting with a small model (Leviathan et al. 2023; Chen et al. 2023) on a worker of its own.

The proposer keeps the books: which tokens the draft model has run, in which blocks of its own pool.
The worker only executes, so its ranks cannot disagree. A sequence that the draft model has not seen
to its end is brought there in chunks, beside the target's own work, and is not drafted for until
then.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.config.engine import DraftLimits
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import Sequence
from specdec.sequences.worker_view import WorkerView
from specdec.speculation.proposers.base import DraftRequest, Proposal
from specdec.speculation.proposers.cross_vocab.retokenizer import num_equal
from specdec.speculation.proposers.cross_vocab.vocab_adapter import (
    Reading,
    SameVocabulary,
    Translation,
)
from specdec.types.messages import DraftedRow, DraftRow, DraftStep, StepRow
from specdec.types.worker import DraftWorker

MAX_PENDING_TOKENS = 16
"""A draft may begin with so many tokens that the draft model has not run; more are caught up on."""


@dataclass
class _Progress:
    """How far the draft model is with a sequence: KV is valid for `num_computed_tokens`.

    drafted: the draft made last, which continued the first `base_length` tokens; empty where the
    model was not sure of one. None where it is settled what came of it.
    """

    num_computed_tokens: int
    base_length: int = 0
    drafted: tuple[int, ...] | None = None

    def settle(self, text: Reading) -> None:
        """Keeps the KV of the drafted tokens that came true. The last one's was never computed."""
        if self.drafted is not None:
            self.num_computed_tokens = self.base_length
        if text.num_kept < self.num_computed_tokens:
            self.num_computed_tokens = text.num_kept
        elif self.drafted is not None:
            came = text.token_ids[self.base_length :]
            self.num_computed_tokens += num_equal(self.drafted[:-1], came)
        self.num_computed_tokens = min(self.num_computed_tokens, len(text.token_ids) - 1)
        self.drafted = None


class DraftModelProposer:
    """Drafts with a draft model. What it reads and writes may need translation."""

    def __init__(
        self, worker: DraftWorker, limits: DraftLimits, translation: Translation | None = None
    ) -> None:
        """`worker` and `translation` must be new: they know of no sequence.

        translation: None where the draft model has the target's vocabulary.
        """
        self._worker = worker
        self._translation = translation or SameVocabulary()
        self._limits = limits
        self._blocks = BlockManager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self._worker_view = WorkerView(self._blocks, self._translation.admission)
        self._progress: dict[int, _Progress] = {}
        self._readings: dict[int, Reading] = {}  # of the requests under way
        self._drafting: list[DraftRequest] = []
        self._num_steps = 0
        self.num_catch_up_tokens = 0

    def begin(self, requests: collections.abc.Sequence[DraftRequest]) -> None:
        """Sends the worker what to draft, and what to catch up on while the target works."""
        self._readings = {request.seq.seq_id: self._settle(request.seq) for request in requests}
        self._drop_those_out_of_context(requests)
        drafts = list(self._draft_rows(requests))
        self._drafting = [request for request, _ in drafts]
        chunks = [] if self._worker.is_busy else list(self._chunks(requests))
        if not drafts and not chunks:
            return
        delta = self._worker_view.update(
            [each.seq for each, _ in drafts] + [seq for seq, _ in chunks]
        )
        step = DraftStep(
            step_id=self._num_steps,
            released=delta.released,
            admitted=delta.admitted,
            block_table_deltas=delta.block_table_deltas,
            rows=tuple(row for _, row in chunks),
            drafts=tuple(row for _, row in drafts),
        )
        self._num_steps += 1
        self._worker.begin(step)

    def collect(self) -> list[Proposal]:
        """Waits for the drafts; sequences that are not caught up have none."""
        if not self._drafting:
            return []
        drafted = {row.seq_id: row for row in self._worker.collect().rows}
        proposals = [self._proposal(each, drafted[each.seq.seq_id]) for each in self._drafting]
        self._drafting = []
        return proposals

    def release(self, seq_id: int) -> None:
        """Gives up a sequence's blocks; what they hold may serve another one."""
        self._translation.release(seq_id)
        if self._progress.pop(seq_id, None) is not None:
            self._blocks.release(seq_id)
            self._worker_view.release(seq_id)

    def check_integrity(self) -> None:
        """Asserts that no block of the draft model's pool is lost."""
        self._blocks.check_integrity()
        assert self._blocks.holders <= set(self._progress), "blocks held for unknown sequences"

    def _settle(self, seq: Sequence) -> Reading:
        """Brings the books up to what has been verified since the last call."""
        text = self._translation.read(seq)
        progress = self._progress.get(seq.seq_id)
        if progress is not None:
            progress.settle(text)
            num_settled = min(progress.num_computed_tokens, text.num_settled)
            self._blocks.publish(seq.seq_id, text.token_ids, num_settled)
            if self._blocks.truncate(seq.seq_id, progress.num_computed_tokens):
                self._worker_view.truncate(seq.seq_id)
        elif text.is_whole:
            # Never all of it: the token behind what is settled stands for the rest.
            known = text.token_ids[: text.num_settled + 1]
            num_cached = self._blocks.attach(seq.seq_id, known, seq.request.cache_salt)
            self._progress[seq.seq_id] = _Progress(num_cached)
        return text

    def _proposal(self, request: DraftRequest, row: DraftedRow) -> Proposal:
        seq, progress = request.seq, self._progress[request.seq.seq_id]
        progress.base_length = len(self._readings[seq.seq_id].token_ids)
        progress.drafted = row.token_ids
        tokens = self._translation.write(seq, row.token_ids, request.max_tokens)
        draft_probs = None if row.draft_probs is None else row.draft_probs[: len(tokens)]
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], tokens, draft_probs)

    def _draft_rows(
        self, requests: collections.abc.Sequence[DraftRequest]
    ) -> Iterator[tuple[DraftRequest, DraftRow]]:
        for place, request in enumerate(requests):
            seq, text = request.seq, self._readings[request.seq.seq_id]
            if not text.is_whole or request.max_tokens <= 0:
                continue
            start, end = self._progress[seq.seq_id].num_computed_tokens, len(text.token_ids)
            # The last draft token needs no slot: nothing is computed from it.
            room = self._limits.max_model_len - end + 1
            count = min(self._translation.num_draft_tokens(seq, request.max_tokens), room)
            if count <= 0 or end - start > MAX_PENDING_TOKENS:
                continue
            if self._make_room(seq, end + count - 1, requests[place + 1 :]):
                pending = tuple(text.token_ids[start:])
                yield request, DraftRow(seq.seq_id, start, pending, count, seq.num_tokens)

    def _chunks(
        self, requests: collections.abc.Sequence[DraftRequest]
    ) -> Iterator[tuple[Sequence, StepRow]]:
        """Text for the draft model to run, up to the token before each sequence's last.

        None of a text that there is no room for: part of it would only be in others' way.
        """
        drafting = {request.seq.seq_id for request in self._drafting}
        idle = [request for request in requests if request.seq.seq_id not in drafting]
        budget = self._limits.max_catch_up_tokens
        for place, seq in enumerate(request.seq for request in idle):
            text = self._readings[seq.seq_id]
            if not text.is_whole or budget == 0:
                continue
            progress, num_tokens = self._progress[seq.seq_id], len(text.token_ids)
            start = progress.num_computed_tokens
            if not MAX_PENDING_TOKENS < num_tokens - start <= self._limits.max_model_len - start:
                continue
            if not self._make_room(seq, num_tokens, idle[place + 1 :]):
                continue
            end = min(num_tokens - 1, start + budget)
            progress.num_computed_tokens = end
            budget -= end - start
            self.num_catch_up_tokens += end - start
            yield seq, StepRow(seq.seq_id, start, tuple(text.token_ids[start:end]), 0, False)

    def _make_room(
        self, seq: Sequence, num_tokens: int, later: collections.abc.Sequence[DraftRequest]
    ) -> bool:
        """Reserves blocks for a sequence's first tokens, if need be by taking those of `later`.

        The last of these first. So the pool serves some sequences to their end, where else all
        might wait for the rest of their blocks.
        """
        for request in reversed(later):
            if self._blocks.reserve(seq.seq_id, num_tokens):
                return True
            self._drop(request.seq)
        return self._blocks.reserve(seq.seq_id, num_tokens)

    def _drop_those_out_of_context(self, requests: collections.abc.Sequence[DraftRequest]) -> None:
        """Takes the blocks of sequences that have become too long to be drafted for."""
        for seq in (request.seq for request in requests):
            if len(self._readings[seq.seq_id].token_ids) > self._limits.max_model_len:
                self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        """Forgets what the draft model has computed of a sequence."""
        if self._blocks.block_table(seq.seq_id):
            self._blocks.release(seq.seq_id)
            self._worker_view.release(seq.seq_id)
            self._progress[seq.seq_id] = _Progress(0)
