"""Replay of a proposer's drafts on recordings of greedy text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cost_table import CostTable
from benchmarks.recordings import Recording
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.sequences.sequence import EngineRequest, SequenceStatus
from specdec.sequences.sequence import Sequence as EngineSequence
from specdec.speculation.proposers import DraftRequest, Proposal, SentRow, make_proposer
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.sampling.sampling_spec import SamplingRules

_NO_TOKEN = -1


@dataclass
class Tally:
    """Counters of the drafts for some recordings.

    num_model_drafts: drafts of the draft model.
    draft_seconds: CPU time in the proposer.
    kinds: number of steps by (drafted tokens, tokens drafted by the draft model).
    """

    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_steps: int = 0
    num_tokens: int = 0
    num_model_drafts: int = 0
    draft_seconds: float = 0.0
    kinds: Counter[tuple[int, int]] = field(default_factory=Counter)

    def seconds(self, costs: CostTable) -> float:
        """Return the estimated time of all steps."""
        return sum(count * costs.step_s(*kind) for kind, count in self.kinds.items())

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, steps without a draft included; 1 without speculation."""
        return self.num_tokens / self.num_steps

    @property
    def drafted_share(self) -> float:
        """Share of steps with a draft."""
        return self.speculation.num_drafts / self.num_steps

    @property
    def model_share(self) -> float:
        """Share of steps in which the draft model drafts."""
        return self.num_model_drafts / self.num_steps

    @property
    def draft_us(self) -> float:
        """Microseconds per step in the proposer, including the processing of new tokens."""
        return 1e6 * self.draft_seconds / self.num_steps


class RecordedDraftModel:
    """Draft model replayed from a recording, correct up to the first disagreement."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.num_drafts = 0
        self.num_tokens = 0

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the drafts."""
        wanted = [request for request in requests if request.max_tokens]
        self.num_drafts += len(wanted)
        proposals = [self._propose(request) for request in wanted]
        self.num_tokens += sum(len(each.draft_token_ids) for each in proposals)
        return proposals

    def ahead(self, rows: Sequence[SentRow]) -> None:
        """Do nothing: no time passes while the target runs."""

    def end_step(self, *, is_lost: bool = False) -> None:
        """Do nothing, for the same reason."""

    def release(self, seq_id: int) -> None:
        """Do nothing; there is no state per sequence."""

    def _propose(self, request: DraftRequest) -> Proposal:
        assert self.recording is not None
        seq, stop = request.seq, request.seq.num_output_tokens + request.max_tokens
        coming = slice(seq.num_output_tokens, stop)
        tokens, agrees = self.recording.output_token_ids[coming], self.recording.draft_agrees
        draft = [
            token if agreed else _NO_TOKEN
            for token, agreed in zip(tokens, agrees[coming], strict=True)
        ]
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], tuple(draft))


class Replay:
    """Stepwise replay of recordings, with one proposer for all.

    Draft lengths are adaptive if `config` enables it, starting with `num_draft_tokens`.
    """

    def __init__(
        self, config: SpeculativeConfig, num_draft_tokens: int, tokenizer: Tokenizer
    ) -> None:
        self._draft_model = RecordedDraftModel()
        proposer = make_proposer(config, self._draft_model)
        assert proposer is not None
        self._proposer = proposer
        self._num_draft_tokens = num_draft_tokens
        self._rule = config.length_rule
        self._tokenizer = tokenizer
        self._num_sequences = 0

    def run(self, recordings: Sequence[Recording]) -> Tally:
        """Draft along each recording from its prompt to its end."""
        tally, num_drafts = Tally(), self._draft_model.num_drafts
        for recording in recordings:
            self._draft_model.recording = recording
            seq = self._begin(recording)
            while seq.num_output_tokens < len(recording.output_token_ids):
                self._step(seq, recording, tally)
            seq.status = SequenceStatus.FINISHED
            self._proposer.release(seq.seq_id)
        tally.num_model_drafts = self._draft_model.num_drafts - num_drafts
        return tally

    def _begin(self, recording: Recording) -> EngineSequence:
        """Return a sequence in the state after its prefill, with the first output token."""
        self._num_sequences += 1
        name = str(self._num_sequences)
        request = EngineRequest(
            recording.prompt_token_ids, SamplingParams(), request_id=name, seed=0
        )
        seq = EngineSequence(
            self._num_sequences,
            request,
            SamplingRules(),
            IncrementalDetokenizer(self._tokenizer, ()),
        )
        seq.token_ids.append(recording.output_token_ids[0])
        return seq

    def _step(self, seq: EngineSequence, recording: Recording, tally: Tally) -> None:
        coming = recording.output_token_ids[seq.num_output_tokens :]
        num_made = self._draft_model.num_tokens
        started_at = time.process_time()
        length = min(self._length(seq), len(coming) - 1)
        proposals = self._proposer.take([DraftRequest(seq, length)])
        tally.draft_seconds += time.process_time() - started_at
        draft = proposals[0].draft_token_ids if proposals else ()
        num_accepted = _num_equal(draft, coming)
        seq.token_ids += coming[: num_accepted + 1]
        self._adapt_length(seq, len(draft), num_accepted)
        tally.num_steps += 1
        tally.num_tokens += num_accepted + 1
        tally.kinds[len(draft), self._draft_model.num_tokens - num_made] += 1
        tally.speculation = tally.speculation.after_draft(len(draft), num_accepted)

    def _length(self, seq: EngineSequence) -> int:
        """As the scheduler decides it."""
        if self._rule is None:
            return self._num_draft_tokens
        seq.draft_length = self._rule.begin(seq.draft_length, self._num_draft_tokens)
        return seq.draft_length.num_tokens

    def _adapt_length(self, seq: EngineSequence, num_drafted: int, num_accepted: int) -> None:
        if self._rule is not None and seq.draft_length is not None:
            seq.draft_length = self._rule.after(seq.draft_length, num_drafted, num_accepted)


def _num_equal(draft: Sequence[int], coming: Sequence[int]) -> int:
    for index, (drafted, token) in enumerate(zip(draft, coming, strict=False)):
        if drafted != token:
            return index
    return len(draft)
