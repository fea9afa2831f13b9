"""Measure asynchronous drafting with target and draft model on separate cores.

The engine and the target run on one core, the draft model in a process on another. One stream;
each number of draft tokens and each value of async_drafting take turns, with the same prompts, and
the best number of each value counts. The tokens of all runs must be equal.

Speculation that is switched off is compared with an engine without a draft model. The last line
printed is JSON.

    python -m benchmarks.async_drafting [--draft-model NAME] [--draft-precision int8]
        [--temperature 0] [--target-cores 0] [--draft-cores 1] [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
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
    Engines,
    Models,
    Run,
    local_target,
)
from benchmarks.machine import Machine, describe_machine
from benchmarks.pinned_draft import PinnedRanks, draft_spec
from benchmarks.precisions import PRECISIONS
from benchmarks.prompts import add_prompts_option, load_prompts, of_similar_length
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.summary import Bar, at_least, print_bars
from benchmarks.workloads import MODEL
from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.worker_group import WorkerGroup
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.draft_messages import DraftOutput, DraftStep
from specdec.worker import LocalTarget

_PRECISIONS = ("fp32", "int8", "w8a8")


@dataclass(frozen=True)
class Row:
    """Median speed of one run, and the share of rounds that were hits."""

    mode: str
    num_draft_tokens: int
    tokens_per_s: float
    hit_rate: float

    @classmethod
    def of(cls, run: Run) -> Row:
        """Summarize a run."""
        hit_rate = round(run.counts.ahead.hit_rate, 3)
        return cls(run.mode, run.num_draft_tokens, round(run.median, 2), hit_rate)


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
    off: OffCost | None
    bars: tuple[Bar, ...]


class Pinned(Engines):
    """Runs on one target, and on one draft model in a process on other cores."""

    def __init__(
        self,
        directory: Path,
        target: LocalTarget,
        worker: WorkerGroup[DraftStep, DraftOutput],
        ranks: PinnedRanks,
        temperature: float = 0.0,
    ) -> None:
        """Use a target, and a worker with its ranks."""
        super().__init__(directory, temperature, time.perf_counter)
        self._models = Models(target, worker)
        self._ranks = ranks
        self._tokens: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}  # of any run

    def measure(self, run: Run, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Generate after a prompt. Raises AssertionError for other tokens than an earlier run."""
        before_s = self._ranks.cpu_s
        tokens = self.run(run, self._models, prompt, max_tokens)
        known = self._tokens.setdefault((prompt, max_tokens), tokens)
        assert known == tokens, "speculation has changed the tokens"
        run.draft_cpu_s += self._ranks.cpu_s - before_s


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


def _prompts(pinned: Pinned, options: argparse.Namespace) -> list[tuple[int, ...]]:
    prompts = load_prompts(options.prompts, Tokenizer(pinned.directory))
    return of_similar_length(prompts, options.rounds)


def _bars(rows: Sequence[Row], off: OffCost | None) -> tuple[Bar, ...]:
    best = {mode: max(row.tokens_per_s for row in rows if row.mode == mode) for mode in MODES}
    ahead = max(best["continuing"], best["outcomes"]) / best[SYNCHRONOUS]
    bars = [at_least("best asynchronous over best synchronous drafting", ahead, 1.2)]
    if off is not None:
        bars.append(at_least("switched off over no drafter", off.share, 0.99))
    return tuple(bars)


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
    rows = tuple(map(Row.of, runs))
    off = OffCost.of(*plain) if plain[0].tokens_per_s else None
    report = Report(
        command_line("benchmarks.async_drafting", arguments or sys.argv[1:]),
        describe_machine(),
        f"{MODEL} {options.target_precision}",
        f"{options.draft_model or MODEL} {options.draft_precision}",
        options.temperature,
        rows,
        off,
        _bars(rows, off),
    )
    print_bars(report.bars)
    write_report(report, options.output)
    return 0 if all(each.is_met for each in report.bars) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.async_drafting", description="Measure asynchronous drafting on two cores."
    )
    parser.add_argument("--draft-model", help="name or directory (default: a copy of the target)")
    parser.add_argument("--target-precision", choices=_PRECISIONS, default="fp32")
    parser.add_argument("--draft-precision", choices=_PRECISIONS, default="int8")
    parser.add_argument("--temperature", type=float, default=0.0)
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
