"""Drafting with a small model (Leviathan et al. 2023; Chen et al. 2023) on its own worker.

The proposer keeps the state: which tokens the draft model has run, in which blocks of its KV pool.
The worker only executes, so its ranks cannot disagree. New text of a sequence runs in chunks on the
draft model while the target works; a sequence is not drafted for before it has caught up.

Drafts are made when a step needs them, and the step waits; or ahead, while the target still
verifies the ones before (`specdec.speculation.proposers.ahead`).
"""

from __future__ import annotations

import collections.abc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdec.config.engine import DraftLimits
from specdec.config.speculation.methods import DraftModelConfig
from specdec.sequences.block_manager import BlockManager, root_key
from specdec.sequences.sequence import Sequence
from specdec.sequences.worker_view import WorkerView
from specdec.speculation.proposers.ahead import AheadDrafts
from specdec.speculation.proposers.base import DraftRequest, Proposal, ProposerMemory, SentRow
from specdec.speculation.proposers.cross_vocab.retokenizer import num_equal
from specdec.speculation.proposers.cross_vocab.vocab_adapter import DraftView, VocabAdapter
from specdec.speculation.proposers.draft_adapters import DraftAdapters
from specdec.speculation.proposers.outcome_planner import OutcomePlanner, RowPlan
from specdec.types.adapters import AdapterFile
from specdec.types.draft_messages import AheadRow, DraftedRow, DraftRow, DraftStep
from specdec.types.messages import BASE_MODEL, StepRow
from specdec.types.ranks import DraftWorker
from specdec.types.reports.stats import Counts
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

MAX_PENDING_TOKENS = 16
"""Most tokens without KV that a draft may begin with; more are caught up on in chunks."""

MAX_PENDING_IN_PARALLEL = MAX_NUM_SPECULATIVE_TOKENS + 1
"""The same with parallel drafting, which leaves no KV of draft tokens: a whole step's tokens."""

_ADAPTED_BYTES_PER_TOKEN = 80
"""Memory of a token in the tokens of another vocabulary: two ints in a list."""


@dataclass
class _Progress:
    """Progress of the draft model with a sequence: KV is valid for `num_computed_tokens`.

    adapter_id: of the draft model's adapter that the KV was computed with.
    drafted: the tokens of the last draft that have KV, which continued the first `base_length`
        tokens; perhaps none. None once its verification is accounted for.
    """

    num_computed_tokens: int
    adapter_id: int = BASE_MODEL
    base_length: int = 0
    drafted: tuple[int, ...] | None = None

    def settle(self, text: DraftView) -> None:
        """Keep the KV of the accepted drafts."""
        if self.drafted is not None:
            self.num_computed_tokens = self.base_length
        if text.num_kept < self.num_computed_tokens:
            self.num_computed_tokens = text.num_kept
        elif self.drafted is not None:
            verified = text.token_ids[self.base_length :]
            self.num_computed_tokens += num_equal(self.drafted, verified)
        self.num_computed_tokens = min(self.num_computed_tokens, len(text.token_ids) - 1)
        self.drafted = None


