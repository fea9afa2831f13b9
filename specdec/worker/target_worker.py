"""One rank's worker of the target: runs a step's forward pass and verifies it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.sample import RowArgmax, row_argmax
from specdec.sampling import SamplingBatch, all_ranks_argmax, sample
from specdec.sampling.verifiers import VERIFY, Draft, DraftBatch, VerifiedTokens, verify_greedy
from specdec.types.messages import (
    BlockTableDelta,
    PromptLogprobs,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)
from specdec.types.sampling_params import VerifierName
from specdec.types.sampling_spec import SamplingRules
from specdec.worker.base import Runner
from specdec.worker.batch_state import TokensToCome
from specdec.worker.logprobs import KeptLogits, LogprobReader


def places_to_verify(rows: Sequence[StepRow]) -> list[int]:
    """Indices of the logits of the last known tokens and the drafts, in order."""
    places, end = list[int](), 0
    for row in rows:
        start, end = end, end + 1 + row.num_guesses
        places.extend(range(start, start + 1 + row.num_draft_tokens))
    return places


def places_of_guesses(rows: Sequence[StepRow]) -> list[int]:
    """Indices of the logits of the guesses of rows that have lookahead tokens, in order."""
    places, end = list[int](), 0
    for row in rows:
        start, end = end, end + 1 + row.num_guesses
        if row.num_lookahead_tokens:
            places.extend(range(start + 1, end))
    return places


class ModelRunner(Runner):
    """Executes steps in order. With several ranks every one gets the same steps."""

    def execute(self, step: StepInput) -> VerifyOutput:
        """Runs one step; the same result on every rank."""
        self._sequences.update(step)
        if not step.rows:
            return VerifyOutput(step.step_id, ())
        rows = self._sequences.settled(step.rows)
        self._sequences.follow(rows)
        hidden = self.model(self._sequences.model_input(rows), self.kv_cache)
        prompt_logprobs = (
            tuple(self._prompt_logprobs(rows, hidden)) if self._sequences.has_prompt_readers else ()
        )
        verified = (*self._verify(rows, hidden), *_broken_chunks(rows, hidden))
        return VerifyOutput(step.step_id, verified, prompt_logprobs)

    def warm_up(self, num_tokens: int) -> None:
        """Runs one prefill of `num_tokens` and one decode, so that the first request is not slow.

        Uses the first blocks of the pool, which must hold nothing yet.
        """
        num_blocks = -(-(num_tokens + 1) // self.block_size)
        admission = SequenceAdmission(-1, num_tokens, SamplingRules(top_p=0.9))
        table = BlockTableDelta(-1, 0, tuple(range(num_blocks)))
        prefill = StepRow(-1, 0, (0,) * num_tokens, 0, True)
        decode = StepRow(-1, num_tokens, (0,), 0, True)
        self.execute(StepInput(-1, (), (admission,), (table,), (prefill,)))
        self.execute(StepInput(-1, (), (), (), (decode,)))
        self.execute(StepInput(-1, (-1,), (), (), ()))

    def _verify(self, step_rows: Sequence[StepRow], hidden: Tensor) -> list[VerifiedRow]:
        """hidden: [T, hidden_size]. Only the last known token and the guesses need logits."""
        rows = [row for row in step_rows if row.samples]
        if not rows:
            return []
        scored = _scored_tokens(step_rows)
        logits, argmax = self.model.compute_logits_and_argmax(
            hidden if len(scored) == len(hidden) else hidden[scored]
        )
        if all(map(self._sequences.takes_best, rows)):  # all that follows would do nothing
            whole = self._all_ranks_argmax(argmax)
            return self._report(rows, _best_tokens(whole, rows), whole.invalid_rows)
        if seen_ahead := self._seen_ahead(rows, logits):
            places = torch.tensor(places_to_verify(rows), device=logits.device)
            logits, argmax = logits[places], argmax.take(places)
        rules = [self._sequences.rules(row.seq_id) for row in rows]
        kept = KeptLogits(logits, rows, [each.logprobs for each in rules])
        has_nan = argmax.has_nan
        edits = self._sequences.logit_edits(rows)
        logits = edits.apply(logits)
        if edits.rows:
            argmax = argmax.with_rows(edits.rows, row_argmax(logits[edits.rows]))
        # The model's own logits tell whether it went wrong, even where the rules forbid a token.
        whole = self._all_ranks_argmax(replace(argmax, has_nan=has_nan))
        if all(each.is_greedy for each in rules):
            came = _best_tokens(whole, rows)
        else:
            came = self._verified(rows, logits, argmax)
        verified = self._report(rows, came, whole.invalid_rows, kept)
        if not seen_ahead:
            return verified
        return [
            row._replace(lookahead_token_ids=seen_ahead.get(row.seq_id, ())) for row in verified
        ]

    def _seen_ahead(self, rows: Sequence[StepRow], logits: Tensor) -> dict[int, tuple[int, ...]]:
        """By sequence with lookahead tokens, the likeliest token after each of its guesses.

        logits: [R, len(vocab_slice)], of the last known token and the guesses of each row.
        """
        if not (places := places_of_guesses(rows)):
            return {}
        likeliest = iter(self._likeliest(logits[places]))
        return {
            row.seq_id: tuple(islice(likeliest, row.num_guesses))
            for row in rows
            if row.num_lookahead_tokens
        }

    def _likeliest(self, logits: Tensor) -> list[int]:
        """The best token of each row of logits [R, len(vocab_slice)]; a collective call."""
        batch = SamplingBatch.greedy(len(logits), logits.device)
        shard = self._shard
        best = sample(logits, batch, shard.group, shard.first_token, shard.vocab_size)
        token_ids: list[int] = best.tolist()
        return token_ids

    def _all_ranks_argmax(self, argmax: RowArgmax) -> RowArgmax:
        """Of the whole vocabulary; argmax: of this rank's part. A collective call."""
        return all_ranks_argmax(argmax, self.group, self.model.vocab_slice.start)

    def _report(
        self,
        rows: Sequence[StepRow],
        verified: Sequence[tuple[int, ...]],
        is_bad: Sequence[bool],
        kept: KeptLogits | None = None,
    ) -> list[VerifiedRow]:
        """What came, which the next rows continue. is_bad: of all rows of logits, in order.

        kept: of those of `rows` that ask for log-probabilities.

        Tokens end before one that a bad row would have defined; the next step begins with that row.
        """
        came: list[tuple[int, tuple[int, ...]]] = []
        end = 0
        for row, token_ids in zip(rows, verified, strict=True):
            start, end = end, end + row.num_draft_tokens + 1
            own = is_bad[start:end]
            num_good = own.index(True) if True in own else len(own)
            came.append((row.seq_id, token_ids[:num_good]))
        logprobs = kept.logprobs(self._logprob_reader, came) if kept else {}
        for seq_id, token_ids in came:
            self._sequences.extend(seq_id, token_ids)
        return [
            VerifiedRow(seq_id, token_ids, logprobs.get(seq_id), has_bad_logits=not token_ids)
            for seq_id, token_ids in came
        ]

    def _prompt_logprobs(self, rows: Sequence[StepRow], hidden: Tensor) -> Iterator[PromptLogprobs]:
        """Of the tokens of prompts that follow those of `rows`, for whoever asks."""
        first = 0
        for row in rows:
            num_best = self._sequences.rules(row.seq_id).prompt_logprobs
            if num_best is not None and (tokens := self._sequences.prompt_after(row)):
                logprobs = self._logprob_reader.read_prompt(
                    hidden[first : first + len(tokens)], tokens, num_best, self._logits
                )
                yield PromptLogprobs(row.seq_id, row.num_computed_tokens + 1, logprobs)
            first += len(row.token_ids)

    @property
    def _logprob_reader(self) -> LogprobReader:
        return LogprobReader(self.group, self.model.vocab_slice.start, self.vocab_size)

    def _verified(
        self, rows: Sequence[StepRow], logits: Tensor, argmax: RowArgmax
    ) -> Sequence[tuple[int, ...]]:
        """The new tokens of each row.

        logits: [sum of num_draft_tokens + 1, len(vocab_slice)]; argmax: theirs.
        """
        members_of = self._by_verifier(rows)
        if len(members_of) == 1:
            return list(self._judge(next(iter(members_of)), rows, logits, argmax))
        verified: list[tuple[int, ...]] = [()] * len(rows)
        ends = np.cumsum([row.num_draft_tokens + 1 for row in rows])
        scored = np.split(np.arange(len(logits)), ends[:-1])
        for name, members in members_of.items():
            places = np.concatenate([scored[member] for member in members])
            own = torch.from_numpy(places).to(logits.device)
            judged = [rows[member] for member in members]
            came = self._judge(name, judged, logits[own], argmax.take(own))
            for member, token_ids in zip(members, came, strict=True):
                verified[member] = token_ids
        return verified

    def _judge(
        self, name: VerifierName, rows: Sequence[StepRow], logits: Tensor, argmax: RowArgmax
    ) -> VerifiedTokens:
        batch = self._sequences.sampling_batch([_coming(row) for row in rows], argmax)
        drafts = DraftBatch([self._draft(row) for row in rows], logits.device)
        return VERIFY[name](logits, batch, drafts, self._shard)

    def _by_verifier(self, rows: Sequence[StepRow]) -> dict[VerifierName, list[int]]:
        """The indices of the rows that each verifier judges."""
        members_of: dict[VerifierName, list[int]] = {}
        for index, row in enumerate(rows):
            name = self._sequences.rules(row.seq_id).acting_verifier
            members_of.setdefault(name, []).append(index)
        return members_of

    def _draft(self, row: StepRow) -> Draft:
        return Draft(row.drafts, self._sequences.rules(row.seq_id).verifier, row.draft_probs)


