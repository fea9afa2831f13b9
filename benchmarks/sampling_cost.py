"""Measure the share of sampling and verification in a step, and on logits of a larger model.

The first part runs the real model on 16 sequences, without drafts and with three each; cases take
turns, and a figure is the median over the rounds. The kernel that computes the logits also finds
the best one of each row, so that is not counted here. The second part samples random logits of 256
rows and 150,000 tokens, whose probabilities follow Zipf's law (Zipf 1949).

    python -m benchmarks.sampling_cost [--rounds 15] [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.bystanders import CpuUsage, wait_until_quiet
from benchmarks.machine import Machine, describe_machine, num_usable_cores
from benchmarks.prompts import DEFAULT_PATH, load_prompts
from benchmarks.report_file import add_output, write_report
from benchmarks.summary import verdict
from benchmarks.timed_runner import TimedRunner
from benchmarks.workloads import MODEL
from specdec.config.engine import EngineConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.resolve import print_progress, resolve
from specdec.sampling.logits_processors import BatchLogitsProcessor, LogitsProcessor
from specdec.sampling.logprobs import token_logprobs as read_logprobs
from specdec.sampling.sampler import SamplingBatch, sample
from specdec.sampling.token_history import TokenHistory
from specdec.sampling.vocab_shard import VocabShard
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import TargetModelRunner, load_runner

_NUM_SEQS = 16
_CONTEXT_TOKENS = 64
_MAX_DRAFTS = 3
_BLOCK_SIZE = 16

_LARGE_BATCH, _LARGE_VOCABULARY = 256, 150_000
_LARGE_HISTORY_TOKENS = 500
_ZIPF_EXPONENT = 1.3

_QUIET_LIMIT_S = 120.0

CASES: Mapping[str, SamplingRules] = {
    "greedy": SamplingRules(temperature=0.0),
    "top_p 0.95": SamplingRules(top_p=0.95),
    "full vocabulary": SamplingRules(),
    "min_p 0.05": SamplingRules(min_p=0.05),
    "top_k 50, top_p 0.95": SamplingRules(top_k=50, top_p=0.95),
    "greedy, penalties": SamplingRules(
        temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2
    ),
    "greedy, logprobs 5": SamplingRules(temperature=0.0, logprobs=5),
}
AIMS: Mapping[str, float] = {"greedy": 0.05, "top_p 0.95": 0.10, "full vocabulary": 0.15}
"""Maximum share of a step without drafts."""


@dataclass(frozen=True)
class Row:
    """Medians of one case on the real model; `share` is computed within each step first."""

    case: str
    num_draft_tokens: int
    step_ms: float
    sampling_ms: float
    share: float
    aim: float | None

    @property
    def is_met(self) -> bool | None:
        """Return whether the share is within its aim; None without an aim."""
        return None if self.aim is None else self.share <= self.aim


@dataclass(frozen=True)
class Report:
    """Complete results. large_ms: milliseconds by case, on the random logits."""

    machine: Machine
    others_percent: float
    rows: tuple[Row, ...]
    large_ms: Mapping[str, float]


class Bench:
    """Model with one set of sequences per case, each at the end of its prompt."""

    def __init__(self, directory: Path) -> None:
        """Load the model and prefill the prompts."""
        blocks_each = -(-(_CONTEXT_TOKENS + 1 + _MAX_DRAFTS) // _BLOCK_SIZE)
        num_blocks = blocks_each * _NUM_SEQS * len(CASES)
        config = EngineConfig(max_model_len=512, num_blocks=num_blocks, block_size=_BLOCK_SIZE)
        self._runner = load_runner(directory, "float32", config, TensorParallelGroup())
        prompts = [each.token_ids for each in load_prompts(DEFAULT_PATH, Tokenizer(directory))]
        length = _CONTEXT_TOKENS + 1 + _MAX_DRAFTS
        long_enough = [prompt for prompt in prompts if len(prompt) >= length]
        self._prompts = [prompt[:length] for prompt in long_enough[:_NUM_SEQS]]
        for index, rules in enumerate(CASES.values()):
            for place, prompt in enumerate(self._prompts):
                _prefill(self._runner, index * _NUM_SEQS + place, prompt, rules, blocks_each)

    def measure(self, case: str, num_drafts: int) -> tuple[float, float]:
        """Return the seconds of one step of a case, and of its sampling and verification.

        Drafts are the prompt's next tokens, so each follows a meaningful text. The step can be
        repeated: rejected drafts and drawn tokens leave no trace.
        """
        first_seq_id = list(CASES).index(case) * _NUM_SEQS
        rows = tuple(
            StepRow(
                seq_id,
                _CONTEXT_TOKENS,
                prompt[_CONTEXT_TOKENS : _CONTEXT_TOKENS + 1 + num_drafts],
                num_drafts,
                True,
            )
            for seq_id, prompt in enumerate(self._prompts, first_seq_id)
        )
        with TimedRunner(self._runner) as timed:
            self._runner.execute(StepInput(0, (), (), (), rows))
        sampling_s = timed.seconds["_verify"] - timed.seconds["model.compute_logits_and_argmax"]
        return timed.seconds["execute"], sampling_s


def _prefill(
    runner: TargetModelRunner,
    seq_id: int,
    prompt: tuple[int, ...],
    rules: SamplingRules,
    num_blocks: int,
) -> None:
    admission = SequenceAdmission(seq_id, 1, rules, prompt[: _CONTEXT_TOKENS + 1])
    first_block = seq_id * num_blocks
    table = BlockTableDelta(seq_id, 0, tuple(range(first_block, first_block + num_blocks)))
    row = StepRow(seq_id, 0, prompt[:_CONTEXT_TOKENS], 0, False)
    runner.execute(StepInput(0, (), (admission,), (table,), (row,)))


def measure_model(bench: Bench, num_rounds: int) -> tuple[Row, ...]:
    """Measure all cases in turn in each round, after a warm-up round."""
    cases = [(case, num_drafts) for case in CASES for num_drafts in (0, _MAX_DRAFTS)]
    measured: dict[tuple[str, int], list[tuple[float, float]]] = {each: [] for each in cases}
    for index in range(num_rounds + 1):
        for each in cases:
            seconds = bench.measure(*each)
            if index > 0:
                measured[each].append(seconds)
    return tuple(_row(*each, seconds) for each, seconds in measured.items())


def _row(case: str, num_drafts: int, seconds: Sequence[tuple[float, float]]) -> Row:
    return Row(
        case=case,
        num_draft_tokens=num_drafts,
        step_ms=statistics.median(1000 * step for step, _ in seconds),
        sampling_ms=statistics.median(1000 * sampling for _, sampling in seconds),
        share=statistics.median(sampling / step for step, sampling in seconds),
        aim=AIMS.get(case) if num_drafts == 0 else None,
    )


def measure_large(num_rounds: int) -> dict[str, float]:
    """Return the medians on the random logits in milliseconds; each case runs once per round."""
    ranks = torch.stack([torch.randperm(_LARGE_VOCABULARY) for _ in range(_LARGE_BATCH)])
    logits = ranks.float().add_(1).log_().mul_(-_ZIPF_EXPONENT)
    measured: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(num_rounds):
        for case, rules in CASES.items():
            work = _large_work(logits, rules)
            started_at = time.perf_counter()
            work()
            measured[case].append(1000 * (time.perf_counter() - started_at))
    return {case: statistics.median(each) for case, each in measured.items()}


def _large_work(logits: Tensor, rules: SamplingRules) -> Callable[[], object]:
    rows, tokens = range(_LARGE_BATCH), range(_LARGE_VOCABULARY)
    shard = VocabShard(TensorParallelGroup(), 0, _LARGE_VOCABULARY)
    processor = LogitsProcessor.of(rules, tokens)
    text = torch.randint(_LARGE_VOCABULARY, (_LARGE_HISTORY_TOKENS,)).tolist()
    history = TokenHistory(text, 1) if rules.needs_tokens else None
    shaped = logits.clone() if rules.has_penalties else logits
    batch = _large_batch(rules)

    def work() -> None:
        batch_processor = BatchLogitsProcessor(tokens)
        for row in rows:
            batch_processor.add(row, processor, _LARGE_HISTORY_TOKENS, history)
        drawn = sample(batch_processor.apply(shaped), batch, shard)
        if rules.logprobs is not None:
            read_logprobs(logits, drawn.tolist(), rules.logprobs, shard)

    return work


def _large_batch(rules: SamplingRules) -> SamplingBatch:
    return SamplingBatch.from_lists(
        temperatures=[rules.temperature] * _LARGE_BATCH,
        top_k=[rules.top_k] * _LARGE_BATCH,
        top_p=[rules.top_p] * _LARGE_BATCH,
        min_p=[rules.min_p] * _LARGE_BATCH,
        seeds=list(range(_LARGE_BATCH)),
        choices=[0] * _LARGE_BATCH,
        positions=list(range(_LARGE_BATCH)),
    )


def print_table(report: Report) -> None:
    """Print the results with their aims."""
    print(f"{'case':24} {'drafts':>6} {'step ms':>8} {'sampling ms':>12} {'share':>7} {'aim':>6}")
    for row in report.rows:
        aim = "" if row.aim is None else f"{row.aim:6.0%} {verdict(row.is_met)}"
        figures = f"{row.step_ms:8.1f} {row.sampling_ms:12.2f} {row.share:7.1%}"
        print(f"{row.case:24} {row.num_draft_tokens:6} {figures} {aim}")
    print(f"\n{_LARGE_BATCH} rows of {_LARGE_VOCABULARY} random logits")
    for case, milliseconds in report.large_ms.items():
        print(f"{case:24} {milliseconds:8.1f} ms")
    print(f"other processes used {report.others_percent:.0f} % of a core")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(num_usable_cores())
    torch.manual_seed(0)
    bench = Bench(resolve(MODEL))
    wait_until_quiet(_QUIET_LIMIT_S)
    before = CpuUsage.now()
    print_progress("measuring the model's steps")
    rows = measure_model(bench, options.rounds)
    others_percent = CpuUsage.now().others_percent_since(before)
    print_progress("measuring random logits")
    large = measure_large(max(1, options.rounds // 5))
    report = Report(describe_machine(), others_percent, rows, large)
    print_table(report)
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.sampling_cost", description="Measure sampling and verification."
    )
    parser.add_argument("--rounds", type=int, default=15)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