class DraftModelProposer:
    """Proposer with a draft model, whose vocabulary may differ from the target's."""

    def __init__(
        self,
        worker: DraftWorker,
        limits: DraftLimits,
        adapter: VocabAdapter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`worker` and `adapter` must be new, without sequences.

        adapter: None where the draft model has the target's vocabulary.
        """
        self._worker = worker
        self._adapter = adapter or VocabAdapter()
        self._limits = limits
        self._max_pending = (
            MAX_PENDING_IN_PARALLEL if limits.parallel_drafting else MAX_PENDING_TOKENS
        )
        self._blocks = BlockManager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self._worker_view = WorkerView(self._blocks, self._adapter.admission)
        self._progress: dict[int, _Progress] = {}
        self._views: dict[int, DraftView] = {}  # of the current requests
        self._num_steps = 0
        self.num_catch_up_tokens = 0
        self._ahead = AheadDrafts(self._adapter, clock)
        self._lora = DraftAdapters(worker)

    def load_adapter(self, adapter: AdapterFile) -> None:
        """See AdapterDrafter."""
        self._lora.load(adapter)

    def adapter_fault(self, adapter_id: int) -> str | None:
        """See AdapterDrafter."""
        return self._lora.fault_of(adapter_id)

    def unload_adapter(self, adapter_id: int) -> None:
        """See AdapterDrafter."""
        self._lora.unload(adapter_id)

    @property
    def counts(self) -> Counts:
        """What it has counted: catch-up tokens, and drafts that were made ahead."""
        return Counts(num_catch_up_tokens=self.num_catch_up_tokens, ahead=self._ahead.counts)

    def keep_observations(self, planner: OutcomePlanner) -> None:
        """Plan drafts ahead from the observations of `planner`, and add to them."""
        self._ahead.planner = planner

    @staticmethod
    def memory(config: DraftModelConfig) -> ProposerMemory:
        """Return the memory of the texts in the draft model's vocabulary, without its KV."""
        bytes_per_token = 0 if config.model is None else _ADAPTED_BYTES_PER_TOKEN
        return ProposerMemory(bytes_per_token=bytes_per_token)

    def take(self, requests: collections.abc.Sequence[DraftRequest]) -> list[Proposal]:
        """Return the drafts that are there, and those of requests that may wait.

        Sequences that have not caught up have none; the worker runs a chunk of their text. While it
        loads an adapter there are none at all.
        """
        if self._lora.is_loading:
            self._views = {}  # nothing is drafted ahead in this step, even if the load ends
            return []  # drafts would wait for the load
        self._views = {request.seq.seq_id: self._settle(request.seq) for request in requests}
        self._drop_beyond_context(requests)
        proposals = self._take_ahead(requests)
        served = {each.seq_id for each in proposals}
        drafts = list(self._draft_rows(requests, served))
        busy = served | {row.seq_id for _, row in drafts}
        chunks = [] if self._worker.poll_busy() else list(self._chunks(requests, busy))
        if not drafts and not chunks:
            return proposals
        self._begin(
            [each.seq for each, _ in drafts] + [seq for seq, _ in chunks],
            rows=tuple(row for _, row in chunks),
            drafts=tuple(row for _, row in drafts),
        )
        self.num_catch_up_tokens += sum(len(row.token_ids) for _, row in chunks)
        return proposals + self._collect([request for request, _ in drafts])

    def ahead(self, rows: collections.abc.Sequence[SentRow]) -> None:
        """Draft after the rows of sequences that have caught up, while the target runs them."""
        if self._lora.is_loading:
            return
        rows = [row for row in rows if self._may_draft_ahead(row)]
        ahead = list(self._ahead_rows(rows))
        if not ahead:
            return
        step_id = self._begin([row.seq for row, _ in ahead], ahead=tuple(row for _, row in ahead))
        self._ahead.begin_step(step_id, ahead)

    def end_step(self, *, is_lost: bool = False) -> None:
        """Measure the target's step, within which drafts ahead should be complete."""
        self._ahead.end_step(is_lost=is_lost)

    def _begin(
        self,
        sequences: list[Sequence],
        *,
        rows: tuple[StepRow, ...] = (),
        drafts: tuple[DraftRow, ...] = (),
        ahead: tuple[AheadRow, ...] = (),
    ) -> int:
        """Send the worker a step, and return its id."""
        delta, step_id = self._worker_view.update(sequences), self._num_steps
        self._num_steps += 1
        self._worker.begin(DraftStep(step_id, *delta, rows, drafts, ahead))
        return step_id

    def _collect(self, drafting: list[DraftRequest]) -> list[Proposal]:
        """Wait for the drafts of requests."""
        if not drafting:
            return []
        drafted = {row.seq_id: row for row in self._worker.collect().rows}
        return [self._proposal(each, drafted[each.seq.seq_id]) for each in drafting]

    def _take_ahead(self, requests: collections.abc.Sequence[DraftRequest]) -> list[Proposal]:
        """Return the drafts that were made ahead and continue the texts of requests."""
        if not self._ahead.is_used:
            return []
        self._ahead.receive(self._worker.collect_ahead(wait=False))
        proposals = self._ahead.take(requests)
        served = {each.seq_id for each in proposals}
        is_waiting = any(
            each.may_wait and each.max_tokens and each.seq.seq_id not in served for each in requests
        )
        if is_waiting and self._ahead.is_expected:
            self._ahead.receive(self._worker.collect_ahead(wait=True))
            proposals += self._ahead.take(
                [each for each in requests if each.seq.seq_id not in served]
            )
        self._ahead.count(requests, {each.seq_id for each in proposals})
        return proposals

    def _may_draft_ahead(self, row: SentRow) -> bool:
        """Return whether the draft model has run a row's text, and drafts after it are useful."""
        seq_id = row.seq.seq_id
        progress, text = self._progress.get(seq_id), self._views.get(seq_id)
        if progress is None or text is None or row.num_next_tokens <= 0:
            return False
        if len(text.token_ids) != row.base_length:  # not read: the worker was loading, or late
            return False
        if len(row.draft_token_ids) > MAX_NUM_SPECULATIVE_TOKENS:  # of predicted output
            return False
        num_pending = len(text.token_ids) - progress.num_computed_tokens
        return num_pending <= self._max_pending and self._adapter.drafts_ahead(row.seq)

    def _ahead_rows(
        self, rows: collections.abc.Sequence[SentRow]
    ) -> Iterator[tuple[SentRow, AheadRow]]:
        """Yield what to draft ahead, as far as there is room for it; no sequence is preempted."""
        for row, plan in zip(rows, self._ahead.plan(rows), strict=True):
            seq, progress = row.seq, self._progress[row.seq.seq_id]
            text = self._views[seq.seq_id].token_ids
            drafts = self._adapter.to_draft(row.draft_token_ids)
            plan_with_room = self._with_room(seq, len(text), plan)
            if plan_with_room is None:
                continue
            start = progress.num_computed_tokens
            progress.base_length, progress.drafted = len(text), drafts
            yield (
                row,
                AheadRow(
                    seq.seq_id,
                    start,
                    (*text[start:], *drafts),
                    len(drafts),
                    plan_with_room.fan_out,
                    plan_with_room.num_draft_tokens,
                    seq.num_tokens,
                    progress.adapter_id,
                ),
            )

    def _with_room(self, seq: Sequence, num_tokens: int, plan: RowPlan) -> RowPlan | None:
        """Reserve slots for the nodes of a plan, or of a smaller one; return it, or None."""
        most = plan.within(self._limits.max_model_len - num_tokens)
        if most is None:
            return None
        chain = most.within(most.num_drafts + most.num_draft_tokens)
        for each in (most, chain):
            if each and self._blocks.reserve(seq.seq_id, num_tokens + each.num_nodes):
                return each
        return None

    def release(self, seq_id: int) -> None:
        """Release a sequence's blocks; cached ones may serve other sequences."""
        self._adapter.release(seq_id)
        self._ahead.release(seq_id)
        self._drop(seq_id)

    def check_integrity(self) -> None:
        """Assert that no block of the draft model's pool is lost."""
        self._blocks.check_integrity()
        assert self._blocks.holders <= set(self._progress), "blocks held for unknown sequences"

    def _settle(self, seq: Sequence) -> DraftView:
        """Update the state with the tokens that were verified since the last call."""
        text = self._adapter.view(seq)
        adapter_id = self._lora.id_for(seq.request.adapter_id)
        progress = self._progress.get(seq.seq_id)
        if progress is not None and progress.adapter_id != adapter_id:
            self._drop(seq.seq_id)
            progress = None
        if progress is not None:
            progress.settle(text)
            num_settled = min(progress.num_computed_tokens, text.num_settled)
            self._blocks.publish(seq.seq_id, text.token_ids, num_settled)
            if self._blocks.truncate(seq.seq_id, progress.num_computed_tokens):
                self._worker_view.truncate(seq.seq_id)
        elif text.is_whole and len(text.token_ids) <= self._limits.max_model_len:
            # Never the whole text: the token after the settled ones is a stand-in for the rest.
            known = text.token_ids[: text.num_settled + 1]
            keys = [root_key(seq.request.cache_salt, adapter_id)]
            num_cached = self._blocks.attach(seq.seq_id, known, keys)
            self._progress[seq.seq_id] = _Progress(num_cached, adapter_id)
        return text

    def _proposal(self, request: DraftRequest, row: DraftedRow) -> Proposal:
        seq, progress = request.seq, self._progress[request.seq.seq_id]
        progress.base_length = len(self._views[seq.seq_id].token_ids)
        # The KV after the text of a parallel draft is that of mask tokens.
        # That of the last token of another draft was not computed.
        progress.drafted = () if self._limits.parallel_drafting else row.token_ids[:-1]
        tokens = self._adapter.to_target(seq, row.token_ids, request.max_tokens)
        draft_probs = None if row.draft_probs is None else row.draft_probs[: len(tokens)]
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], tokens, draft_probs)

    def _draft_rows(
        self, requests: collections.abc.Sequence[DraftRequest], served: set[int]
    ) -> Iterator[tuple[DraftRequest, DraftRow]]:
        """Yield the drafts to wait for. served: sequences that have one."""
        for place, request in enumerate(requests):
            if not self._may_wait(request) or request.seq.seq_id in served:
                continue
            seq, text = request.seq, self._views[request.seq.seq_id]
            progress = self._progress.get(seq.seq_id)
            if progress is None or not text.is_whole or request.max_tokens <= 0:
                continue
            start, end = progress.num_computed_tokens, len(text.token_ids)
            # The last draft token needs no slot: nothing is computed from it.
            room = self._limits.max_model_len - end + 1
            most = min(room, self._limits.max_draft_tokens)
            count = min(self._adapter.num_draft_tokens(seq, request.max_tokens), most)
            if count <= 0 or end - start > self._max_pending:
                continue
            if self._make_room(seq, end + count - 1, requests[place + 1 :]):
                pending = tuple(text.token_ids[start:])
                row = DraftRow(
                    seq.seq_id, start, pending, count, seq.num_tokens, progress.adapter_id
                )
                yield request, row

    def _may_wait(self, request: DraftRequest) -> bool:
        """Return whether to draft now: a sequence that is not drafted for ahead always waits."""
        return request.may_wait or not self._adapter.drafts_ahead(request.seq)

    def _chunks(
        self, requests: collections.abc.Sequence[DraftRequest], drafting: set[int]
    ) -> Iterator[tuple[Sequence, StepRow]]:
        """Yield text for the draft model to run, up to the token before each sequence's last.

        Nothing of a text that does not fit into the pool: a part would only take up blocks.
        """
        idle = [request for request in requests if request.seq.seq_id not in drafting]
        budget = self._limits.max_catch_up_tokens
        for place, seq in enumerate(request.seq for request in idle):
            text, progress = self._views[seq.seq_id], self._progress.get(seq.seq_id)
            if progress is None or not text.is_whole or budget == 0:
                continue
            num_tokens = len(text.token_ids)
            start = progress.num_computed_tokens
            if not self._max_pending < num_tokens - start <= self._limits.max_model_len - start:
                continue
            if not self._make_room(seq, num_tokens, idle[place + 1 :]):
                continue
            end = min(num_tokens - 1, start + budget)
            progress.num_computed_tokens = end
            budget -= end - start
            tokens, adapter_id = tuple(text.token_ids[start:end]), progress.adapter_id
            yield seq, StepRow(seq.seq_id, start, tokens, 0, False, adapter_id=adapter_id)

    def _make_room(
        self, seq: Sequence, num_tokens: int, later: collections.abc.Sequence[DraftRequest]
    ) -> bool:
        """Reserve blocks for a sequence's first tokens, if necessary by preempting `later` ones.

        The last of these is preempted first. Thus some sequences get all their blocks, where
        otherwise all sequences might wait for the rest of theirs.
        """
        for request in reversed(later):
            if self._blocks.reserve(seq.seq_id, num_tokens):
                return True
            self._drop(request.seq.seq_id)
        return self._blocks.reserve(seq.seq_id, num_tokens)

    def _drop_beyond_context(self, requests: collections.abc.Sequence[DraftRequest]) -> None:
        """Release the blocks of sequences that have exceeded the draft model's context."""
        for seq in (request.seq for request in requests):
            if len(self._views[seq.seq_id].token_ids) > self._limits.max_model_len:
                self._drop(seq.seq_id)

    def _drop(self, seq_id: int) -> None:
        """Drop the draft model's KV of a sequence; `begin` attaches it again if necessary."""
        if self._progress.pop(seq_id, None) is not None:
            self._blocks.release(seq_id)
            self._worker_view.release(seq_id)
