"""The engine: requests in, tokens out, one step at a time.

Synchronous and single-threaded; clock and recorder are injected, and it draws no random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.config.engine import EngineConfig
from specdec.engine.committer import Committer
from specdec.engine.loaded.adapters import Adapters
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.engine.metrics.metrics import Metrics, StepRecorder
from specdec.engine.rank_updates import RankUpdates
from specdec.engine.requests.input_processor import InputProcessor
from specdec.engine.requests.open_requests import OpenRequests
from specdec.engine.requests.outputs import StepOutputs, TargetLostError
from specdec.engine.requests.thinking_budget import ThinkingBudgets
from specdec.engine.scheduling.adapter_seats import seats_of
from specdec.engine.scheduling.async_scheduling import StepsInFlight
from specdec.engine.scheduling.decode_run import Rows, sent_rows
from specdec.engine.scheduling.drafting import NO_DRAFTING, Drafting
from specdec.engine.scheduling.scheduled_row import ScheduledRow
from specdec.engine.scheduling.scheduler import Scheduler
from specdec.engine.scheduling.speculator import Speculator
from specdec.engine.scheduling.step_drafts import StepDrafts
from specdec.engine.scheduling.suspects import Suspects
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import EngineRequest, SequenceStatus
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposer, make_proposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.adapters import AdapterInfo
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision
from specdec.types.errors import (
    CrashingRequestError,
    GrammarError,
    InvalidValueError,
    TargetFailedError,
)
from specdec.types.ranks import Target
from specdec.types.reports.stats import Counts, EngineStats
from specdec.types.responses import EngineOutput


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
        drafters: DrafterVersions | None = None,
        adapters: Adapters | None = None,
        recorder: StepRecorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make an engine without requests.

        proposer: None makes the one of `config.speculation`, unless that needs a draft model.
        policy: decides each step how much to draft; None drafts as configured at every load.
        drafters: versions of the target's draft head; None where it is not replaced.
        adapters: those of the target; None where `config` has no limits of adapters.
        recorder: receives the seconds of each draft and verification, by `clock`, and batch sizes.
        """
        self.config, self.tokenizer = config, tokenizer
        self._recorder = recorder or Metrics()
        self._clock = clock
        self._inputs = InputProcessor(config, model, tokenizer)
        self._counts = Counts()  # the fields about drafts are in the committer
        has_states = model.recurrent is not None
        self._blocks = BlockManager.of(config, self._counts, has_states=has_states)
        self._steps = StepsInFlight(
            target,
            self._blocks,
            self._recorder,
            clock,
            needs_tokens=config.rank_drafters_read_tokens,
            has_adapters=adapters is not None,
        )
        self._scheduler = Scheduler(config, self._blocks, self._counts, seats_of(config, adapters))
        proposer = proposer or make_proposer(config.speculation)
        self._speculator = Speculator(
            config.speculation, proposer, policy, begins_ahead=config.async_scheduling
        )
        self._requests = OpenRequests(self._scheduler, self._steps, self._speculator)
        self._drafts = StepDrafts(self._scheduler, self._speculator, self._recorder, clock, config)
        self.drafters = drafters
        self.adapters = adapters
        self._updates = RankUpdates(drafters, adapters, self._steps, self._requests)
        self._committer = self._make_committer(model)
        self._suspects = Suspects()
        self._undelivered: list[EngineOutput] = []  # errors of requests that no step has ended
        self._next_seq_id = 0
        self._decision: Decision | None = None  # in force for steps that are begun ahead
        self._drafting_ahead = NO_DRAFTING
        self._batch_size = 0  # sequences for which the last step produced tokens

    def _make_committer(self, model: ModelConfig) -> Committer:
        speculation = self.config.speculation
        head = None if speculation is None else speculation.head
        return Committer(
            model,
            self.config.max_model_len,
            self._blocks,
            self._steps,
            self._speculator,
            self._requests,
            self._counts,
            self.drafters,
            None if head is None else head.name,
            self.adapters,
            ThinkingBudgets(self.tokenizer, model.eos_token_ids, self.config.max_model_len),
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidValueError or OverloadedError, and then keeps nothing.

        Raises UnknownModelError for an adapter that was unloaded after the request selected it.
        """
        if request.request_id in self._requests:
            raise InvalidValueError("request_id", request.request_id, "unused by a running request")
        request = request.with_adapter(self._updates.use_adapter(request.adapter_id, request.model))
        sequences = self._inputs.sequences(request, self._next_seq_id, self.control)
        self._scheduler.add(sequences, self._clock())
        self._requests.add(request, sequences)
        self._next_seq_id += len(sequences)
        self._counts.num_requests += request.is_counted and len(sequences)
        self._counts.num_prompt_tokens += len(sequences) * len(request.prompt_token_ids)

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidValueError as `add`, but not for a grammar's tokens. Thread-safe."""
        self._inputs.check(request, self.control)

    def abort(self, request_id: str) -> None:
        """End all choices of a request and free their blocks; ignore unknown and ended requests."""
        self._requests.abort(request_id)
        self._free_adapters()

    def clear_prefix_cache(self) -> bool:
        """Empty the prefix cache unless requests run or wait; return whether it was emptied."""
        if self.has_work:
            return False
        self._blocks.clear()
        return True

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
        return self._requests.fail(cause, CrashingRequestError(cause.num_output_tokens))

    def replace_target(self, target: Target) -> None:
        """Continue with a target that has no state, as after the loss of the previous one.

        Every running sequence is recomputed from its tokens; the steps in flight are dropped.
        """
        self._steps.replace_target(target)
        self._updates.restart()
        self._speculator.forget_step()
        self._preempt_all()
        self._blocks.clear()

    def advance_drafters(self) -> None:
        """Load and activate the version of the head that is wanted, as far as without waiting.

        Each step does so before anything else. Raises TargetFailedError.
        """
        self._updates.advance_drafters()

    def advance_adapters(self) -> None:
        """Load and free adapters as far as possible without waiting, as each step does.

        Requests whose adapter cannot be loaded again after the target was lost end; the next step
        returns their errors. Raises TargetFailedError.
        """
        self._undelivered += self._updates.advance_adapters()

    def make_room_for_adapter(self) -> None:
        """Unload the least recently used idle adapter where no other one fits."""
        self._updates.make_room_for_adapter()
        self.advance_adapters()

    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters, oldest first; none where none can be loaded."""
        return self._updates.adapter_infos()

    def _free_adapters(self) -> None:
        """Free adapters whose last request has ended, since no step may follow that would."""
        if self.adapters is not None and not self._requests:
            self.advance_adapters()

    def _preempt_all(self) -> None:
        for seq in self._scheduler.preempt_all():
            self._requests.release(seq)

    @property
    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        return bool(self._requests) or bool(self._steps) or bool(self._undelivered)

    @property
    def is_stalled(self) -> bool:
        """Return whether no sequence can run until the ranks have loaded an adapter."""
        is_loading = self._updates.are_loading_adapters
        return is_loading and not self._steps and not self._scheduler.num_running

    @property
    def newly_scheduled(self) -> tuple[str, ...]:
        """Ids of requests whose first choice the last step scheduled for the first time."""
        new = self._scheduler.newly_scheduled
        return tuple(seq.request.request_id for seq in new if seq.choice == 0)

    def step(self) -> StepOutputs:
        """Collect and commit the step in flight, and begin the next one before returning.

        The caller delivers the outputs while the next forward pass runs. With asynchronous
        scheduling the next step begins even before the one in flight is collected.

        Raises TargetLostError, with the outputs that were committed before the target was lost.
        """
        outputs = StepOutputs()
        self._scheduler.keep_batch()  # `newly_scheduled` is of this step, also if it is lost
        try:
            self._advance(outputs)
        except TargetFailedError as error:
            raise TargetLostError(str(error), outputs) from error
        return outputs

    def _advance(self, outputs: StepOutputs) -> None:
        """Run a step, and add its outputs as they are committed."""
        self.advance_drafters()
        self.advance_adapters()
        outputs.whole += self._undelivered
        self._undelivered.clear()
        before = self._decision
        is_ahead = self._begin_ahead()
        self._collect(outputs)
        decision = self._decide()
        if is_ahead:
            self._keep_batch(is_as_decided=before is not None and decision.drafts_like(before))
            return
        rows = self._schedule(decision)
        drafting = self._drafts.take(rows, decision)
        started = self._step_rows(rows, drafting, outputs)
        if started:
            self._begin(started, drafting)
            self._drafts.order_ahead(started, decision)
        self._free_adapters()

    def stats(self) -> EngineStats:
        """Return the present load and a snapshot of the counters."""
        policy, estimate = self._speculator.policy, self._speculator.estimate
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_decoding=self._scheduler.num_decoding,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            num_snapshots=self._blocks.num_snapshots,
            last_batch_size=self._batch_size,
            is_speculation_on=self._speculator.is_on,
            num_speculation_flips=policy.num_flips if policy else 0,
            decision=policy.decision if policy else None,
            decision_changes=policy.log.changes if policy else (),
            estimated_speedup=estimate.speedup if estimate else None,
            estimated_tokens_per_s=estimate.tokens_per_s if estimate else None,
            service_curve=policy.service_curve if policy else None,
            profile_error=estimate.profile_error if estimate else None,
            drafter_version=self.drafters.active if self.drafters else None,
            adapters_in_use=self._updates.adapters_in_use(),
            counts=self._snapshot(),
        )

    def _snapshot(self) -> Counts:
        counts = self._committer.drafts.added_to(self._counts)
        self._updates.add_to(counts)
        self._speculator.add_to(counts)
        return counts

    def check_integrity(self) -> None:
        """Assert that no block is lost, shared, or held by a sequence that has ended."""
        self._blocks.check_integrity()
        sequences = self._requests.sequences
        running = {seq.seq_id: seq for seq in sequences if seq.status is SequenceStatus.RUNNING}
        assert self._blocks.holders <= running.keys(), "blocks held by sequences that do not run"
        self._scheduler.load.check_integrity(running.values())

    def _decide(self) -> Decision:
        scheduler, speculator = self._scheduler, self._speculator
        if speculator.policy is None:
            decision = speculator.decide()
        else:
            num_eligible = scheduler.num_eligible(self.control)
            decision = speculator.decide(scheduler.num_decoding, num_eligible, scheduler.prompts)
        may_run_ahead = self.config.async_scheduling and self._suspects.current is None
        self._decision = decision if may_run_ahead else None
        return decision

    def _schedule(self, decision: Decision) -> list[ScheduledRow]:
        self._scheduler.admit_only(self._suspects.current)
        rows = self._scheduler.schedule(decision, self.control)
        for seq in self._scheduler.preempted:
            self._requests.release(seq)
        return rows

    def _begin_ahead(self) -> bool:
        """Begin the step after the one in flight if its rows are known; return whether it was."""
        decision = self._decision
        if decision is None or len(self._steps) != 1:
            return False
        rows, self._drafting_ahead = self._drafts.rows_ahead(self._steps.oldest, decision)
        if is_known := bool(rows):
            if self._scheduler.num_running > self.config.max_num_seqs:
                self._steps.release_ending(self.config.max_model_len)
            self._send(rows)
        return is_known

    def _keep_batch(self, *, is_as_decided: bool) -> None:
        """Go on with the step that was begun ahead."""
        is_plain = self._speculator.policy is None and self._drafting_ahead is NO_DRAFTING
        if not is_plain and self._scheduler.num_decoding:  # otherwise its results are discarded
            rows = sent_rows(self._steps.rows)
            drafting = self._drafting_ahead.resolved(rows, self._steps.head_drafts)
            self._speculator.begin_step(rows, drafting, is_as_decided=is_as_decided)

    def _step_rows(
        self, rows: list[ScheduledRow], drafting: Drafting, outputs: StepOutputs
    ) -> Rows:
        """Return what the target runs; add an error for each request whose grammar got stuck."""
        started = []
        for row in rows:
            if row.seq.status is not SequenceStatus.RUNNING:
                continue  # another choice of its request has just failed
            try:
                started.append((row.seq, row.step_row(drafting.proposals.get(row.seq.seq_id))))
            except GrammarError as error:
                outputs.whole += self._requests.fail(row.seq, error)
        return [(seq, row) for seq, row in started if seq.status is SequenceStatus.RUNNING]

    def _begin(self, rows: Rows, drafting: Drafting) -> None:
        self._send(rows)
        self._speculator.begin_step([row for _, row in rows], drafting)

    def _send(self, rows: Rows) -> None:
        step_id = self._counts.num_steps
        self._counts.num_steps += 1
        self._counts.num_steps_ahead += bool(self._steps)
        self._steps.begin(step_id, rows)

    def _collect(self, outputs: StepOutputs) -> None:
        """Wait for the oldest step in flight, if there is one, and commit it."""
        self._batch_size = 0
        if not self._steps:
            return
        step = self._steps.collect()
        self._batch_size = self._committer.commit(step, outputs)
        self._steps.resolve()
        if self._suspects.complete(step.rows):
            self._preempt_all()  # the next suspect gets the whole KV pool
        if self._batch_size:
            num_tokens = self._counts.num_generated_tokens + self._scheduler.num_admitted_tokens
            self._recorder.record_batch(self._batch_size, num_tokens)
