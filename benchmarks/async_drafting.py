"""Measure asynchronous drafting with target and draft model on separate cores.

The engine and the target run on one core, the draft model in a process on another. One stream;
each number of draft tokens and each value of async_drafting take turns, with the same prompts, and
the best number of each value counts. The tokens of all runs must be equal.

The measured speeds and acceptance are then simulated (`benchmarks.async_simulation`): the figures
of simulation and machine should agree. The last line printed is JSON.

    python -m benchmarks.async_drafting [--draft-model DIR | --draft-quantization int8]
        [--target-cores 0] [--draft-cores 1] [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tqdm import tqdm

from benchmarks.bystanders import wait_until_quiet
from benchmarks.machine import Machine, describe_machine
from benchmarks.pinned_draft import PinnedRanks, draft_spec
from benchmarks.prompts import add_prompts_option, load_prompts, of_similar_length
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.simulated_models import (
    SimulatedClock,
    SimulatedDraftWorker,
    SimulatedTarget,
    Speeds,
    Texts,
)
from benchmarks.summary import Bar, at_least, at_most, print_bars
from benchmarks.workloads import MODEL
from cluster.workers.worker_group import DRAFT, WorkerGroup
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.resolve import print_progress, resolve
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.cost_profiler import CostProfiler
from specdec.speculation.proposers import DraftModelProposer
from specdec.speculation.proposers.outcome_planner import (
    MAX_FAN_OUT,
    OutcomePlanner,
    OutcomeStatistics,
    PassSpeed,
)
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import DraftOutput, DraftStep, Target
from specdec.types.sampling_params import SamplingParams
from specdec.types.stats import Counts
from specdec.worker import LocalTarget, load_runner

SYNCHRONOUS = "off"
MODES = (SYNCHRONOUS, "continuing", "outcomes")
_LIMITS = DraftLimits(
    num_blocks=32, block_size=16, max_model_len=512, max_catch_up_tokens=256,
    enable_prefix_caching=False,
)  # fmt: skip


@dataclass
class Run:
    """One value of async_drafting with one number of draft tokens, over all rounds."""

    mode: str
    num_draft_tokens: int
    tokens_per_s: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return median(self.tokens_per_s)


@dataclass(frozen=True)
class Row:
    """Median of one run; simulated: the same with models of the measured speeds."""

    mode: str
    num_draft_tokens: int
    tokens_per_s: float
    simulated: float
    hit_rate: float


@dataclass(frozen=True)
class Report:
    """Complete results. speeds, acceptance, rank_exponent: measured, and then simulated."""

    command: str
    machine: Machine
    model: str
    draft: str
    speeds: Speeds
    acceptance: float
    rank_exponent: float
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]


class Pinned:
    """Engines on one target and one draft model."""

    def __init__(
        self, directory: Path, target: LocalTarget, worker: WorkerGroup[DraftStep, DraftOutput]
    ) -> None:
        """directory: of the target. outcomes: what the runs of that mode have observed."""
        self.target = target
        self.outcomes = OutcomePlanner(time.monotonic)
        self._directory = directory
        self._worker = worker
        self._tokens: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}  # of any run

    def measure(self, run: Run, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Generate behind a prompt; prefill does not count. Raises AssertionError."""
        proposer = DraftModelProposer(self._worker, _LIMITS)
        if run.mode == "outcomes":
            proposer.keep_observations(self.outcomes)
        engine = engine_of(self._directory, self.target, proposer, run)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        engine.add(EngineRequest(prompt, params, request_id="r", seed=0))
        token_ids: list[int] = []
        began_at_s, first = time.perf_counter(), 0
        while engine.has_work:
            for output in engine.step():
                if not token_ids:
                    began_at_s, first = time.perf_counter(), len(output.token_ids)
                token_ids.extend(output.token_ids)
        seconds = time.perf_counter() - began_at_s
        known = self._tokens.setdefault((prompt, max_tokens), tuple(token_ids))
        assert known == tuple(token_ids), "speculation has changed the tokens"
        run.tokens_per_s.append((len(token_ids) - first) / seconds)
        counts = engine.stats().counts.plus(proposer.counts)
        run.counts = run.counts.plus(counts)
        self._worker.collect_ahead(wait=True)


