"""Commits the results of a step: tokens, KV slots, counters, and the outputs to send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specdec.config.speculation.methods import NgramConfig
from specdec.engine.loaded.adapters import Adapters
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.engine.requests.input_processor import has_allowed_token
from specdec.engine.requests.open_requests import OpenRequests
from specdec.engine.requests.outputs import StepOutputs, output_of
from specdec.engine.requests.stop_checker import AT_LIMIT, Stop, append, extend
from specdec.engine.requests.thinking_budget import ThinkingBudgets
from specdec.engine.scheduling.async_scheduling import CollectedStep, StepsInFlight
from specdec.engine.scheduling.decode_run import RepeatedDecodes, Rows
from specdec.engine.scheduling.speculator import Speculator
from specdec.engine.scheduling.state_saves import end_saves, running
from specdec.engine.step_results import accepted_drafts, head_draft_of, lookahead_of, results_of
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.decode_rows import SampledTokens
from specdec.sequences.prediction import METHOD as PREDICTION
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.drafters import CONFIGURED_VERSION
from specdec.types.errors import (
    BadLogitsError,
    DetokenizeError,
    NoTokenLeftError,
    SpecdecError,
)
from specdec.types.messages import BASE_MODEL, PromptLogprobs, StepRow, VerifiedRow
from specdec.types.reports.stats import Counts, DraftCounter
from specdec.types.responses import EngineOutput

_NO_TOKENS: tuple[int, ...] = ()

_CommittedRow = tuple[Sequence, EngineOutput | None]
"""A sequence that a step had tokens for, and its output; None if that is sent later."""


class Committer:
    """Adds verified tokens to their sequences and drops the KV slots of rejected drafts."""

    def __init__(
        self,
        model: ModelConfig,
        max_model_len: int,
        blocks: BlockManager,
        steps: StepsInFlight,
        speculator: Speculator,
        requests: OpenRequests,
        counts: Counts,
        drafters: DrafterVersions | None,
        head_method: str | None,
        adapters: Adapters | None,
        budgets: ThinkingBudgets,
    ) -> None:
        """Count tokens and prefill chunks in `counts`, and drafts in `drafts`.

        drafters: also receives the drafts of method `head_method`, by the version that made them.
        adapters: also receives tokens and drafts, by adapter.
        """
        self.drafts = DraftCounter()
        self._model = model
        self._max_model_len = max_model_len
        self._blocks = blocks
        self._steps = steps
        self._speculator = speculator
        self._requests = requests
        self._counts = counts
        self._drafters = drafters
        self._head_method = head_method
        self._adapters = adapters
        self._budgets = budgets
        self._head_version = CONFIGURED_VERSION  # of the step that is committed
        self._is_step_in_flight = False  # after the step that is committed
        self._observes_undrafted = False  # of that step, see Speculator
        self._failed: list[EngineOutput] = []  # errors of requests in that step

    def commit(self, step: CollectedStep, outputs: StepOutputs) -> int:
        """Commit the results of the rows whose sequences still run, and add their outputs.

        Returns the number of sequences that have tokens.
        """
        rows, verified, self._head_version, saves, _ = step
        valid = running(saves)
        self._is_step_in_flight = bool(self._steps)
        self._observes_undrafted = self._speculator.observes_undrafted
        self._failed = []
        if isinstance(rows, RepeatedDecodes) and rows.yields(verified.rows):
            committed = self._commit_decodes(rows, verified.rows, outputs)
        else:
            prompts = {part.seq_id: part for part in verified.prompt_logprobs}
            committed = self._commit_rows(rows, results_of(verified.rows), prompts)
        if saves:
            end_saves(saves, valid, verified, self._blocks)
        self._requests.readmit_restarted()  # the latest snapshots are known now
        self._speculator.end_step(step)
        self.drafts.end_step()
        made = [output for _, output in committed if output is not None]
        if len(made) < len(committed):
            made += self._joining_outputs(committed)
        outputs.whole += made + self._failed
        return len(committed) + len(outputs.token_ids)

    def _commit_decodes(
        self,
        rows: RepeatedDecodes,
        sampled: SampledTokens,
        outputs: StepOutputs,
    ) -> list[_CommittedRow]:
        """Commit a step with decodes of a run, as `_commit_rows` does."""
        sequences = rows.run.sequences
        tokens = zip(sequences, sampled.token_ids, strict=False)
        committed: list[_CommittedRow] = []
        if not self._is_step_in_flight or self._adapters is not None or self._observes_undrafted:
            committed = [
                (seq, self._commit_token(seq, token_id))
                for seq, token_id in tokens
                if seq.status is SequenceStatus.RUNNING
            ]
        elif rows.streams_on(sampled.token_ids, self._model.eos_token_ids):
            self._commit_run(rows, sampled.token_ids[: len(sequences)], outputs)
        else:
            committed = self._commit_repeated(tokens, outputs)
        if rows.others:
            first = len(sequences)
            others = zip(sampled.seq_ids[first:], sampled.token_ids[first:], strict=True)
            committed += self._commit_rows(rows.others, dict(others), {})
        return committed

    def _commit_run(
        self, rows: RepeatedDecodes, token_ids: tuple[int, ...], outputs: StepOutputs
    ) -> None:
        """Commit a token of each sequence of a run, as `_commit_repeated` does; all go on."""
        run = rows.run
        for seq, token_id in zip(run.sequences, token_ids, strict=True):
            seq.num_computed_tokens = len(seq.token_ids)
            seq.token_ids.append(token_id)
            seq.choices.num_output_tokens += 1
        for seq in run.growing(rows.place + 1):
            self._publish(seq)
        self._counts.num_generated_tokens += len(token_ids)
        outputs.sequences += run.sequences
        outputs.request_ids += run.request_ids
        outputs.token_ids += token_ids

    def _commit_repeated(
        self, tokens: Iterable[tuple[Sequence, int]], outputs: StepOutputs
    ) -> list[_CommittedRow]:
        """Commit tokens of decodes after others of their run, while a step is in flight.

        `_commit_token` without what such rows do not change: drafts, and the ends of block tables.
        Returns the rows that are not in `outputs`.
        """
        eos_token_ids, block_size = self._model.eos_token_ids, self._blocks.block_size
        committed: list[_CommittedRow] = []
        num_open = 0
        for seq, token_id in tokens:
            if seq.status is not SequenceStatus.RUNNING:
                continue
            num_computed = len(seq.token_ids)
            if num_computed >= seq.open_length or token_id in eos_token_ids:
                committed.append((seq, self._commit_token(seq, token_id)))
                continue
            num_open += 1
            seq.token_ids.append(token_id)
            seq.num_computed_tokens = num_computed
            seq.choices.num_output_tokens += 1
            if not num_computed % block_size:
                self._publish(seq)
            if seq.streams_tokens:
                outputs.sequences.append(seq)
                outputs.request_ids.append(seq.request.request_id)
                outputs.token_ids.append(token_id)
                continue
            buffered = seq.output_buffer.pass_token(token_id, is_last=False)
            committed.append((seq, None if buffered is None else output_of(seq, None, *buffered)))
        self._counts.num_generated_tokens += num_open
        return committed

    def _commit_rows(
        self,
        rows: Rows,
        results: Mapping[int, int | VerifiedRow],
        prompts: Mapping[int, PromptLogprobs],
    ) -> list[_CommittedRow]:
        """Return the rows that have tokens."""
        committed: list[_CommittedRow] = []
        for seq, row in rows:
            if seq.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            if seq.prompt_report is not None and seq.seq_id in prompts:
                seq.prompt_report.add(prompts[seq.seq_id])
            result = results.get(seq.seq_id)
            if result is None:
                self._counts.num_prefill_chunks += 1
                self._commit_prompt(seq, row)
            elif isinstance(result, int) and not row.num_guesses:
                if len(row.token_ids) > 1:
                    self._commit_prompt(seq, row)
                committed.append((seq, self._commit_token(seq, result)))
            elif isinstance(result, int):
                only = VerifiedRow(seq.seq_id, (result,))
                committed.append((seq, self._commit_tokens(seq, row, only)))
            elif result.has_bad_logits:
                self._on_bad_logits(seq, row)
            else:
                committed.append((seq, self._commit_tokens(seq, row, result)))
        return committed

    def _commit_prompt(self, seq: Sequence, row: StepRow) -> None:
        """Commit the KV of a part of a prompt."""
        seq.num_computed_tokens += len(row.token_ids)
        self._publish(seq)

    def _joining_outputs(self, committed: list[_CommittedRow]) -> list[EngineOutput]:
        """Return buffered tokens that are sent along with outputs of a whole interval."""
        full_intervals = {
            seq.output_buffer.interval
            for seq, output in committed
            if output is not None and len(output.token_ids) >= seq.output_buffer.interval
        }
        return [
            output_of(seq, None, *seq.output_buffer.take())
            for seq, output in committed
            if output is None
            and seq.status is SequenceStatus.RUNNING
            and seq.output_buffer.joins(full_intervals)
        ]

    def _commit_tokens(
        self, seq: Sequence, row: StepRow, verified: VerifiedRow
    ) -> EngineOutput | None:
        """Add verified tokens to a sequence; return None if its output is buffered, or it fails."""
        token_ids = verified.token_ids
        try:
            num_kept, closing_ids, stop = self._append(seq, token_ids)
        except DetokenizeError as error:
            self._failed += self._requests.fail(seq, error)
            return None
        num_verified = accepted_drafts(seq, row, token_ids)
        num_drafted = min(num_kept, num_verified)
        has_ended = stop is not None or bool(closing_ids)
        self._count(seq, row, num_kept, num_verified, has_ended=has_ended)
        seq.choices.num_output_tokens += len(closing_ids)
        self._speculator.observe(seq, row.draft_depth, num_verified)
        if stop is not None:
            self._requests.finish(seq)
        elif closing_ids:
            self._requests.restart(seq)
        else:
            seq.lookahead = lookahead_of(row, verified)
            method = NgramConfig.name if verified.next_draft_is_lookup else self._head_method
            seq.head_draft = head_draft_of(seq, verified, self._head_version, method)
            self._drop_rejected(seq)
        logprobs = None if verified.logprobs is None else verified.logprobs[:num_kept]
        seq.output_buffer.add(token_ids[:num_kept] + closing_ids, logprobs, num_drafted)
        if stop is None and not seq.output_buffer.is_due:
            return None
        return output_of(seq, stop, *seq.output_buffer.take())

    def _commit_token(self, seq: Sequence, token_id: int) -> EngineOutput | None:
        """Commit the token of a decode: `_commit_tokens` for a row without all that is optional."""
        if seq.reaches_budget(1, self._max_model_len):
            row = StepRow(seq.seq_id, 0, (token_id,), 0, True, adapter_id=seq.request.adapter_id)
            return self._commit_tokens(seq, row, VerifiedRow(seq.seq_id, (token_id,)))
        try:
            stop = append(seq, token_id, self._model.eos_token_ids, self._max_model_len)
        except DetokenizeError as error:
            self._failed += self._requests.fail(seq, error)
            return None
        seq.num_computed_tokens = num_computed = len(seq.token_ids) - 1
        if num_computed % self._blocks.block_size == 0:
            self._publish(seq)
        seq.choices.num_output_tokens += 1
        self._counts.num_generated_tokens += 1
        if self._adapters is not None and seq.request.adapter_id != BASE_MODEL:
            self._adapters.record(seq.request.adapter_id, 1, 0, 0)
        if self._observes_undrafted:
            self._speculator.observe(seq, 0, 0)
        if stop is None:
            seq.lookahead = seq.head_draft = None
            self._drop_rejected(seq)
        else:
            self._requests.finish(seq)
        if seq.output_buffer.interval == 1:
            return output_of(seq, stop, (token_id,))
        tokens = seq.output_buffer.pass_token(token_id, is_last=stop is not None)
        return None if tokens is None else output_of(seq, stop, *tokens)

    def _append(
        self, seq: Sequence, token_ids: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...], Stop | None]:
        """Append tokens up to the one that ends the sequence or its reasoning.

        Returns their number, the tokens that a thinking budget adds after them, and the end.
        """
        stop, num_kept, closing_ids = None, 0, _NO_TOKENS
        eos_token_ids, max_model_len = self._model.eos_token_ids, self._max_model_len
        if extend(seq, token_ids, eos_token_ids):
            num_kept = len(token_ids)
        while stop is None and num_kept < len(token_ids):
            stop = append(seq, token_ids[num_kept], eos_token_ids, max_model_len)
            num_kept += 1
            if stop is AT_LIMIT and seq.thinking_budget is not None:
                closing_ids, stop = self._budgets.reach(seq)
                if closing_ids:
                    break
        seq.num_computed_tokens = len(seq.token_ids) - len(closing_ids) - 1
        self._publish(seq)
        return num_kept, closing_ids, stop

    def _count(
        self,
        seq: Sequence,
        row: StepRow,
        num_kept: int,
        num_verified: int,
        *,
        has_ended: bool,
    ) -> None:
        """Count a row; `seq` still has the draft that a head made for it.

        num_verified: accepted drafts, also those after a stop. The last token of an output counts
        as the target's own, even if it was drafted: every draft yields its accepted tokens and one
        more.
        """
        num_accepted, choices = min(num_verified, num_kept - has_ended), seq.choices
        choices.num_output_tokens += num_kept
        self._counts.num_generated_tokens += num_kept
        if row.adapter_id != BASE_MODEL and self._adapters is not None:
            self._adapters.record(row.adapter_id, num_kept, row.draft_depth, num_accepted)
        if row.num_draft_tokens or row.num_lookahead_tokens:
            depth = row.draft_depth
            choices.speculation = choices.speculation.after_draft(depth, num_accepted)
            self._counts.num_lookahead_tokens += row.num_lookahead_tokens
            method = self._speculator.drafting_method(row.seq_id)
            if method == PREDICTION:
                num_predicted = min(num_verified, num_kept)
                choices.prediction = choices.prediction.after_draft(depth, num_predicted)
            self.drafts.record(method, depth, num_accepted)
            if self._drafters is not None and seq.head_draft and method == self._head_method:
                version = seq.head_draft.version
                self._drafters.observe(version, depth, num_accepted, num_verified)

    def _on_bad_logits(self, seq: Sequence, row: StepRow) -> None:
        """Fail a request without publishing KV; a row with guesses is retried without them.

        Guesses can corrupt a whole row: attention multiplies their NaN values by 0. The states of
        recurrent layers, which are committed after its known token, are then computed again.
        """
        if row.guesses:
            self._requests.stop_drafting(seq)
            if self._model.recurrent is None:
                self._drop_rejected(seq)
            else:
                self._requests.recompute(seq)
        else:
            self._failed += self._requests.fail(seq, self._logits_error(seq, row))

    def _logits_error(self, seq: Sequence, row: StepRow) -> SpecdecError:
        mask = None if row.grammar_mask is None else row.grammar_mask[0]
        num_output, vocab_size = seq.num_output_tokens, self._model.vocab_size
        is_any_allowed = has_allowed_token(seq.rules, seq.token_ids, num_output, vocab_size, mask)
        return BadLogitsError(num_output) if is_any_allowed else NoTokenLeftError(num_output)

    def _publish(self, seq: Sequence) -> None:
        self._blocks.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)

    def _drop_rejected(self, seq: Sequence) -> None:
        """Free the blocks that only rejected drafts needed; a step begun ahead may need them."""
        if self._is_step_in_flight:
            return
        if self._blocks.truncate(seq.seq_id, seq.num_computed_tokens):
            self._steps.truncate(seq.seq_id)