def _coming(row: StepRow) -> TokensToCome:
    """What the last known token of a row and its drafts define: the tokens behind their own."""
    return TokensToCome(row.seq_id, row.known_end, row.num_draft_tokens + 1)


def _scored_tokens(rows: Sequence[StepRow]) -> list[int]:
    """Flat indices of the tokens whose logits are needed, in the rows' order."""
    scored: list[int] = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        if row.samples:
            scored.extend(range(end - row.num_guesses - 1, end))
    return scored


def _best_tokens(argmax: RowArgmax, rows: Sequence[StepRow]) -> Sequence[tuple[int, ...]]:
    """The new tokens of rows that are verified against the best; argmax: of their logits."""
    return verify_greedy(argmax.token_ids.tolist(), [row.drafts for row in rows])


def _broken_chunks(rows: Sequence[StepRow], hidden: Tensor) -> Iterator[VerifiedRow]:
    """The rows that do not sample and whose hidden states, of [T, hidden_size], are no numbers.

    Their KV is none either, and must not be found by others who have the same prompt.
    """
    if all(row.samples for row in rows):
        return
    is_sound: list[bool] = hidden.isfinite().all(1).tolist()
    end = 0
    for row in rows:
        start, end = end, end + len(row.token_ids)
        if not row.samples and not all(is_sound[start:end]):
            yield VerifiedRow(row.seq_id, (), has_bad_logits=True)