def engine_of(directory: Path, target: Target, proposer: DraftModelProposer, run: Run) -> Engine:
    """Return an engine for one stream with a fixed number of draft tokens."""
    speculation = SpeculativeConfig.of(
        "draft_model", run.num_draft_tokens, async_drafting=run.mode, policy="threshold"
    )
    config = EngineConfig(
        max_model_len=512,
        num_blocks=32,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculation=speculation,
    )
    model, tokenizer = ModelConfig.from_directory(directory), Tokenizer(directory)
    return Engine(config, model, target, tokenizer, proposer)


def simulate(
    directory: Path, run: Run, speeds: Speeds, acceptance: float, exponent: float
) -> float:
    """Return the tokens per second of a run with models of these speeds."""
    clock, texts = SimulatedClock(), Texts(acceptance, exponent)
    worker = SimulatedDraftWorker(clock, speeds, texts)
    limits = DraftLimits(1 << 10, 16, 1 << 14, 256, enable_prefix_caching=False)
    proposer = DraftModelProposer(worker, limits, clock=clock)
    speculation = SpeculativeConfig.of(
        "draft_model", run.num_draft_tokens, async_drafting=run.mode, policy="threshold"
    )
    config = EngineConfig(
        max_model_len=1 << 14, num_blocks=1 << 10, max_num_seqs=1, enable_prefix_caching=False,
        stream_interval=2**20, speculation=speculation,
    )  # fmt: skip
    model, tokenizer = ModelConfig.from_directory(directory), Tokenizer(directory)
    target = SimulatedTarget(clock, speeds, texts)
    engine = Engine(config, model, target, tokenizer, proposer, clock=clock)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    engine.add(EngineRequest((5, 6, 7), params, request_id="r", seed=0))
    while engine.stats().counts.num_generated_tokens < 4000:
        engine.step()
    return engine.stats().counts.num_generated_tokens / clock()


def _target(directory: Path) -> LocalTarget:
    config = EngineConfig(max_model_len=512, num_blocks=32, max_num_seqs=1)
    return LocalTarget(load_runner(directory, "float32", config, TensorParallelGroup()))


def _measure(pinned: Pinned, directory: Path, options: argparse.Namespace) -> list[Run]:
    """Run each mode with each number of draft tokens once a round, on another prompt each."""
    prompts = of_similar_length(load_prompts(options.prompts, Tokenizer(directory)), options.rounds)
    runs = [Run(mode, count) for mode in MODES for count in options.num_draft_tokens]
    for run in runs:
        pinned.measure(Run(run.mode, run.num_draft_tokens), prompts[0], 16)  # warm up
    for index, prompt in enumerate(tqdm(prompts, "rounds", leave=False)):
        for place in range(len(runs)):
            if options.quiet_limit_s:
                wait_until_quiet(options.quiet_limit_s)
            pinned.measure(runs[(place + index) % len(runs)], prompt, options.max_tokens)
    return runs


def _speeds(target: LocalTarget, passes: PassSpeed) -> Speeds:
    """Return the speeds of both models, of the target by a profile of its steps."""
    config = EngineConfig(max_model_len=512, num_blocks=32, max_num_seqs=1)
    table = CostProfiler(config, 8, time.perf_counter).verification(target, 4.0)
    one_s, row_s = table.step_s(1, 0), (table.step_s(1, 8) - table.step_s(1, 0)) / 8
    draft_s, many_s = passes.seconds(1), passes.seconds(17)
    assert draft_s is not None, "no draft was made ahead"
    assert many_s is not None, "no draft was made ahead"
    return Speeds(one_s, draft_s, target_row_s=row_s, draft_row_s=(many_s - draft_s) / 16)


