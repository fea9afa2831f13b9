"""The engine: requests in, tokens out, one step at a time.

Synchronous, single-threaded, without a clock or randomness of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from specdec.block_manager import BlockManager
from specdec.config import EngineConfig
from specdec.detokenizer import IncrementalDetokenizer
from specdec.errors import InvalidValueError
from specdec.finish_reason import FinishReason
from specdec.model_config import ModelConfig
from specdec.proposers import DraftRequest, Proposal, Proposer, make_proposer
from specdec.runner import Target
from specdec.sampling_rules import resolve
from specdec.scheduler import ScheduledRow, Scheduler
from specdec.sequence import Request, Sequence, SequenceStatus
from specdec.speculation import SpeculationControl, SpeculationPolicy
from specdec.stats import AcceptanceByPosition, EngineStats, SpeculationStats
from specdec.step import StepInput, StepRow, VerifyOutput
from specdec.tokenizer import Tokenizer, check_token_ids
from specdec.worker_ledger import WorkerLedger


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to a request.

    text: whole characters only; may be empty while a character or a stop string is incomplete.
    finish_reason: None while the request goes on. speculation: counts of the request so far.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    speculation: SpeculationStats


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
        self._tokenizer = tokenizer
        self._blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(config, self._blocks)
        self._proposer = proposer or make_proposer(config.speculation)
        self._policy = policy
        self._sequences: dict[str, Sequence] = {}
        self._next_seq_id = 0
        self._num_steps = 0
        self._in_flight: list[tuple[Sequence, StepRow]] = []
        self._ledger = WorkerLedger(self._blocks)
        self._totals = SpeculationStats()
        self._accepted_by_position = AcceptanceByPosition()
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_prefill_chunks = 0

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidValueError or OverloadedError, and then keeps nothing."""
        self._validate(request)
        seq = self._new_sequence(request)
        if request.resume_token_ids:
            self._replay(seq)
        self._scheduler.add(seq)
        self._sequences[request.request_id] = seq
        self._next_seq_id += 1
        self._num_prompt_tokens += seq.num_prompt_tokens

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks; one that is unknown or has ended is no error."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq)

    def set_speculation(self, control: SpeculationControl) -> None:
        """Takes over what an operator wants, from the next step on. Needs a policy."""
        assert self._policy is not None, "an engine without a policy cannot be told"
        self._policy.update(control)

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
        self._in_flight = []
        for seq in self._scheduler.preempt_all():
            self._forget(seq)
        self._blocks.clear()
        self._ledger = WorkerLedger(self._blocks)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._sequences or self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Collects and commits the step in flight, and begins the next before it returns.

        So whoever delivers the outputs does it while the next forward pass runs.
        """
        outputs = self._commit(self._target.collect()) if self._in_flight else []
        num_draft_tokens = self._num_draft_tokens()
        rows = self._scheduler.schedule(num_draft_tokens)
        for seq in self._scheduler.preempted:
            self._forget(seq)
        self._begin(rows, self._propose(rows) if num_draft_tokens else {})
        return outputs

    def stats(self) -> EngineStats:
        """The load now, and the counters since the start."""
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_decoding=self._scheduler.num_decoding,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._scheduler.num_cached_tokens,
            num_prefill_chunks=self._num_prefill_chunks,
            num_generated_tokens=self._num_generated_tokens,
            is_speculation_on=self._is_speculation_on,
            num_speculation_flips=self._policy.num_flips if self._policy else 0,
            speculation=replace(self._totals),
            accepted_by_position=self._accepted_by_position.counts,
        )

    def check_integrity(self) -> None:
        """Asserts that no block is lost, shared, or held by a sequence that has ended."""
        self._blocks.check_integrity()
        running = {
            seq.seq_id for seq in self._sequences.values() if seq.status is SequenceStatus.RUNNING
        }
        assert self._blocks.holders <= running, "blocks held by sequences that do not run"

    def _new_sequence(self, request: Request) -> Sequence:
        params = request.params
        return Sequence(
            self._next_seq_id,
            request,
            resolve(params, request.seed, 0, self._model, self._tokenizer),
            IncrementalDetokenizer(self._tokenizer, params.stop),
            params.settled(self._model.sampling_defaults).max_tokens,
        )

    def _validate(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise InvalidValueError("request_id", request.request_id, "unused by a running request")
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise InvalidValueError("prompt", "", "at least 1 token long")
        limit = self.config.max_model_len - 1
        if num_tokens > limit:
            raise InvalidValueError(
                "prompt length", num_tokens, f"at most {limit} tokens (max_model_len less one)"
            )
        max_tokens, room = request.params.max_tokens, self.config.max_model_len - num_tokens
        if max_tokens is not None and max_tokens > room:
            reason = f"at most {room} (max_model_len less the prompt's {num_tokens} tokens)"
            raise InvalidValueError("max_tokens", max_tokens, reason)
        check_token_ids("prompt", request.prompt_token_ids, self._model.vocab_size)
        check_token_ids("resume_token_ids", request.resume_token_ids, self._model.vocab_size)
        most = room if max_tokens is None else max_tokens
        if len(request.resume_token_ids) >= most:
            raise InvalidValueError(
                "resume_token_ids",
                f"{len(request.resume_token_ids)} tokens",
                f"fewer than the {most} that the request may generate",
            )
        method = request.params.speculation.method
        loaded = self.config.speculation.methods if self.config.speculation else ()
        if method is not None and method not in loaded:
            reason = f"what is loaded: {' or '.join(loaded) or 'none'}"
            raise InvalidValueError("speculation.method", method, reason)

    @property
    def _is_speculation_on(self) -> bool:
        return self._policy.is_on if self._policy else self._proposer is not None

    def _num_draft_tokens(self) -> int:
        """What a sequence may draft in the coming step."""
        if self._proposer is None or self.config.speculation is None:
            return 0
        if self._policy is None:
            return self.config.speculation.num_speculative_tokens
        return self._policy.num_draft_tokens(self._scheduler.num_decoding)

    def _replay(self, seq: Sequence) -> None:
        """Brings the detokenizer to where it was after the tokens that the caller has."""
        for index, token in enumerate(seq.request.resume_token_ids):
            if seq.detokenizer.append(token) or self._is_end(seq, token):
                raise InvalidValueError(
                    "resume_token_ids", f"... {token}", f"unfinished; number {index} ends the text"
                )
        seq.detokenizer.take()

    def _propose(self, rows: Many[ScheduledRow]) -> dict[int, Proposal]:
        """Drafts for the rows that have room for some; the others' turn will come."""
        requests = [
            DraftRequest(row.seq, row.num_draft_tokens)
            for row in rows
            if row.seq.params.speculation.enabled is not False
        ]
        if not requests or self._proposer is None:
            return {}
        self._proposer.begin(requests)
        return {proposal.seq_id: proposal for proposal in self._proposer.collect()}

    def _begin(self, rows: Many[ScheduledRow], drafts: dict[int, Proposal]) -> None:
        if not rows:
            return
        step_rows = [_step_row(row, drafts.get(row.seq.seq_id)) for row in rows]
        news = self._ledger.news(row.seq for row in rows)
        step = StepInput(
            step_id=self._num_steps,
            released=news.released,
            admitted=news.admitted,
            block_table_deltas=news.block_table_deltas,
            rows=tuple(step_rows),
        )
        self._num_steps += 1
        self._in_flight = list(zip([row.seq for row in rows], step_rows, strict=True))
        self._target.begin(step)

    def _commit(self, verified: VerifyOutput) -> list[RequestOutput]:
        new_tokens = {row.seq_id: row.token_ids for row in verified.rows}
        outputs = []
        for seq, row in self._in_flight:
            if seq.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            if row.samples:
                outputs.append(self._append(seq, row, new_tokens[seq.seq_id]))
            else:
                seq.num_computed_tokens += len(row.token_ids)
                self._num_prefill_chunks += 1
                self._publish(seq)
        self._in_flight = []
        return outputs

    def _append(self, seq: Sequence, row: StepRow, token_ids: Many[int]) -> RequestOutput:
        """Adds verified tokens up to the one that ends the sequence, if one does."""
        finish_reason, num_kept = None, 0
        while finish_reason is None and num_kept < len(token_ids):
            seq.token_ids.append(token_ids[num_kept])
            num_kept += 1
            finish_reason = self._finish_reason(seq)
        seq.num_computed_tokens = seq.num_tokens - 1
        self._publish(seq)
        self._num_generated_tokens += num_kept
        for stats in (seq.speculation, self._totals, self._accepted_by_position):
            stats.record(row.num_draft_tokens, min(num_kept, len(token_ids) - 1))
        if finish_reason is None:
            self._drop_rejected(seq)
        else:
            self._finish(seq)
        return RequestOutput(
            request_id=seq.request.request_id,
            token_ids=tuple(token_ids[:num_kept]),
            text=seq.detokenizer.take() if finish_reason is None else seq.detokenizer.flush(),
            finish_reason=finish_reason,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_output_tokens=seq.num_output_tokens,
            speculation=replace(seq.speculation),
        )

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        """Whether the token appended last ends the sequence."""
        token = seq.token_ids[-1]
        if seq.detokenizer.append(token):
            return FinishReason.STOP
        if self._is_end(seq, token):
            return FinishReason.STOP
        is_full = seq.num_tokens >= self.config.max_model_len
        if is_full or seq.num_output_tokens == seq.max_tokens:
            return FinishReason.LENGTH
        return None

    def _is_end(self, seq: Sequence, token: int) -> bool:
        return token in self._model.eos_token_ids and not seq.params.ignore_eos

    def _publish(self, seq: Sequence) -> None:
        self._blocks.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)

    def _drop_rejected(self, seq: Sequence) -> None:
        """Gives back the blocks that only rejected drafts had needed."""
        self._blocks.truncate(seq.seq_id, seq.num_computed_tokens)
        self._ledger.truncate(seq.seq_id)

    def _finish(self, seq: Sequence) -> None:
        del self._sequences[seq.request.request_id]
        self._scheduler.finish(seq)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        """Has target and proposer drop a sequence that lost its blocks."""
        self._ledger.forget(seq.seq_id)
        if self._proposer is not None:
            self._proposer.release(seq.seq_id)


def _step_row(row: ScheduledRow, proposal: Proposal | None) -> StepRow:
    """The tokens to run: known ones, then the drafts if they continue what is known."""
    seq, start = row.seq, row.seq.num_computed_tokens
    drafts: tuple[int, ...] = ()
    if proposal is not None and _continues(proposal, seq):
        drafts = proposal.draft_token_ids[: row.num_draft_tokens]
    known = tuple(seq.token_ids[start : start + row.num_tokens])
    return StepRow(seq.seq_id, start, known + drafts, len(drafts), row.samples)


def _continues(proposal: Proposal, seq: Sequence) -> bool:
    """Whether a proposal was made for the sequence's present end; a stale one never is verified."""
    base = (proposal.base_length, proposal.base_token)
    return base == (seq.num_tokens, seq.token_ids[-1])
