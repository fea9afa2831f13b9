"""Measure asynchronous drafting with target and draft model on separate cores.

The engine and the target run on one core, the draft model in a process on another. One stream;
each number of draft tokens and each value of async_drafting take turns, with the same prompts, and
the best number of each value counts. The tokens of all runs must be equal.

Two comparisons follow. The runs are simulated (`benchmarks.simulated_models`) with the recorded
texts and the measured seconds of passes: speeds should agree. And the hits of the runs are compared
with what the distributions of both models along the texts let expect.

Speculation that is switched off is compared with an engine without a draft model. The last line
printed is JSON.

    python -m benchmarks.async_drafting [--draft-model NAME] [--draft-precision int8]
        [--temperature 0] [--target-cores 0] [--draft-cores 1] [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tqdm import tqdm

from benchmarks.bystanders import wait_until_quiet
from benchmarks.drafting_engines import (
    LIMITS,
    MODES,
    NO_DRAFTER,
    SWITCHED_OFF,
    SYNCHRONOUS,
    Run,
    local_target,
)
from benchmarks.drafting_runs import Pinned, SimulatedRuns
from benchmarks.machine import Machine, describe_machine
from benchmarks.pinned_draft import PinnedRanks, draft_spec
from benchmarks.precisions import PRECISIONS
from benchmarks.prompts import add_prompts_option, load_prompts, of_similar_length
from benchmarks.recorded_texts import RecordedText, TextRecorder, expected_hit_rate
from benchmarks.recordings import TextScorer
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.summary import Bar, at_least, at_most, print_bars
from benchmarks.timed_models import ModelTimes
from benchmarks.workloads import MODEL
from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.worker_group import WorkerGroup
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer

_PRECISIONS = ("fp32", "int8", "w8a8")
_MIN_ROUNDS_OF_HITS = 200
"""Rounds of a value below which its hits are too few to compare."""


@dataclass(frozen=True)
class Row:
    """Medians of one run, measured and simulated, and the share of rounds that were hits."""

    mode: str
    num_draft_tokens: int
    tokens_per_s: float
    simulated: float
    hit_rate: float


@dataclass(frozen=True)
class HitRates:
    """Hits of one value of async_drafting, measured and expected; see RecordedText."""

    mode: str
    num_rounds: int
    measured: float
    expected: float


@dataclass(frozen=True)
class Times:
    """Mean seconds of one value of async_drafting; see ModelTimes.

    messages_s: of drafts ahead. waited_s, host_s: in a step. draft_busy: part of the time in which
        the draft model runs passes for drafts ahead.
    """

    mode: str
    target: Mapping[int, float]
    synchronous: Mapping[int, float]
    first: Mapping[int, float]
    levels: Mapping[int, float]
    messages_s: float
    waited_s: float
    host_s: float
    draft_busy: float


@dataclass(frozen=True)
class OffCost:
    """Speculation that is switched off, with its draft model beside it.

    share: median speed over that of an engine without a draft model. draft_cpu_s: CPU seconds of
        the draft model's process in `seconds` of such runs.
    """

    share: float
    draft_cpu_s: float
    seconds: float

    @classmethod
    def of(cls, off: Run, without: Run) -> OffCost:
        """Compare runs on the same prompts, one after the other."""
        shares = [a / b for a, b in zip(off.tokens_per_s, without.tokens_per_s, strict=True)]
        return cls(round(median(shares), 4), round(off.draft_cpu_s, 3), round(off.seconds, 2))


@dataclass(frozen=True)
class Report:
    """Complete results."""

    command: str
    machine: Machine
    model: str
    draft: str
    temperature: float
    rows: tuple[Row, ...]
    hits: tuple[HitRates, ...]
    times: tuple[Times, ...]
    off: OffCost | None
    bars: tuple[Bar, ...]


def _measure(pinned: Pinned, runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Run each of `runs` once a round, in another order each, on another prompt each."""
    for index, prompt in enumerate(tqdm(_prompts(pinned, options), "rounds", leave=False)):
        for place in range(len(runs)):
            if options.quiet_limit_s:
                wait_until_quiet(options.quiet_limit_s)
            pinned.measure(runs[(place + index) % len(runs)], prompt, options.max_tokens)


def _warm_up(pinned: Pinned, runs: Sequence[Run], options: argparse.Namespace) -> None:
    prompt = _prompts(pinned, options)[0]
    for run in runs:
        pinned.measure(Run(run.mode, run.num_draft_tokens), prompt, 16)
    pinned.forget_times()


def _prompts(pinned: Pinned, options: argparse.Namespace) -> list[tuple[int, ...]]:
    prompts = load_prompts(options.prompts, Tokenizer(pinned.directory))
    return of_similar_length(prompts, options.rounds)


def _simulate(pinned: Pinned, runs: Sequence[Run], texts: Sequence[RecordedText]) -> list[Run]:
    """Repeat the runs, in the same order, with models of the measured times."""
    repeated = [Run(run.mode, run.num_draft_tokens) for run in runs]
    simulated = SimulatedRuns(pinned.directory, pinned.times, pinned.temperature)
    for index, text in enumerate(tqdm(texts, "simulation", leave=False)):
        for place in range(len(runs)):
            simulated.measure(repeated[(place + index) % len(runs)], text)
    return repeated


