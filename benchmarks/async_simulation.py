"""Simulate asynchronous drafting: the real engine, policy and proposer with clocked models.

Target and draft model have no weights and a device each; time is simulated, so the figures are of
the method and not of the machine. Each case has a ratio of the draft model's pass to the target's,
an acceptance, and a number of streams; each mode of drafting runs it:

    none         no speculation
    synchronous  a step waits for its drafts (async_drafting off)
    continuing, outcomes, auto   the values of async_drafting

Policy goodput chooses the number of draft tokens in all of them. The last line printed is JSON.

    python -m benchmarks.async_simulation [--ratio 0.1 ...] [--acceptance 0.8 ...]
        [--streams 1 ...] [--rank-exponent 1.5] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from tqdm import tqdm

from benchmarks.report_file import add_output, parse_options, write_report, write_text
from benchmarks.simulated_models import (
    SimulatedClock,
    SimulatedDraftWorker,
    SimulatedTarget,
    Speeds,
    Texts,
)
from benchmarks.summary import Bar, at_least, print_bars
from benchmarks.tiny_model import write_tiny_llama
from cluster.cli.bench.charts import LineChart, draw_charts
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.speculation.methods import AsyncDrafting
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import DraftModelProposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import AheadCounts
from specdec.types.sampling.sampling_params import SamplingParams

MODES = ("none", "synchronous", "continuing", "outcomes", "auto")
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
ACCEPTANCES = (0.5, 0.65, 0.8, 0.9, 0.95)
STREAMS = (1, 4, 16, 64)
MAX_DRAFT_TOKENS = 8
TARGET_S = 0.02
MIN_ROWS = 2500
"""Least rows to measure, of all passes: the tokens of a row vary by half of their mean."""

_ASYNC: dict[str, AsyncDrafting] = {
    "synchronous": "off",
    **{mode: mode for mode in get_args(AsyncDrafting) if mode != "off"},
}
_NONE = AheadCounts()
_BLOCK_SIZE = 64
_MAX_MODEL_LEN = 1 << 15


@dataclass(frozen=True)
class Case:
    """Ratio of the draft model's pass to the target's, acceptance, and concurrent streams."""

    ratio: float
    acceptance: float
    num_streams: int


@dataclass(frozen=True)
class ModeResult:
    """Results of a mode in a case.

    hit_rate: part of the rows with a draft that was made ahead. wasted: part of the tokens drafted
        ahead that were not sent to the target. draft_use: part of the time in which the draft
        model's device runs. num_waits: steps that waited for the draft model.
    """

    tokens_per_s: float
    hit_rate: float = 0.0
    wasted: float = 0.0
    draft_use: float = 0.0
    num_waits: int = 0


@dataclass(frozen=True)
class CaseResult:
    """One case, by mode."""

    case: Case
    modes: dict[str, ModeResult]

    def speed(self, mode: str) -> float:
        """Return the tokens per second of a mode."""
        return self.modes[mode].tokens_per_s

    def over_synchronous(self, mode: str) -> float:
        """Return the speed of a mode over that of synchronous drafting."""
        return self.speed(mode) / self.speed("synchronous")

    @property
    def auto_share(self) -> float:
        """Auto's speed over that of the best mode."""
        return self.speed("auto") / max(self.speed(mode) for mode in MODES if mode != "auto")