def _acceptance(counts: Counts) -> float:
    """Return the part of the draft tokens that were accepted, of those behind accepted ones."""
    drafted, accepted = counts.drafted_by_position, counts.accepted_by_position
    num_verified = drafted[0] + sum(
        min(reached, made) for reached, made in zip(accepted, drafted[1:], strict=False)
    )
    return sum(accepted) / num_verified


def _rank_exponent(outcomes: OutcomeStatistics) -> float:
    """Return the exponent of `Texts` by which the first of the other tokens is as often right."""
    first = outcomes.hit_rate((1, 0)) / outcomes.hit_rate((MAX_FAN_OUT, 0))
    low, high = 0.0, 6.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        share = 1 / sum(rank**-middle for rank in range(1, MAX_FAN_OUT + 1))
        low, high = (middle, high) if share < first else (low, middle)
    return round(low, 2)


def _report(
    directory: Path, draft: str, runs: Sequence[Run], pinned: Pinned, arguments: Sequence[str]
) -> Report:
    speeds = _speeds(pinned.target, pinned.outcomes.speed)
    acceptance = _acceptance(Counts.sum(run.counts for run in runs if run.mode == SYNCHRONOUS))
    exponent = _rank_exponent(pinned.outcomes.outcomes)
    rows = tuple(
        Row(
            run.mode,
            run.num_draft_tokens,
            round(run.median, 2),
            round(simulate(directory, run, speeds, acceptance, exponent), 2),
            round(run.counts.ahead.hit_rate, 3),
        )
        for run in runs
    )
    return Report(
        command_line("benchmarks.async_drafting", arguments),
        describe_machine(),
        MODEL,
        draft,
        speeds,
        round(acceptance, 3),
        exponent,
        rows,
        _bars(rows),
    )


def _bars(rows: Sequence[Row]) -> tuple[Bar, ...]:
    best = {mode: max(row.tokens_per_s for row in rows if row.mode == mode) for mode in MODES}
    ahead = max(best["continuing"], best["outcomes"]) / best[SYNCHRONOUS]
    distances = [abs(row.simulated / row.tokens_per_s - 1) for row in rows]
    return (
        at_least("best asynchronous over best synchronous drafting", ahead, 1.2),
        at_most("distance of simulated and measured speed, the largest", max(distances), 0.1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a limit is missed."""
    options = _parser().parse_args(arguments)
    os.sched_setaffinity(0, options.target_cores)
    directory = resolve(MODEL, progress=print_progress)
    draft_dir = options.draft_model or directory
    quantization = None if options.draft_model else options.draft_quantization
    spec = draft_spec(draft_dir, _LIMITS, quantization)
    worker = WorkerGroup(DRAFT, spec, None, PinnedRanks(spec, options.draft_cores))  # type: ignore[arg-type]
    pinned = Pinned(directory, _target(directory), worker)
    try:
        runs = _measure(pinned, directory, options)
    finally:
        worker.close()
    draft = f"{draft_dir.name} {quantization or 'float32'}"
    report = _report(directory, draft, runs, pinned, arguments or sys.argv[1:])
    print_bars(report.bars)
    write_report(report, options.output)
    return 0 if all(each.is_met for each in report.bars) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.async_drafting", description="Measure asynchronous drafting on two cores."
    )
    parser.add_argument("--draft-model", type=Path, help="directory (default: the target's copy)")
    parser.add_argument("--draft-quantization", choices=("int8", "w8a8"), default="int8")
    parser.add_argument("--target-cores", type=int, nargs="+", default=(0,))
    parser.add_argument("--draft-cores", type=int, nargs="+", default=(1,))
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=(1, 2, 3, 5))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--quiet-limit-s", type=float, default=120.0)
    add_prompts_option(parser)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