def _hits(runs: Sequence[Run], texts: Sequence[RecordedText]) -> tuple[HitRates, ...]:
    by_prompt = {text.prompt: text for text in texts}
    found = []
    for mode in MODES[1:]:
        own = [run for run in runs if run.mode == mode]
        rounds = [(by_prompt[prompt], row) for run in own for prompt, row in run.rounds]
        hits = sum(sum(run.counts.ahead.hits.values()) for run in own)
        misses = sum(sum(run.counts.ahead.misses.values()) for run in own)
        measured = round(hits / max(1, hits + misses), 4)
        found.append(HitRates(mode, hits + misses, measured, round(expected_hit_rate(rounds), 4)))
    return tuple(found)


def _times(mode: str, times: ModelTimes, runs: Sequence[Run]) -> Times:
    own = [run for run in runs if run.mode == mode]
    busy_s = sum(run.counts.ahead.busy_s for run in own)
    return Times(
        mode,
        times.target.means(),
        times.synchronous.means(),
        times.first.means(),
        times.levels.means(),
        times.messages.means().get(1, 0.0),
        round(times.waited_s / max(1, times.num_steps), 6),
        round(times.host_step_s, 6),
        round(busy_s / max(1e-9, sum(run.seconds for run in own)), 4),
    )


def _bars(rows: Sequence[Row], hits: Sequence[HitRates], off: OffCost | None) -> tuple[Bar, ...]:
    best = {mode: max(row.tokens_per_s for row in rows if row.mode == mode) for mode in MODES}
    ahead = max(best["continuing"], best["outcomes"]) / best[SYNCHRONOUS]
    speeds = [abs(row.simulated / row.tokens_per_s - 1) for row in rows]
    rates = [
        abs(each.measured - each.expected)
        for each in hits
        if each.num_rounds >= _MIN_ROUNDS_OF_HITS
    ]
    bars = [
        at_least("best asynchronous over best synchronous drafting", ahead, 1.2),
        at_most("distance of simulated and measured speed, the largest", max(speeds), 0.1),
    ]
    if off is not None:
        bars.append(at_least("switched off over no drafter", off.share, 0.99))
    if rates:
        bars.append(at_most("distance of expected and measured hit rate", max(rates), 0.03))
    return tuple(bars)


def _recorder(directory: Path, draft_dir: Path, options: argparse.Namespace) -> TextRecorder:
    target = TextScorer(directory, PRECISIONS[options.target_precision])
    return TextRecorder(
        target, TextScorer(draft_dir, PRECISIONS[options.draft_precision]), draft_dir
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a limit is missed."""
    options = _parser().parse_args(arguments)
    os.sched_setaffinity(0, options.target_cores)
    directory = resolve(MODEL, progress=print_progress)
    draft_dir = resolve(options.draft_model or MODEL, progress=print_progress)
    spec = draft_spec(draft_dir, LIMITS, PRECISIONS[options.draft_precision].quantization)
    ranks = PinnedRanks(spec, options.draft_cores)
    worker = WorkerGroup(DRAFT, spec, None, ranks)  # type: ignore[arg-type]
    target = local_target(directory, PRECISIONS[options.target_precision].quantization)
    pinned = Pinned(directory, target, worker, ranks, options.temperature)
    runs = [Run(mode, count) for mode in MODES for count in options.num_draft_tokens]
    plain = [Run(mode, max(options.num_draft_tokens)) for mode in (SWITCHED_OFF, NO_DRAFTER)]
    try:
        _warm_up(pinned, [*runs, *plain], options)
        _measure(pinned, runs, options)
        for _ in range(options.plain_repeats):
            _measure(pinned, plain, options)
    finally:
        worker.close()
    recorder, outputs = _recorder(directory, draft_dir, options), pinned.outputs(options.max_tokens)
    texts = [recorder.record(*each, options.temperature) for each in outputs.items()]
    simulated = _simulate(pinned, runs, texts) if options.temperature == 0 else runs
    rows = tuple(_row(*each) for each in zip(runs, simulated, strict=True))
    hits, off = _hits(runs, texts), OffCost.of(*plain) if plain[0].tokens_per_s else None
    report = Report(
        command_line("benchmarks.async_drafting", arguments or sys.argv[1:]),
        describe_machine(),
        f"{MODEL} {options.target_precision}",
        f"{options.draft_model or MODEL} {options.draft_precision}",
        options.temperature,
        rows,
        hits,
        tuple(_times(mode, pinned.times[mode], runs) for mode in MODES),
        off,
        _bars(rows, hits, off),
    )
    print_bars(report.bars)
    write_report(report, options.output)
    return 0 if all(each.is_met for each in report.bars) else 1


def _row(run: Run, simulated: Run) -> Row:
    return Row(
        run.mode,
        run.num_draft_tokens,
        round(run.median, 2),
        round(simulated.median, 2),
        round(run.counts.ahead.hit_rate, 3),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.async_drafting", description="Measure asynchronous drafting on two cores."
    )
    parser.add_argument("--draft-model", help="name or directory (default: a copy of the target)")
    parser.add_argument("--target-precision", choices=_PRECISIONS, default="fp32")
    parser.add_argument("--draft-precision", choices=_PRECISIONS, default="int8")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="above 0 nothing is simulated"
    )
    parser.add_argument("--target-cores", type=int, nargs="+", default=(0,))
    parser.add_argument("--draft-cores", type=int, nargs="+", default=(1,))
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=(1, 2, 3, 5))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain-repeats", type=int, default=1, help="of runs without speculation")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--quiet-limit-s", type=float, default=120.0)
    add_prompts_option(parser)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