@dataclass(frozen=True)
class Settings:
    """Extent of a case: passes of the target until the policy has settled, and measured ones.

    num_measured: at least; with few streams more, so that MIN_ROWS rows are measured.
    rank_exponent: as in Texts.
    """

    num_settling: int = 300
    num_measured: int = 400
    rank_exponent: float = 1.5

    def num_passes(self, case: Case) -> int:
        """Return the number of passes of the target to measure."""
        return max(self.num_measured, MIN_ROWS // case.num_streams)


@dataclass(frozen=True)
class Report:
    """Complete results."""

    command: str
    settings: Settings
    results: tuple[CaseResult, ...]
    bars: tuple[Bar, ...]


class Simulation:
    """The engine with one mode of drafting, in one case."""

    def __init__(self, directory: Path, case: Case, mode: str, settings: Settings) -> None:
        """directory: of a model whose tokenizer and sizes are used."""
        self._case = case
        self._clock = SimulatedClock()
        speeds = Speeds(TARGET_S, TARGET_S * case.ratio)
        texts = Texts(case.acceptance, settings.rank_exponent)
        speculation = None
        if mode != "none":
            keys = {"async_drafting": _ASYNC[mode]}
            speculation = SpeculativeConfig.of("draft_model", MAX_DRAFT_TOKENS, **keys)
        self._worker = SimulatedDraftWorker(self._clock, speeds, texts)
        self._proposer = DraftModelProposer(self._worker, _LIMITS, clock=self._clock)
        config = EngineConfig(
            max_model_len=_MAX_MODEL_LEN,
            num_blocks=case.num_streams * _MAX_MODEL_LEN // _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            max_num_seqs=case.num_streams,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            stream_interval=2**20,
            speculation=speculation,
        )
        self._engine = Engine(
            config,
            ModelConfig.from_directory(directory),
            SimulatedTarget(self._clock, speeds, texts),
            Tokenizer(directory),
            None if speculation is None else self._proposer,
            None if speculation is None else _policy(speculation, speeds, case, self._clock),
            clock=self._clock,
        )

    def run(self, settings: Settings) -> ModeResult:
        """Run all streams at once and measure them after the time in which the policy settles."""
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
        for index in range(self._case.num_streams):
            request = EngineRequest((5, 6, 7), params, request_id=str(index), seed=index)
            self._engine.add(request)
        self._run_until(settings.num_settling * TARGET_S)
        began_at_s, counts = self._clock(), self._engine.stats().counts
        ahead, busy_s = self._proposer.counts.ahead.minus(_NONE), self._worker.busy_s
        num_waits = self._worker.num_waits
        self._run_until(began_at_s + settings.num_passes(self._case) * TARGET_S)
        seconds = self._clock() - began_at_s
        made = self._proposer.counts.ahead.minus(ahead)
        num_tokens = self._engine.stats().counts.minus(counts).num_generated_tokens
        return ModeResult(
            round(num_tokens / seconds, 2),
            round(made.hit_rate, 4),
            round(1 - made.num_used_tokens / made.num_tokens, 4) if made.num_tokens else 0.0,
            round((self._worker.busy_s - busy_s) / seconds, 4),
            self._worker.num_waits - num_waits,
        )

    def _run_until(self, at_s: float) -> None:
        while self._clock() < at_s:
            assert self._engine.has_work, "the texts are too short for the settings"
            self._engine.step()


_LIMITS = DraftLimits(
    num_blocks=max(STREAMS) * _MAX_MODEL_LEN // _BLOCK_SIZE,
    block_size=_BLOCK_SIZE,
    max_model_len=_MAX_MODEL_LEN,
    max_catch_up_tokens=256,
    enable_prefix_caching=False,
)


def _policy(
    speculation: SpeculativeConfig, speeds: Speeds, case: Case, clock: SimulatedClock
) -> SpeculationPolicy:
    """Return the default policy, with the costs that a profile would find."""
    sizes, counts = STREAMS, tuple(range(MAX_DRAFT_TOKENS + 1))
    verification = CostTable(
        sizes,
        counts,
        tuple(tuple(speeds.of_target(size * (1 + count)) for count in counts) for size in sizes),
    )
    drafting = CostTable(
        sizes,
        counts[1:],
        tuple(tuple(count * speeds.of_draft(size) for count in counts[1:]) for size in sizes),
    )
    whole = verification.mapped(
        lambda size, count, value: value + (drafting.step_s(size, count) if count else 0.0)
    )
    chooser = GoodputChooser(CostModel(whole, verification, drafting))
    return SpeculationPolicy(
        speculation.control,
        clock,
        choosers={None: chooser},
        max_num_batched_tokens=4096,
        catches_up=True,
        ahead_choices=speculation.ahead_choices,
    )


def measure(directory: Path, case: Case, settings: Settings) -> CaseResult:
    """Run a case in each mode."""
    modes = {mode: Simulation(directory, case, mode, settings).run(settings) for mode in MODES}
    return CaseResult(case, modes)


def bars(results: Sequence[CaseResult]) -> tuple[Bar, ...]:
    """Return the figures with limits, of the cases that were run."""
    found = []
    for streams, limit in ((1, 1.3), (16, 1.15)):
        case = Case(0.2, 0.8, streams)
        for each in results:
            if each.case == case:
                name = f"outcomes over synchronous, ratio 0.2, acceptance 0.8, streams {streams}"
                found.append(at_least(name, each.over_synchronous("outcomes"), limit))
    worst = min(each.over_synchronous("continuing") for each in results)
    found.append(at_least("continuing over synchronous, the worst case", worst, 0.98))
    found.append(
        at_least(
            "auto over the best mode, the worst case", min(r.auto_share for r in results), 0.97
        )
    )
    return tuple(found)


def charts(results: Sequence[CaseResult]) -> str:
    """Return a chart for each number of streams: speed over synchronous, by ratio, as SVG."""
    ratios = sorted({each.case.ratio for each in results})
    speeds: dict[int, dict[str, list[float]]] = {}
    for each in sorted(results, key=lambda each: each.case.ratio):
        lines = speeds.setdefault(each.case.num_streams, {})
        for mode in ("continuing", "outcomes"):
            line = lines.setdefault(f"{mode}, acceptance {each.case.acceptance:g}", [])
            line.append(each.over_synchronous(mode))
    return draw_charts(
        [
            LineChart(
                f"{count} stream{'s' * (count > 1)}: speed over synchronous", "ratio", ratios, lines
            )
            for count, lines in sorted(speeds.items())
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a limit is missed."""
    options = parse_options(_parser(), arguments)
    settings = Settings(rank_exponent=options.rank_exponent)
    cases = [Case(*each) for each in product(options.ratio, options.acceptance, options.streams)]
    with TemporaryDirectory() as directory:
        write_tiny_llama(Path(directory))
        results = tuple(
            measure(Path(directory), case, settings) for case in tqdm(cases, "cases", leave=False)
        )
    report = Report(options.command, settings, results, bars(results))
    print_bars(report.bars)
    write_report(report, options.output)
    if options.output is not None:
        write_text(options.output.with_suffix(".svg"), charts(results))
    return 0 if all(each.is_met for each in report.bars) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.async_simulation", description="Simulate asynchronous drafting."
    )
    parser.add_argument("--ratio", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--acceptance", type=float, nargs="+", default=ACCEPTANCES)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--rank-exponent", type=float, default=Settings.rank_exponent)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
