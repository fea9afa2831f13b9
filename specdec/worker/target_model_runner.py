"""One rank of the target model: runs a step's forward pass and verifies the drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.kernels.reference.forward_batch import ForwardBatch, SlotMove
from specdec.models.heads.networks.base import DraftHead
from specdec.sampling.logprobs import KeptLogits
from specdec.sampling.vocab_shard import all_ranks_argmax
from specdec.types.messages import StepInput, StepRow, VerifiedRow, VerifyOutput
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.batch.prompt_outputs import prompt_logprobs_of
from specdec.worker.batch.step_rows import (
    invalid_chunks,
    positions_to_verify,
    scored_tokens,
    split_rows,
    valid_tokens,
)
from specdec.worker.batch.verification import (
    lookahead_tokens,
    verify_by_argmax,
    verify_in_parts,
    verify_sampled,
    with_rows,
)
from specdec.worker.device.eligibility import drafted_by_host, verified_by_host
from specdec.worker.device.head.block import num_scratch_blocks
from specdec.worker.device.input.rows import without_next_drafts
from specdec.worker.device.queue import DeviceQueue
from specdec.worker.device.step_graphs import GraphBackend, GraphReport
from specdec.worker.device.steps import DeviceSteps
from specdec.worker.head.drafter import rank_drafter
from specdec.worker.head.runner import HeadRunner
from specdec.worker.head.versions import HeadVersions, LoadHead
from specdec.worker.model_runner import LoadedModel, ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedHead:
    """A draft head beside a target. load: loads other versions of it, to be used later."""

    head: DraftHead
    load: LoadHead


class TargetModelRunner(ModelRunner):
    """Executes steps in order; with several ranks each gets the same steps.

    head, head_versions: of a draft head, if there is one. drafter: drafts at the end of each step,
    by a head or by lookups; None where nothing does.
    device_steps: runs the steps that need nothing from the host; None where the host runs all.
    graph_report: what these have captured.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        limits: EngineConfig,
        *,
        head: ServedHead | None = None,
        on_device: bool = False,
        graphs: GraphBackend | None = None,
    ) -> None:
        """Allocate the KV pool, and capture graphs; with several ranks a collective call.

        on_device: whether the device runs steps, which takes a DeviceDecoder and a padding block.
        graphs: captures them, if any.
        """
        super().__init__(loaded, limits)
        self.head = None if head is None else self._head_runner(head.head, limits)
        self.drafter = rank_drafter(self.head, limits)
        self.head_versions = HeadVersions(self.head, head.load) if head and self.head else None
        self.device_steps, self.graph_report, self._queue = None, None, None
        if on_device:
            self.device_steps, self.graph_report = self._device_steps(limits, graphs)
            self._queue = DeviceQueue(self.device_steps, self.drafter, self.group)
        self._updated: StepInput | None = None  # the last step whose changes were applied

    def _head_runner(self, head: DraftHead, limits: EngineConfig) -> HeadRunner:
        speculation = limits.speculation
        method = speculation.head if speculation else None
        return HeadRunner(
            head,
            self._batch_state,
            self._shard,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=limits.max_model_len,
            max_pairs=limits.max_num_batched_tokens,
            feature_dtype=self.model.dtype,
            tree_choices=method.tree_choices if method else (),
            has_confidences=speculation is not None and speculation.uses_confidences,
            has_padding_block=self.has_padding_block,
            num_scratch_blocks=num_scratch_blocks(head, limits) if self.has_padding_block else 0,
            on_replace=self._replace_drafter,
        )

    def _device_steps(
        self, limits: EngineConfig, graphs: GraphBackend | None
    ) -> tuple[DeviceSteps, GraphReport]:
        speculation = limits.speculation
        return self._captured_steps(
            graphs,
            max_draft_tokens=speculation.max_chain_tokens if speculation else 0,
            max_tree_nodes=speculation.num_draft_tree_tokens if speculation else 0,
            max_tree_depth=speculation.num_speculative_tokens if speculation else 0,
            max_step_tokens=limits.max_num_batched_tokens,
            drafter=None if self.drafter is None else self.drafter.parts,
        )

    def _replace_drafter(self) -> None:
        if self.device_steps is not None and self.drafter is not None:
            self.device_steps.replace_drafter(self.drafter.parts)

    def close(self) -> None:
        """Drop the steps in flight, and destroy the graphs; no step may follow."""
        if self._queue is not None:
            self._queue.clear()
        if self.device_steps is not None:
            self.device_steps.close()

    def execute(self, step: StepInput) -> VerifyOutput:
        """Run one step; return the same output on every rank. None may be in flight."""
        self.settle()
        self._update(step)
        if not step.rows:
            return VerifyOutput(step.step_id, ())
        rows = self._batch_state.resolve_pending(step.rows)
        if self._queue is not None:
            states = self._batch_state.states(rows)
            for seq_ids in drafted_by_host(rows, states):
                own = without_next_drafts(rows, seq_ids)
                if self._queue.begin(step.step_id, own, states):
                    self._batch_state.save_states(step)
                    output = self._verified_by_host(self._queue.collect_settled(), rows, states)
                    return self._drafted_by_host(output, rows, seq_ids)
        output = self._run(step.step_id, rows)
        self._batch_state.save_states(step)
        return output

    def begin(self, step: StepInput) -> bool:
        """Begin a step on the device after the one in flight, if any, for `collect`.

        Returns False where the device cannot run it, or the step has to wait for the result of
        that one. Only the sequences may have been updated then, as `execute` or the next call for
        the same step does not do again. Several ranks return the same after `needs_results`.
        """
        queue = self._queue
        if queue is None or not step.rows or not queue.has_room(step):
            return False
        follows_another = queue.num_unsettled > 0
        if follows_another and any(row.drafting.by_token for row in step.rows):
            return False
        self._update(step)
        rows = step.rows if follows_another else self._batch_state.resolve_pending(step.rows)
        states = self._batch_state.states(rows)
        is_begun = not verified_by_host(rows, states) and queue.begin(step.step_id, rows, states)
        if is_begun:
            self._batch_state.save_states(step)
        return is_begun

    def needs_results(self, step: StepInput) -> bool:
        """Return whether all steps in flight have to be collected before one, on all ranks."""
        return self._queue is not None and self._queue.needs_results(step)

    def settle(self) -> None:
        """Apply the results of the steps that were collected, of which none may be in flight."""
        assert not self.num_in_flight, "steps are collected in order"
        if self._queue is not None:
            self._queue.settle()

    def _verified_by_host(
        self, output: VerifyOutput, rows: Sequence[StepRow], states: Sequence[SequenceState]
    ) -> VerifyOutput:
        """Verify the rows whose verifiers the device lacks, of a step that it has run."""
        if not (seq_ids := verified_by_host(rows, states)):
            return output
        assert self.device_steps is not None
        own = [row for row in rows if row.seq_id in seq_ids]
        self.device_steps.forget_tokens(own)
        hidden = self.device_steps.hidden_of(rows, seq_ids)
        verified = verify_in_parts(self._verify, own, hidden, may_fail=self.group.size == 1)
        if self.drafter is not None:
            self.drafter.note_output(verified)
        return with_rows(output, verified, rows)

    def _drafted_by_host(
        self, output: VerifyOutput, rows: Sequence[StepRow], seq_ids: Set[int]
    ) -> VerifyOutput:
        """Draft after some rows of a step that the device has run."""
        if self.drafter is None or not seq_ids:
            return output
        own = without_next_drafts(rows, {row.seq_id for row in rows} - seq_ids)
        verified = tuple(row for row in output.rows if row.seq_id in seq_ids)
        if any(row.drafting.num_next or row.drafting.num_lookup for row in own):
            assert self.device_steps is not None
            verified = self.drafter.draft_next(own, self.device_steps.states_of(rows), verified)
        self._batch_state.hold_drafts(verified)
        return with_rows(output, verified, rows)

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step in flight; return its output."""
        assert self._queue is not None, "collect without begin"
        return self._queue.collect()

    @property
    def num_in_flight(self) -> int:
        """Steps that the device runs, and that were not collected."""
        return 0 if self._queue is None else self._queue.num_in_flight

    @property
    def is_step_done(self) -> bool:
        """Return whether the oldest step in flight has ended, so that `collect` does not wait."""
        assert self._queue is not None, "no step was begun"
        return self._queue.is_done

    def _update(self, step: StepInput) -> None:
        """Apply what a step changes about sequences, unless it was applied for the same step."""
        if step is self._updated:
            return
        self._updated = step
        self._batch_state.update(step)
        if self.device_steps is not None:
            self.device_steps.update(step.released, step.block_table_deltas)
        if self.drafter is not None:
            self.drafter.update(step)

    def _run(self, step_id: int, rows: Sequence[StepRow]) -> VerifyOutput:
        """Run rows by operators that the host launches, and whose results it reads.

        After a failed allocation they run in two parts.
        """
        if self.device_steps is not None:
            self.device_steps.forget_tokens(rows)
        output = self._run_whole(step_id, rows)
        return self._run_in_parts(step_id, rows) if output is None else output

    def _run_whole(self, step_id: int, rows: Sequence[StepRow]) -> VerifyOutput | None:
        """Run rows in one forward pass; return None where the memory does not suffice.

        With several ranks the others would wait for this one in a collective operation; the group
        then fails as a whole. So does a pass that has changed states, which cannot be run twice.
        """
        state = self._batch_state
        try:
            state.update_histories(rows)
            batch = state.forward_batch(rows)
            hidden, states = self._forward(batch)
            compute_logits = self.model.compute_logits
            prompt_logprobs = prompt_logprobs_of(rows, hidden, state, compute_logits, self._shard)
            verified = (*self._verify(rows, hidden), *invalid_chunks(rows, hidden))
        except torch.OutOfMemoryError:
            if self.group.size > 1 or self._has_states or not split_rows(rows):
                raise
            return None
        moves = self._compact(rows, verified)
        if self.drafter is not None:
            verified = self.drafter.draft(rows, batch, states, verified, moves)
            state.hold_drafts(verified)
        return VerifyOutput(step_id, verified, prompt_logprobs)

    def _run_in_parts(self, step_id: int, rows: Sequence[StepRow]) -> VerifyOutput:
        """Run the two parts of rows one after the other, with the memory of the failed pass."""
        num_tokens = sum(len(row.token_ids) for row in rows)
        logger.warning("out of memory in a step of %d tokens: it runs in parts", num_tokens)
        if self.kv_cache.is_cuda:
            torch.cuda.empty_cache()
        first, second = (self._run(step_id, part) for part in split_rows(rows))
        prompt_logprobs = first.prompt_logprobs + second.prompt_logprobs
        return VerifyOutput(step_id, (*first.rows, *second.rows), prompt_logprobs)

    def _forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, hidden_size], and those that the head reads (`DraftHead`)."""
        if self.drafter is None or not self.drafter.taps:
            hidden = self.model(batch, self.kv_cache)
            return hidden, hidden
        return self.model.forward_with_taps(batch, self.kv_cache, self.drafter.taps)

    def execute_on_host(self, step: StepInput) -> VerifyOutput:
        """Run a step of a row or more by operators that the host launches, and none in flight."""
        self.settle()
        self._update(step)
        return self._run(step.step_id, step.rows)

    def _verify(self, step_rows: Sequence[StepRow], hidden: Tensor) -> list[VerifiedRow]:
        """Verify the rows that sample; hidden: [T, hidden_size].

        Logits are computed for the last known token and the guesses of each row only.
        """
        rows = [row for row in step_rows if row.samples]
        if not rows:
            return []
        scored = scored_tokens(step_rows)
        hidden = hidden if len(scored) == len(hidden) else hidden[scored]
        argmax_of = self._row_ops.argmax
        logits, argmax = self.model.compute_logits_and_argmax(hidden, argmax_of)
        if all(map(self._batch_state.is_plain_greedy, rows)):  # the rest would not change anything
            global_argmax = all_ranks_argmax(argmax, self._shard)
            tokens = verify_by_argmax(global_argmax, rows)
            return self._record_output(rows, tokens, global_argmax.invalid_rows)
        if lookahead := lookahead_tokens(rows, argmax, self._shard):
            positions = torch.tensor(positions_to_verify(rows), device=logits.device)
            logits, argmax = logits[positions], argmax.take(positions)
        rules = [self._batch_state.rules(row.seq_id) for row in rows]
        kept = KeptLogits(logits, rows, [each.listed_tokens for each in rules])
        has_nan = argmax.has_nan
        processor = self._batch_state.logits_processor(rows)
        logits = processor.apply(logits)
        if processor.rows:
            argmax = argmax.with_rows(processor.rows, argmax_of(logits[processor.rows]))
        # NaN is detected in the model's own logits, even where the rules mask the token.
        global_argmax = all_ranks_argmax(replace(argmax, has_nan=has_nan), self._shard)
        if all(each.is_greedy for each in rules):
            tokens = verify_by_argmax(global_argmax, rows)
        else:
            tokens = verify_sampled(self._batch_state, self._shard, rows, logits, argmax)
        verified = self._record_output(rows, tokens, global_argmax.invalid_rows, kept)
        if not lookahead:
            return verified
        return [row._replace(lookahead_token_ids=lookahead.get(row.seq_id, ())) for row in verified]

    def _record_output(
        self,
        rows: Sequence[StepRow],
        verified: Sequence[tuple[int, ...]],
        is_invalid: Sequence[bool],
        kept: KeptLogits | None = None,
    ) -> list[VerifiedRow]:
        """Append the new tokens to the sequences, and return them with their log-probabilities.

        is_invalid: whether each row of logits holds NaN. Tokens of a sequence end before the first
        invalid row; the next step begins with that row. kept: logits of the rows that request
        log-probabilities.
        """
        output: list[tuple[StepRow, tuple[int, ...]]] = []
        end = 0
        for row, token_ids in zip(rows, verified, strict=True):
            start, end = end, end + row.num_draft_tokens + 1
            output.append((row, valid_tokens(row, token_ids, is_invalid[start:end])))
        logprobs = kept.logprobs(output, self._shard) if kept else {}
        for row, token_ids in output:
            self._batch_state.append_output(row, token_ids)
        return [
            VerifiedRow(
                row.seq_id, token_ids, logprobs.get(row.seq_id), has_bad_logits=not token_ids
            )
            for row, token_ids in output
        ]

    def _compact(
        self, rows: Sequence[StepRow], verified: Sequence[VerifiedRow]
    ) -> Sequence[SlotMove]:
        """Move the KV of the accepted nodes of trees to consecutive slots after their base.

        Returns the moves, which whatever else is stored by slot has to follow.
        """
        if not any(row.drafting.parents for row in rows):
            return ()
        tokens = {row.seq_id: row.token_ids for row in verified}
        self._batch_state.keep_paths(rows, tokens)
        moves = self._batch_state.compaction(rows, tokens)
        if moves:
            self.model.move_kv(self.kv_cache, moves)
        return moves
