"""Count how many tokens the drafts of each method yield, on the same greedy texts.

The model generates once. Then each method drafts along the recorded texts, which takes seconds. A
second pass repeats the prompts with an added sentence and keeps the proposer, so suffix decoding
can use the outputs of the first pass.

    python -m benchmarks.replay [--num-prompts 32] [--num-draft-tokens 7] [--fresh]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.prompts import add_prompts_option, load_prompts
from benchmarks.recordings import Recording, load, record, save
from benchmarks.report_file import add_output, markdown_table, write_report
from benchmarks.workloads import MODEL
from specdec.config.hardware import default_cache_dir
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import EngineRequest, SequenceStatus
from specdec.sequences.sequence import Sequence as EngineSequence
from specdec.speculation.proposers import DraftRequest, Proposal, SentRow, make_proposer
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.sampling.sampling_spec import SamplingRules

_CLOSINGS = ("", "\n\nThink carefully before you answer.")
"""Text appended to the prompts of the first and of the second pass."""
METHODS: Mapping[str, SpeculativeConfig] = {
    "ngram": SpeculativeConfig.of("ngram"),
    "suffix": SpeculativeConfig.of("suffix"),
    "suffix, no earlier outputs": SpeculativeConfig.of(
        "suffix", suffix_decoding_max_cached_requests=0
    ),
    "draft_model": SpeculativeConfig.of("draft_model"),
    "draft_model, ngram first": SpeculativeConfig.of("draft_model", first="ngram"),
    "draft_model, suffix first": SpeculativeConfig.of("draft_model", first="suffix"),
}
"""The draft model is the target in int8."""
_NO_TOKEN = -1


@dataclass
class Tally:
    """Counters of the drafts for some recordings.

    num_model_drafts: drafts of the draft model.
    draft_seconds: CPU time in the proposer.
    """

    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_steps: int = 0
    num_tokens: int = 0
    num_model_drafts: int = 0
    draft_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, steps without a draft included; 1 without speculation."""
        return self.num_tokens / self.num_steps

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

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the drafts."""
        wanted = [request for request in requests if request.max_tokens]
        self.num_drafts += len(wanted)
        return [self._propose(request) for request in wanted]

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
    """Stepwise replay of recordings, with one proposer for all."""

    def __init__(
        self, config: SpeculativeConfig, num_draft_tokens: int, tokenizer: Tokenizer
    ) -> None:
        self._draft_model = RecordedDraftModel()
        proposer = make_proposer(config, self._draft_model)
        assert proposer is not None
        self._proposer = proposer
        self._num_draft_tokens = num_draft_tokens
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
        started_at = time.process_time()
        length = min(self._num_draft_tokens, len(coming) - 1)
        proposals = self._proposer.take([DraftRequest(seq, length)])
        tally.draft_seconds += time.process_time() - started_at
        draft = proposals[0].draft_token_ids if proposals else ()
        num_accepted = _num_equal(draft, coming)
        seq.token_ids += coming[: num_accepted + 1]
        tally.num_steps += 1
        tally.num_tokens += num_accepted + 1
        tally.speculation = tally.speculation.after_draft(len(draft), num_accepted)


def _num_equal(draft: Sequence[int], coming: Sequence[int]) -> int:
    for index, (drafted, token) in enumerate(zip(draft, coming, strict=False)):
        if drafted != token:
            return index
    return len(draft)


@dataclass(frozen=True)
class Row:
    """One method on one suite in one pass.

    mean_acceptance_length: tokens per draft, the target's own included.
    tokens_per_step: over all steps, those without a draft included.
    model_share: share of steps in which the draft model drafts.
    draft_us: CPU microseconds per step in the proposer, without the draft model.
    """

    method: str
    suite: str
    pass_number: int
    mean_acceptance_length: float
    tokens_per_step: float
    model_share: float
    draft_us: float


def replay_all(
    passes: Sequence[Sequence[Recording]], num_draft_tokens: int, tokenizer: Tokenizer
) -> list[Row]:
    """Return one row per method, suite and pass; one proposer handles all prompts of a suite."""
    rows = []
    for method, config in METHODS.items():
        for suite in sorted({recording.suite for recording in passes[0]}):
            replay = Replay(config, num_draft_tokens, tokenizer)
            for number, recordings in enumerate(passes, start=1):
                tally = replay.run([each for each in recordings if each.suite == suite])
                rows.append(_row(method, suite, number, tally))
    return rows


def _row(method: str, suite: str, pass_number: int, tally: Tally) -> Row:
    return Row(
        method=method,
        suite=suite,
        pass_number=pass_number,
        mean_acceptance_length=round(tally.speculation.mean_acceptance_length, 3),
        tokens_per_step=round(tally.tokens_per_step, 3),
        model_share=round(tally.model_share, 3),
        draft_us=round(tally.draft_us, 1),
    )


def table(rows: Sequence[Row], pass_number: int) -> str:
    """Return the acceptance lengths and tokens per step of a pass, methods by suites."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if row.pass_number == pass_number:
            lengths = f"{row.mean_acceptance_length:.2f} / {row.tokens_per_step:.2f}"
            cells.setdefault(row.method, [row.method]).append(lengths)
    suites = sorted({row.suite for row in rows})
    return markdown_table([f"pass {pass_number}", *suites], cells.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print acceptance length / tokens per step of both passes; return exit status 0."""
    options = _parser().parse_args(arguments)
    directory = resolve(MODEL)
    passes = _passes(directory, options)
    rows = replay_all(passes, options.num_draft_tokens, Tokenizer(directory))
    for number in range(1, 1 + len(passes)):
        print(table(rows, number), "\n")
    write_report(
        {"machine": asdict(describe_machine()), "rows": list(map(asdict, rows))}, options.output
    )
    return 0


def _passes(directory: Path, options: argparse.Namespace) -> list[list[Recording]]:
    """Return the recorded outputs of each pass, generated once and kept in the cache."""
    name = f"{options.prompts.stem}-{options.num_prompts}x{options.max_tokens}.json"
    path = default_cache_dir() / "benchmarks" / name
    if options.fresh or not path.exists():
        tokenizer = Tokenizer(directory)
        prompts = [
            prompt
            for closing in _CLOSINGS
            for prompt in load_prompts(options.prompts, tokenizer, closing)[: options.num_prompts]
        ]
        save(record(directory, prompts, options.max_tokens), path)
    recordings = load(path)
    size = len(recordings) // len(_CLOSINGS)
    return [recordings[index * size :][:size] for index in range(len(_CLOSINGS))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.replay", description="Compare the acceptance of all drafting methods."
    )
    add_prompts_option(parser)
    parser.add_argument("--num-prompts", type=int, default=32, help="number of prompts to use")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--fresh", action="store_true", help="generate the recordings again")
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
