"""Drafting with a small model (Leviathan et al. 2023; Chen et al. 2023) on a worker of its own.

The proposer keeps the books: which tokens the draft model has run, in which blocks of its own pool.
The worker only executes, so its ranks cannot disagree. A sequence that the draft model has not seen
to its end is brought there in chunks, beside the target's own work, and is not drafted for until
then.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import attrgetter

from specdec.block_manager import BlockManager
from specdec.config import DraftLimits
from specdec.proposers.base import DraftRequest, Proposal
from specdec.runner import DraftWorker
from specdec.sequence import Sequence
from specdec.step import DraftedRow, DraftRow, DraftStep, StepRow
from specdec.worker_ledger import WorkerLedger

MAX_PENDING_TOKENS = 16
"""A draft may begin with so many tokens that the draft model has not run; more are caught up on."""


@dataclass
class _Progress:
    """How far the draft model is with a sequence: KV is valid for `num_computed_tokens`.

    drafted: the draft made last, which continued the first `base_length` tokens.
    """

    num_computed_tokens: int
    base_length: int = 0
    drafted: tuple[int, ...] = ()

    def settle(self, seq: Sequence) -> None:
        """Keeps the KV of the drafted tokens that came true. The last one's was never computed."""
        if not self.drafted:
            return
        came = seq.token_ids[self.base_length :]
        num_true = 0
        for drafted, token in zip(self.drafted[:-1], came, strict=False):
            if drafted != token:
                break
            num_true += 1
        self.num_computed_tokens = min(self.base_length + num_true, seq.num_tokens - 1)
        self.drafted = ()


class DraftModelProposer:
    """Drafts with a draft model that has the target's vocabulary."""

    def __init__(self, worker: DraftWorker, limits: DraftLimits) -> None:
        """`worker` must be new: it knows of no sequence."""
        self._worker = worker
        self._limits = limits
        self._blocks = BlockManager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self._ledger = WorkerLedger(self._blocks, attrgetter("draft_admission"))
        self._progress: dict[int, _Progress] = {}
        self._drafting: list[Sequence] = []
        self._num_steps = 0
        self.num_catch_up_tokens = 0

    def begin(self, requests: Many[DraftRequest]) -> None:
        """Sends the worker what to draft, and what to catch up on while the target works."""
        for request in requests:
            self._settle(request.seq)
        drafts = list(self._draft_rows(requests))
        chunks = [] if self._worker.is_busy else list(self._chunks(requests))
        self._drafting = [seq for seq, _ in drafts]
        if not drafts and not chunks:
            return
        news = self._ledger.news([seq for seq, _ in drafts] + [seq for seq, _ in chunks])
        step = DraftStep(
            step_id=self._num_steps,
            released=news.released,
            admitted=news.admitted,
            block_table_deltas=news.block_table_deltas,
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
        proposals = [self._proposal(seq, drafted[seq.seq_id]) for seq in self._drafting]
        self._drafting = []
        return proposals

    def _proposal(self, seq: Sequence, row: DraftedRow) -> Proposal:
        progress = self._progress[seq.seq_id]
        progress.base_length, progress.drafted = seq.num_tokens, row.token_ids
        base_token = seq.token_ids[-1]
        return Proposal(seq.seq_id, seq.num_tokens, base_token, row.token_ids, row.draft_probs)

    def release(self, seq_id: int) -> None:
        """Gives up a sequence's blocks; what they hold may serve another one."""
        if self._progress.pop(seq_id, None) is not None:
            self._blocks.release(seq_id)
            self._ledger.forget(seq_id)

    def check_integrity(self) -> None:
        """Asserts that no block of the draft model's pool is lost."""
        self._blocks.check_integrity()
        assert self._blocks.holders <= set(self._progress), "blocks held for unknown sequences"

    def _settle(self, seq: Sequence) -> None:
        """Brings the books up to what has been verified since the last call."""
        progress = self._progress.get(seq.seq_id)
        if progress is None:
            num_cached = self._blocks.attach(seq.seq_id, seq.token_ids)
            self._progress[seq.seq_id] = _Progress(num_cached)
            return
        progress.settle(seq)
        self._blocks.publish(seq.seq_id, seq.token_ids, progress.num_computed_tokens)
        self._blocks.truncate(seq.seq_id, progress.num_computed_tokens)
        self._ledger.truncate(seq.seq_id)

    def _draft_rows(self, requests: Many[DraftRequest]) -> Iterator[tuple[Sequence, DraftRow]]:
        for request in requests:
            seq, start = request.seq, self._progress[request.seq.seq_id].num_computed_tokens
            # The last draft token needs no slot: nothing is computed from it.
            room = self._limits.max_model_len - seq.num_tokens + 1
            count = min(request.max_tokens, room)
            is_caught_up = seq.num_tokens - start <= MAX_PENDING_TOKENS
            if count <= 0 or not is_caught_up:
                continue
            if self._blocks.reserve(seq.seq_id, seq.num_tokens + count - 1):
                yield seq, DraftRow(seq.seq_id, start, tuple(seq.token_ids[start:]), count)

    def _chunks(self, requests: Many[DraftRequest]) -> Iterator[tuple[Sequence, StepRow]]:
        """Text for the draft model to run, up to the token before each sequence's last."""
        budget = self._limits.max_catch_up_tokens
        for seq in (request.seq for request in requests):
            progress = self._progress[seq.seq_id]
            start = progress.num_computed_tokens
            if seq.num_tokens - start <= MAX_PENDING_TOKENS or budget == 0:
                continue
            end = min(seq.num_tokens - 1, start + budget, self._limits.max_model_len)
            if end <= start or not self._blocks.reserve(seq.seq_id, end):
                continue
            progress.num_computed_tokens = end
            budget -= end - start
            self.num_catch_up_tokens += end - start
            yield seq, StepRow(seq.seq_id, start, tuple(seq.token_ids[start:end]), 0, False)
