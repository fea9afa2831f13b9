"""The engine: requests in, tokens out, one step at a time.

Synchronous, single-threaded, without a clock or randomness of its own.
"""

from __future__ import annotations

import collections.abc
from collections import deque

from specdec.config.engine import EngineConfig
from specdec.engine.async_scheduling import rows_ahead
from specdec.engine.input_processor import RequestIntake, leaves_any
from specdec.engine.output_builder import output_of
from specdec.engine.outputs import RequestOutput
from specdec.engine.scheduler import ScheduledRow, Scheduler
from specdec.engine.speculator import Drafting
from specdec.engine.stop_checker import ending_after_last_token
from specdec.models.config import ModelConfig
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.output_buffer import ToldTokens
from specdec.sequences.sequence import Choices, EngineRequest, Lookahead, Sequence, SequenceStatus
from specdec.sequences.worker_view import WorkerLedger
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposal, Proposer, make_proposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.errors import (
    BadLogitsError,
    GrammarError,
    InvalidValueError,
    NoTokenLeftError,
    SpecdecError,
)
from specdec.types.messages import StepInput, StepRow, VerifiedRow, VerifyOutput
from specdec.types.stats import EngineCounters, EngineStats
from specdec.types.worker import Target


class Engine:
    """Schedules, drafts, verifies and commits. The same with speculation on or off."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        target: Target,
        tokenizer: Tokenizer,
        proposer: Proposer | None = None,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        """`proposer` drafts; None makes the one that `config.speculation` asks for.

        A draft model needs a worker, so a proposer with one is made by whoever has it.
        `policy` decides each step how much to draft; None drafts as configured at every load.
        """
        self.config = config
        self._model = model
        self._target = target
        self._intake = RequestIntake(config, model, tokenizer)
        self._blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(config, self._blocks)
        self._drafting = Drafting(
            config.speculation, proposer or make_proposer(config.speculation), policy
        )
        self._choices: dict[str, Choices] = {}  # by request id
        self._next_seq_id = 0
        self._in_flight: deque[list[tuple[Sequence, StepRow]]] = deque()  # the steps, in order
        self._may_run_ahead = False
        self._ledger = WorkerLedger(self._blocks)
        self._counters = EngineCounters()
        if policy is not None:
            self.set_speculation(policy.control)

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises InvalidValueError or OverloadedError, and then keeps nothing."""
        if request.request_id in self._choices:
            raise InvalidValueError("request_id", request.request_id, "unused by a running request")
        sequences = self._intake.sequences(request, self._next_seq_id)
        self._scheduler.add(sequences)
        self._choices[request.request_id] = Choices(sequences, len(request.resume_token_ids))
        self._next_seq_id += len(sequences)
        self._counters.num_prompt_tokens += sum(seq.num_prompt_tokens for seq in sequences)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidValueError where `add` would for what the request asks. From any thread."""
        self._intake.sequences(request, self._next_seq_id)

    def abort(self, request_id: str) -> None:
        """Ends all choices of a request and frees their blocks.

        A request that is unknown or has ended is no error.
        """
        choices = self._choices.get(request_id)
        for seq in tuple(choices.unfinished) if choices else ():
            self._finish(seq)

    def set_speculation(self, control: SpeculationControl) -> None:
        """Takes over what an operator wants, from the next step on. Needs a policy.

        Raises InvalidValueError, and changes nothing, where control would not allow the verifier
        that requests get unless they name one.
        """
        assert self._drafting.policy is not None, "an engine without a policy cannot be told"
        self._intake.allow_verifiers(control.allowed_verifiers)
        self._drafting.policy.update(control)
        self._may_run_ahead = False  # the next step goes by the new control
        self._scheduler.heeds_requests = control.allow_request_override

    def expire(self, now_s: float) -> list[str]:
        """Ends the requests that have waited past their deadline, and returns their ids."""
        expired = [seq.request.request_id for seq in self._scheduler.expired(now_s)]
        for request_id in expired:
            self.abort(request_id)
        return expired

    def replace_target(self, target: Target) -> None:
        """Goes on with a target that knows nothing, as after the loss of the one before.

        Every running sequence is computed again from its tokens; what was in flight is dropped.
        """
        self._target = target
        self._in_flight.clear()
        self._drafting.forget_step()
        for seq in self._scheduler.preempt_all():
            self._forget(seq)
        self._blocks.clear()
        self._ledger = WorkerLedger(self._blocks)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._choices or self._in_flight)

    @property
    def last_batch_size(self) -> int:
        """How many sequences the last step brought tokens to."""
        return self._counters.last_batch_size

    @property
    def begun(self) -> tuple[str, ...]:
        """The requests whose first choice left the queue in the last step, for the first time."""
        return tuple(seq.request.request_id for seq in self._scheduler.begun if seq.choice == 0)

    def step(self) -> list[RequestOutput]:
        """Collects and commits the step in flight, and begins the next before it returns.

        So whoever delivers the outputs does it while the next forward pass runs. Where it can be
        made beforehand, the next step is begun even before that in flight is collected.
        """
        self._counters.last_batch_size = 0
        is_ahead = self._run_ahead()
        outputs = self._commit(self._target.collect()) if self._in_flight else []
        decision = self._drafting.decide(self._scheduler.num_decoding, self._scheduler.num_willing)
        self._may_run_ahead = self.config.async_scheduling and not decision.num_draft_tokens
        if is_ahead:
            self._scheduler.go_on()
            # Otherwise it is not as was just decided, or runs in vain.
            if self._may_run_ahead and self._scheduler.num_decoding:
                self._drafting.begin_step([row for _, row in self._in_flight[0]])
            return outputs
        rows = self._scheduler.schedule(decision)
        for seq in self._scheduler.preempted:
            self._forget(seq)
        failed = self._begin(rows, self._propose(rows) if decision.num_draft_tokens else {})
        return outputs + failed

    def stats(self) -> EngineStats:
        """The load now, and the counters since the start."""
        policy, by_method = self._drafting.policy, self._counters.by_method
        estimate = policy.estimate if policy else None
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_decoding=self._scheduler.num_decoding,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            num_steps=self._counters.num_steps,
            last_batch_size=self._counters.last_batch_size,
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._counters.num_prompt_tokens,
            num_cached_tokens=self._scheduler.num_cached_tokens,
            num_prefill_chunks=self._counters.num_prefill_chunks,
            num_generated_tokens=self._counters.num_generated_tokens,
            num_lookahead_tokens=self._counters.num_lookahead_tokens,
            is_speculation_on=self._drafting.is_on,
            num_speculation_flips=policy.num_flips if policy else 0,
            decision=policy.decision if policy else None,
            decisions=policy.log.counts if policy else {},
            decided_lengths=policy.log.lengths if policy else (),
            decision_changes=policy.log.changes if policy else (),
            drafted_by_position=self._counters.accepted_by_position.drafted,
            drafted_by_method={name: each.drafted for name, each in by_method.items()},
            accepted_by_method={name: each.counts for name, each in by_method.items()},
            estimated_speedup=estimate.speedup if estimate else None,
            estimated_tokens_per_s=estimate.tokens_per_s if estimate else None,
            capacity_tokens_per_s=policy.capacity_tokens_per_s if policy else None,
            speculation=self._counters.speculation,
            accepted_by_position=self._counters.accepted_by_position.counts,
        )

    def check_integrity(self) -> None:
        """Asserts that no block is lost, shared, or held by a sequence that has ended."""
        self._blocks.check_integrity()
        open_sequences = [seq for each in self._choices.values() for seq in each.unfinished]
        running = {seq.seq_id for seq in open_sequences if seq.status is SequenceStatus.RUNNING}
        assert self._blocks.holders <= running, "blocks held by sequences that do not run"

    def _propose(self, rows: collections.abc.Sequence[ScheduledRow]) -> dict[int, Proposal]:
        """Drafts for the rows that have room for some; the others' turn will come."""
        return self._drafting.propose([row for row in rows if self._scheduler.may_draft(row.seq)])

    def _run_ahead(self) -> bool:
        """Begins the step behind the one in flight, where it is known; returns whether it was."""
        if not (self._may_run_ahead and len(self._in_flight) == 1 and self._scheduler.is_closed):
            return False
        [in_flight] = self._in_flight
        num_left = sum(seq.status is SequenceStatus.RUNNING for seq, _ in in_flight)
        if num_left < self._scheduler.num_running:
            return False  # some had no part in the step in flight, and may have one in the next
        rows = rows_ahead(in_flight, self._blocks, self.config.max_model_len)
        if not rows or (self._scheduler.num_waiting and len(rows) < num_left):
            return False  # whoever waits takes the place of who ends
        self._send(rows)
        return True

    def _begin(
        self, rows: collections.abc.Sequence[ScheduledRow], drafts: dict[int, Proposal]
    ) -> list[RequestOutput]:
        """Has the target run `rows`; returns the ends of those whose grammar has got stuck."""
        begun: list[tuple[Sequence, StepRow]] = []
        failed: list[RequestOutput] = []
        for row in rows:
            if row.seq.status is not SequenceStatus.RUNNING:
                continue  # another choice of its request has failed, just now
            try:
                begun.append((row.seq, row.step_row(drafts.get(row.seq.seq_id))))
            except GrammarError as error:
                failed.append(self._fail(row.seq, error))
        begun = [(seq, row) for seq, row in begun if seq.status is SequenceStatus.RUNNING]
        if begun:
            self._send(begun)
            self._drafting.begin_step([row for _, row in begun])
        return failed

    def _send(self, rows: list[tuple[Sequence, StepRow]]) -> None:
        news = self._ledger.news(seq for seq, _ in rows)
        step = StepInput(
            step_id=self._counters.num_steps,
            released=news.released,
            admitted=news.admitted,
            block_table_deltas=news.block_table_deltas,
            rows=tuple(row for _, row in rows),
        )
        self._counters.num_steps += 1
        self._in_flight.append(rows)
        self._target.begin(step)

    def _commit(self, verified: VerifyOutput) -> list[RequestOutput]:
        results = {row.seq_id: row for row in verified.rows}
        prompts = {part.seq_id: part for part in verified.prompt_logprobs}
        outputs: list[RequestOutput] = []
        held_back: list[Sequence] = []
        told_intervals: set[int] = set()
        for seq, row in self._in_flight.popleft():
            if seq.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            result = results.get(seq.seq_id)
            if seq.seq_id in prompts:
                seq.prompt_report.add(prompts[seq.seq_id])
            if result is not None and result.has_bad_logits:
                outputs.extend(self._on_bad_logits(seq, row))
            elif result is not None:
                output = self._append(seq, row, result)
                if output is None:
                    held_back.append(seq)
                else:
                    outputs.append(output)
                    if len(output.token_ids) >= seq.untold.interval:
                        told_intervals.add(seq.untold.interval)
            else:
                seq.num_computed_tokens += len(row.token_ids)
                self._counters.num_prefill_chunks += 1
                self._publish(seq)
        self._drafting.end_step()
        return outputs + [
            output_of(seq, self._choices[seq.request.request_id], seq.untold.take(), None)
            for seq in held_back
            if seq.status is SequenceStatus.RUNNING and seq.untold.joins(told_intervals)
        ]

    def _on_bad_logits(self, seq: Sequence, row: StepRow) -> list[RequestOutput]:
        """Ends a request, of whose KV nothing is published; beside guesses it gets another chance.

        A guess can only have spoilt the row, as attention adds up its numbers too, by 0.
        """
        if row.guesses:
            seq.may_draft = False
            self._drop_rejected(seq)
            return []
        return [self._fail(seq, self._why_none_follows(seq, row))]

    def _why_none_follows(self, seq: Sequence, row: StepRow) -> SpecdecError:
        tokens, num_output = seq.token_ids, seq.num_output_tokens
        mask = None if row.grammar_mask is None else row.grammar_mask[0]
        has_choice = leaves_any(seq.rules, tokens, num_output, self._model.vocab_size, mask)
        return BadLogitsError(num_output) if has_choice else NoTokenLeftError(num_output)

    def _append(self, seq: Sequence, row: StepRow, verified: VerifiedRow) -> RequestOutput | None:
        """Adds verified tokens up to the one that ends the sequence, if one does.

        Returns what is to be told by now; None where that is held back.
        """
        token_ids = verified.token_ids
        ending, num_kept = None, 0
        while ending is None and num_kept < len(token_ids):
            seq.token_ids.append(token_ids[num_kept])
            num_kept += 1
            ending = ending_after_last_token(
                seq, self._model.eos_token_ids, self.config.max_model_len
            )
        seq.num_computed_tokens = seq.num_tokens - 1
        self._publish(seq)
        self._counters.num_generated_tokens += num_kept
        self._counters.num_lookahead_tokens += row.num_lookahead_tokens
        choices = self._choices[seq.request.request_id]
        choices.num_output_tokens += num_kept
        num_accepted = min(num_kept, len(token_ids) - 1)
        drafter = self._drafting.drafter(seq.seq_id)
        choices.speculation = choices.speculation.after_draft(row.num_draft_tokens, num_accepted)
        self._counters.record_draft(drafter, row.num_draft_tokens, num_accepted)
        self._drafting.judge(seq, row.num_draft_tokens, len(token_ids) - 1)
        if ending is None:
            seq.lookahead = _seen(row, verified)
            self._drop_rejected(seq)
        else:
            self._finish(seq)
        logprobs = None if verified.logprobs is None else verified.logprobs[:num_kept]
        seq.untold.add(token_ids[:num_kept], logprobs, num_accepted)
        self._counters.last_batch_size += 1
        if ending is None and not seq.untold.is_due:
            return None
        return output_of(seq, choices, seq.untold.take(), ending)

    def _publish(self, seq: Sequence) -> None:
        self._blocks.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)

    def _drop_rejected(self, seq: Sequence) -> None:
        """Gives back the blocks that only rejected drafts had needed; a step ahead has none."""
        if not self._in_flight and self._blocks.truncate(seq.seq_id, seq.num_computed_tokens):
            self._ledger.truncate(seq.seq_id)

    def _finish(self, seq: Sequence) -> None:
        choices = self._choices[seq.request.request_id]
        choices.unfinished.remove(seq)
        if not choices.unfinished:
            del self._choices[seq.request.request_id]
        self._scheduler.finish(seq)
        self._forget(seq)

    def _fail(self, seq: Sequence, error: SpecdecError) -> RequestOutput:
        """Ends all choices of a request, one of which cannot go on; others are not concerned."""
        choices = self._choices[seq.request.request_id]
        self.abort(seq.request.request_id)
        return output_of(seq, choices, ToldTokens(), None)._replace(error=error)

    def _forget(self, seq: Sequence) -> None:
        """Has target and proposer drop a sequence that lost its blocks."""
        seq.lookahead = None
        self._ledger.forget(seq.seq_id)
        self._drafting.release(seq.seq_id)


def _seen(row: StepRow, verified: VerifiedRow) -> Lookahead | None:
    """What a row with lookahead tokens has shown."""
    if not row.num_lookahead_tokens:
        return None
    lookahead = row.guesses[row.num_draft_tokens :]
    return Lookahead(row.known_end, row.drafts, lookahead, verified.lookahead_token_ids)
