"""The engine: requests in, tokens out, one step at a time.

Synchronous and single-threaded; clock and recorder are injected, and it draws no random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.config.engine import EngineConfig
from specdec.engine.async_scheduling import (
    Rows,
    StepsInFlight,
    rows_ahead,
    schedule_ahead,
)
from specdec.engine.input_processor import InputProcessor, has_allowed_token
from specdec.engine.metrics import Metrics, StepRecorder
from specdec.engine.outputs import TargetLostError, output_of
from specdec.engine.scheduled_row import ScheduledRow
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculator import NO_DRAFTING, Drafting, Speculator
from specdec.engine.stop_checker import Stop, check_stop
from specdec.engine.suspects import Suspects
from specdec.models.config import ModelConfig
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.output_buffer import BufferedTokens
from specdec.sequences.sequence import (
    Choices,
    EngineRequest,
    HeadDraft,
    Lookahead,
    Sequence,
    SequenceStatus,
)
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposer, make_proposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.draft_decision import Decision
from specdec.types.errors import (
    BadLogitsError,
    CrashingRequestError,
    GrammarError,
    InvalidValueError,
    NoTokenLeftError,
    SpecdecError,
    TargetFailedError,
)
from specdec.types.messages import StepRow, Target, VerifiedRow, VerifyOutput
from specdec.types.responses import EngineOutput
from specdec.types.stats import Counts, DraftCounter, EngineStats


class Engine:
    """Step loop of one model: schedules, drafts, verifies and commits."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        target: Target,
        tokenizer: Tokenizer,
        proposer: Proposer | None = None,
        policy: SpeculationPolicy | None = None,
        *,
        recorder: StepRecorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make an engine without requests.

        proposer: None makes the one of `config.speculation`, unless that needs a draft model.
        policy: decides each step how much to draft; None drafts as configured at every load.
        recorder: receives the seconds of each draft and verification, by `clock`, and batch sizes.
        """
        self.config = config
        self._model = model
        self._recorder = recorder or Metrics()
        self._clock = clock
        self._inputs = InputProcessor(config, model, tokenizer)
        self._blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._steps = StepsInFlight(
            target, self._blocks, self._recorder, clock, needs_tokens=_head_needs_tokens(config)
        )
        self._counts = Counts()  # the fields about drafts are in _drafts
        self._drafts = DraftCounter()
        self._scheduler = Scheduler(config, self._blocks, self._counts)
        self._speculator = Speculator(
            config.speculation, proposer or make_proposer(config.speculation), policy
        )
        self._suspects = Suspects()
        self._choices: dict[str, Choices] = {}  # by request id
        self._next_seq_id = 0
        self._decision: Decision | None = None  # in force for steps that are begun ahead
        self._drafting_ahead = NO_DRAFTING
        self._batch_size = 0  # sequences for which the last step produced tokens

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidValueError and then keeps nothing.

        There must be room for it: `EngineThread.generate` checks that, the scheduler asserts it.
        """
        if request.request_id in self._choices:
            raise InvalidValueError("request_id", request.request_id, "unused by a running request")
        sequences = self._inputs.sequences(request, self._next_seq_id, self.control)
        self._scheduler.add(sequences, self._clock())
        self._choices[request.request_id] = Choices(sequences, len(request.resume_token_ids))
        self._next_seq_id += len(sequences)
        self._counts.num_prompt_tokens += sum(seq.num_prompt_tokens for seq in sequences)

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidValueError where `add` would for the request's values. Thread-safe.

        Only `add` compares resume_token_ids with the grammar.
        """
        self._inputs.check(request, self.control)

    def abort(self, request_id: str) -> None:
        """End all choices of a request and free their blocks; ignore unknown and ended requests."""
        choices = self._choices.get(request_id)
        for seq in tuple(choices.unfinished) if choices else ():
            self._finish(seq)

    @property
    def control(self) -> SpeculationControl:
        """The speculation settings in force for policy, scheduler and input processor."""
        return self._speculator.control

    def set_speculation(self, control: SpeculationControl) -> None:
        """Put settings in force from the next step on. Needs a policy.

        Raises InvalidValueError, and changes nothing, where `control` does not allow the verifier
        of requests that choose none.
        """
        if self.config.speculation is not None:  # its own validation knows the default verifier
            self.config.speculation.require_allowed(control.allowed_verifiers)
        self._speculator.set_control(control)
        self._decision = None  # the next step is scheduled under the new settings

    def expire(self, now_s: float) -> list[str]:
        """End the requests that are queued past their deadline, and return their ids."""
        expired = [seq.request.request_id for seq in self._scheduler.expired(now_s)]
        for request_id in expired:
            self.abort(request_id)
        return expired

    def record_loss(self) -> list[EngineOutput]:
        """Record that the target is lost, once and before `replace_target`.

        Returns an error for the request that caused it, if that is known; see `Suspects`.
        """
        cause = self._suspects.record_loss(self._steps.sequences)
        if cause is None:
            return []
        return [self._fail(cause, CrashingRequestError(cause.num_output_tokens))]

    def replace_target(self, target: Target) -> None:
        """Continue with a target that has no state, as after the loss of the previous one.

        Every running sequence is recomputed from its tokens; the steps in flight are dropped.
        """
        self._steps.replace_target(target)
        self._speculator.forget_step()
        self._preempt_all()
        self._blocks.clear()

    def _preempt_all(self) -> None:
        for seq in self._scheduler.preempt_all():
            self._release(seq)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._choices or self._steps)

    @property
    def newly_scheduled(self) -> tuple[str, ...]:
        """Ids of requests whose first choice the last step scheduled for the first time."""
        new = self._scheduler.newly_scheduled
        return tuple(seq.request.request_id for seq in new if seq.choice == 0)

    def step(self) -> list[EngineOutput]:
        """Collect and commit the step in flight, and begin the next one before returning.

        The caller delivers the outputs while the next forward pass runs. With asynchronous
        scheduling the next step begins even before the one in flight is collected.

        Raises TargetLostError, with the outputs that were committed before the target was lost.
        """
        outputs: list[EngineOutput] = []
        self._scheduler.keep_batch()  # `newly_scheduled` is of this step, also if it is lost
        try:
            self._advance(outputs)
        except TargetFailedError as error:
            raise TargetLostError(str(error), outputs) from error
        return outputs

    def _advance(self, outputs: list[EngineOutput]) -> None:
        """Run a step, and add its outputs as they are committed."""
        before = self._decision
        is_ahead = self._begin_ahead()
        outputs += self._collect()
        decision = self._decide()
        if is_ahead:
            is_as_decided = before is not None and decision.shape == before.shape
            self._keep_batch(is_as_decided=is_as_decided)
            return
        rows = self._schedule(decision)
        drafting = self._propose(rows, decision)
        started = self._step_rows(rows, drafting, outputs)
        if started:
            self._begin(started, drafting)

    def stats(self) -> EngineStats:
        """Return the present load and a snapshot of the counters."""
        policy = self._speculator.policy
        estimate = policy.estimate if policy else None
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_decoding=self._scheduler.num_decoding,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            last_batch_size=self._batch_size,
            is_speculation_on=self._speculator.is_on,
            num_speculation_flips=policy.num_flips if policy else 0,
            decision=policy.decision if policy else None,
            decision_changes=policy.log.changes if policy else (),
            estimated_speedup=estimate.speedup if estimate else None,
            estimated_tokens_per_s=estimate.tokens_per_s if estimate else None,
            capacity_tokens_per_s=policy.capacity_tokens_per_s if policy else None,
            counts=self._snapshot(),
        )

    def _snapshot(self) -> Counts:
        counts, policy = self._drafts.added_to(self._counts), self._speculator.policy
        if policy is not None:
            counts.decisions = {each.value: n for each, n in policy.log.counts.items()}
            counts.decided_lengths = policy.log.lengths
            observed = policy.observed
            counts.measured_s, counts.profiled_s = observed.measured, observed.profiled
        return counts

    def check_integrity(self) -> None:
        """Assert that no block is lost, shared, or held by a sequence that has ended."""
        self._blocks.check_integrity()
        open_sequences = [seq for each in self._choices.values() for seq in each.unfinished]
        running = {seq.seq_id for seq in open_sequences if seq.status is SequenceStatus.RUNNING}
        assert self._blocks.holders <= running, "blocks held by sequences that do not run"

    def _decide(self) -> Decision:
        scheduler, control = self._scheduler, self.control
        decision = self._speculator.decide(scheduler.num_decoding, scheduler.num_eligible(control))
        may_run_ahead = self.config.async_scheduling and self._suspects.current is None
        self._decision = decision if may_run_ahead else None
        return decision

    def _schedule(self, decision: Decision) -> list[ScheduledRow]:
        self._scheduler.admit_only(self._suspects.current)
        rows = self._scheduler.schedule(decision, self.control)
        for seq in self._scheduler.preempted:
            self._release(seq)
        return rows

    def _propose(self, rows: list[ScheduledRow], decision: Decision) -> Drafting:
        """Draft for the eligible rows, those with room for 0 draft tokens included, and time it.

        Speculation that is off is free here: without draft tokens to spend the proposer is not
        called, and the scheduler has reserved no KV slot beyond each sequence's next token.
        """
        if not decision.num_draft_tokens:
            return NO_DRAFTING
        eligible = self._eligible(rows)
        began_at_s = self._clock()
        drafting = self._speculator.propose(eligible)
        if any(row.num_draft_tokens for row in eligible):
            self._recorder.record_draft(self._clock() - began_at_s)
        return drafting

    def _eligible(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        control = self.control
        return [row for row in rows if row.seq.is_eligible(control)]

    def _begin_ahead(self) -> bool:
        """Begin the step behind the one in flight if its rows are known; return whether it was."""
        decision = self._decision
        if decision is None or len(self._steps) != 1:
            return False
        in_flight, control = self._steps.rows, self.control
        max_model_len = self.config.max_model_len
        scheduled = schedule_ahead(
            in_flight,
            self._scheduler,
            decision,
            control,
            max_model_len,
            holds_drafts=self._speculator.holds_drafts,
        )
        drafting: Drafting | None = NO_DRAFTING
        if scheduled and decision.num_draft_tokens:
            drafting = self._speculator.propose_ahead(self._eligible(scheduled))
        if drafting is None:
            return False
        rows = rows_ahead(scheduled, in_flight, drafting, max_model_len)
        if rows:
            self._send(rows)
            self._drafting_ahead = drafting
        return bool(rows)

    def _keep_batch(self, *, is_as_decided: bool) -> None:
        """Go on with the step that was begun ahead."""
        if self._scheduler.num_decoding:  # otherwise its results are discarded
            rows = [row for _, row in self._steps.rows]
            drafting = self._drafting_ahead.resolved(rows)
            self._speculator.begin_step(rows, drafting, is_as_decided=is_as_decided)

    def _step_rows(
        self,
        rows: list[ScheduledRow],
        drafting: Drafting,
        outputs: list[EngineOutput],
    ) -> Rows:
        """Return what the target runs; add an error for each request whose grammar got stuck."""
        started: Rows = []
        for row in rows:
            if row.seq.status is not SequenceStatus.RUNNING:
                continue  # another choice of its request has just failed
            try:
                started.append((row.seq, row.step_row(drafting.proposals.get(row.seq.seq_id))))
            except GrammarError as error:
                outputs.append(self._fail(row.seq, error))
        return [(seq, row) for seq, row in started if seq.status is SequenceStatus.RUNNING]

    def _begin(self, rows: Rows, drafting: Drafting) -> None:
        self._send(rows)
        self._speculator.begin_step([row for _, row in rows], drafting)

    def _send(self, rows: Rows) -> None:
        step_id = self._counts.num_steps
        self._counts.num_steps += 1
        self._counts.num_steps_ahead += bool(self._steps)
        self._steps.begin(step_id, rows)

    def _collect(self) -> list[EngineOutput]:
        """Wait for the oldest step in flight, if there is one, and commit it."""
        self._batch_size = 0
        if not self._steps:
            return []
        rows, verified = self._steps.collect()
        outputs = self._commit(rows, verified)
        self._steps.resolve()
        if self._suspects.complete(rows):
            self._preempt_all()  # the next suspect gets the whole KV pool
        if self._batch_size:
            self._recorder.record_batch(self._batch_size)
        return outputs

    def _commit(self, rows: Rows, verified: VerifyOutput) -> list[EngineOutput]:
        results = {row.seq_id: row for row in verified.rows}
        prompts = {part.seq_id: part for part in verified.prompt_logprobs}
        outputs: list[EngineOutput] = []
        buffered: list[Sequence] = []
        full_intervals: set[int] = set()
        for seq, row in rows:
            if seq.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            if seq.seq_id in prompts:
                seq.prompt_report.add(prompts[seq.seq_id])
            result = results.get(seq.seq_id)
            if result is None:
                seq.num_computed_tokens += len(row.token_ids)
                self._counts.num_prefill_chunks += 1
                self._publish(seq)
            elif result.has_bad_logits:
                outputs.extend(self._on_bad_logits(seq, row))
            elif (output := self._commit_tokens(seq, row, result)) is None:
                buffered.append(seq)
            else:
                outputs.append(output)
                if len(output.token_ids) >= seq.output_buffer.interval:
                    full_intervals.add(seq.output_buffer.interval)
        self._speculator.end_step()
        return outputs + [
            output_of(seq, self._choices[seq.request.request_id], seq.output_buffer.take(), None)
            for seq in buffered
            if seq.status is SequenceStatus.RUNNING and seq.output_buffer.joins(full_intervals)
        ]

    def _commit_tokens(
        self, seq: Sequence, row: StepRow, verified: VerifiedRow
    ) -> EngineOutput | None:
        """Add verified tokens to a sequence; return None if its output is buffered for later."""
        token_ids, choices = verified.token_ids, self._choices[seq.request.request_id]
        num_kept, stop = self._append(seq, token_ids)
        # The last token is the target's own, unless NaN logits after an accepted draft cut the row.
        num_verified = len(row.accepted_drafts(token_ids))
        num_accepted = min(num_kept, num_verified)
        self._count(choices, row, num_kept, num_accepted)
        self._speculator.observe(seq, row.draft_depth, num_verified)
        if stop is None:
            seq.lookahead = _lookahead(row, verified)
            seq.head_draft = _head_draft(seq, verified)
            self._drop_rejected(seq)
        else:
            self._finish(seq)
        logprobs = None if verified.logprobs is None else verified.logprobs[:num_kept]
        seq.output_buffer.add(token_ids[:num_kept], logprobs, num_accepted)
        if stop is None and not seq.output_buffer.is_due:
            return None
        return output_of(seq, choices, seq.output_buffer.take(), stop)

    def _append(self, seq: Sequence, token_ids: tuple[int, ...]) -> tuple[int, Stop | None]:
        """Append tokens up to the one that ends the sequence; return their number and the end."""
        stop, num_kept = None, 0
        eos_token_ids, max_model_len = self._model.eos_token_ids, self.config.max_model_len
        while stop is None and num_kept < len(token_ids):
            seq.token_ids.append(token_ids[num_kept])
            num_kept += 1
            stop = check_stop(seq, eos_token_ids, max_model_len)
        seq.num_computed_tokens = seq.num_tokens - 1
        self._publish(seq)
        return num_kept, stop

    def _count(self, choices: Choices, row: StepRow, num_kept: int, num_accepted: int) -> None:
        choices.num_output_tokens += num_kept
        self._counts.num_generated_tokens += num_kept
        self._batch_size += 1
        if row.num_draft_tokens or row.num_lookahead_tokens:
            depth = row.draft_depth
            choices.speculation = choices.speculation.after_draft(depth, num_accepted)
            self._counts.num_lookahead_tokens += row.num_lookahead_tokens
            method = self._speculator.drafting_method(row.seq_id)
            self._drafts.record(method, depth, num_accepted)

    def _on_bad_logits(self, seq: Sequence, row: StepRow) -> list[EngineOutput]:
        """Fail a request without publishing KV; a row with guesses is retried without them.

        Guesses can corrupt a whole row: attention multiplies their NaN values by 0.
        """
        if row.guesses:
            seq.may_draft, seq.head_draft = False, None
            self._drop_rejected(seq)
            return []
        return [self._fail(seq, self._logits_error(seq, row))]

    def _logits_error(self, seq: Sequence, row: StepRow) -> SpecdecError:
        mask = None if row.grammar_mask is None else row.grammar_mask[0]
        num_output, vocab_size = seq.num_output_tokens, self._model.vocab_size
        is_any_allowed = has_allowed_token(seq.rules, seq.token_ids, num_output, vocab_size, mask)
        return BadLogitsError(num_output) if is_any_allowed else NoTokenLeftError(num_output)

    def _publish(self, seq: Sequence) -> None:
        self._blocks.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)

    def _drop_rejected(self, seq: Sequence) -> None:
        """Free the blocks that only rejected drafts needed; a step begun ahead may need them."""
        if not self._steps and self._blocks.truncate(seq.seq_id, seq.num_computed_tokens):
            self._steps.truncate(seq.seq_id)

    def _finish(self, seq: Sequence) -> None:
        choices = self._choices[seq.request.request_id]
        choices.unfinished.remove(seq)
        if not choices.unfinished:
            del self._choices[seq.request.request_id]
        self._scheduler.finish(seq)
        self._release(seq)

    def _fail(self, seq: Sequence, error: SpecdecError) -> EngineOutput:
        """End all choices of the request of a sequence that cannot go on."""
        choices = self._choices[seq.request.request_id]
        self.abort(seq.request.request_id)
        return output_of(seq, choices, BufferedTokens(), None)._replace(error=error)

    def _release(self, seq: Sequence) -> None:
        """Have target and proposer drop a sequence that lost its blocks."""
        seq.lookahead = seq.head_draft = None
        self._steps.release(seq.seq_id)
        self._speculator.release(seq.seq_id)


def _head_needs_tokens(config: EngineConfig) -> bool:
    """Return whether a head on the target's ranks computes KV from the tokens of sequences."""
    head = config.speculation.head if config.speculation else None
    return head is not None and head.writes_kv


def _head_draft(seq: Sequence, verified: VerifiedRow) -> HeadDraft | None:
    """Return the draft that a head made behind the verified tokens, which `seq` has by now."""
    if not verified.next_draft_token_ids:
        return None
    return HeadDraft(
        seq.num_tokens,
        seq.token_ids[-1],
        verified.next_draft_token_ids,
        verified.next_draft_parents,
        verified.next_draft_confidences,
    )


def _lookahead(row: StepRow, verified: VerifiedRow) -> Lookahead | None:
    """Return the target's tokens after each guess of a row with lookahead tokens."""
    if not row.num_lookahead_tokens:
        return None
    lookahead = row.guesses[row.num_draft_tokens :]
    return Lookahead(row.known_end, row.drafts, lookahead, verified.lookahead_token_ids)
