"""Measure tokens per second: transformers, the engine in process, the service over gRPC.

All are loaded, then take turns for several rounds, with 1 and 16 streams and speculation off.
Figures are medians over the rounds, and ratios are computed within a round, so a temporary slowdown
of the machine favours no contender. Also measured: n-gram speculation against none on edit prompts,
the breakdown of a step, and the CPU usage of an idle service.

    python -m benchmarks.throughput [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bystanders import CpuUsage
from benchmarks.contenders import EngineContender, EngineSettings, ServiceContender
from benchmarks.machine import describe_machine
from benchmarks.peers.catalog import Launch, transformers_settings
from benchmarks.peers.process import PeerProcess
from benchmarks.prompts import (
    BenchmarkPrompt,
    add_prompts_option,
    load_prompts,
    of_similar_length,
)
from benchmarks.report_file import add_output, write_report
from benchmarks.rounds import Case, add_round_options, measure_rounds, warm_up
from benchmarks.service import ServiceProcess, started_service
from benchmarks.summary import compare_all, summarize
from benchmarks.throughput_report import (
    COMPARISONS,
    IdleCost,
    Report,
    Settings,
    print_tables,
    transport_ms,
)
from benchmarks.worker import Worker
from benchmarks.workloads import MODEL, NO_METHOD, Contender, Workload, all_at_once, one_by_one
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer

_NUM_STREAMS = 16
_NUM_SPECULATIVE_TOKENS = 3

_IDLE_SETTLE_S = 10.0
_IDLE_PERIOD_S = 30.0


def make_cases(prompts: Sequence[BenchmarkPrompt], max_tokens: int) -> list[Case]:
    """Return all contenders with 1 and 16 streams, and the engine with n-gram drafts on edits."""
    plain = of_similar_length(prompts, _NUM_STREAMS)
    edits = [prompt.token_ids for prompt in prompts if prompt.suite == "edit"]
    cases = [
        Case(f"{contender} {count}", contender, _workloads(plain, count, max_tokens))
        for count in (1, _NUM_STREAMS)
        for contender in ("transformers", "engine", "service")
    ]
    for count in (1, _NUM_STREAMS):
        for name, method in (("off", NO_METHOD), ("ngram", "ngram")):
            workloads = _workloads(edits, count, max_tokens, method)
            cases.append(Case(f"engine {count}, edits, {name}", "engine", workloads))
    return cases


def _workloads(
    prompts: Sequence[tuple[int, ...]], num_streams: int, max_tokens: int, method: str = NO_METHOD
) -> tuple[Workload, ...]:
    """Return one workload per prompt for one stream; else one that repeats prompts as needed."""
    if num_streams == 1:
        return one_by_one(prompts, max_tokens, method)
    return all_at_once(prompts, num_streams, max_tokens, method)


def _measure_idle(service: ServiceProcess) -> IdleCost:
    print_progress(
        f"measuring the idle service: {_IDLE_SETTLE_S:.0f} s to settle, then {_IDLE_PERIOD_S:.0f} s"
    )
    time.sleep(_IDLE_SETTLE_S)
    before = CpuUsage.now()
    percent = service.cpu_percent(_IDLE_PERIOD_S)
    return IdleCost(percent, _IDLE_PERIOD_S, CpuUsage.now().others_percent_since(before))


@dataclass(frozen=True)
class _Contenders:
    """All contenders, loaded and idle."""

    transformers: PeerProcess
    engine: Worker
    service: ServiceProcess

    @property
    def by_name(self) -> dict[str, Contender]:
        return {
            "transformers": self.transformers,
            "engine": self.engine,
            "service": ServiceContender(self.service.address),
        }


@contextmanager
def _loaded(directory: Path) -> Iterator[_Contenders]:
    settings = EngineSettings(
        methods=(NO_METHOD, "ngram"),
        num_speculative_tokens=_NUM_SPECULATIVE_TOKENS,
        max_prefill_tokens=LLMConfig().prefill_limit,
    )
    driver = "benchmarks.peers.transformers_driver"
    launch = Launch(Path(sys.executable), driver, transformers_settings(directory))
    with ExitStack() as stack:
        service = stack.enter_context(
            started_service(
                MODEL, speculative_config=SpeculativeConfig.of("ngram"), enable_prefix_caching=False
            )
        )
        log = Path(stack.enter_context(TemporaryDirectory())) / "transformers.log"
        yield _Contenders(
            transformers=stack.enter_context(PeerProcess(launch, log)),
            engine=stack.enter_context(
                Worker(partial(EngineContender, settings=settings), directory)
            ),
            service=service,
        )


def _measure(
    loaded: _Contenders, cases: Sequence[Case], settings: Settings, quiet_limit_s: float
) -> Report:
    warm_up(loaded.by_name, cases)
    idle = _measure_idle(loaded.service)
    measured = measure_rounds(loaded.by_name, cases, settings.num_rounds, quiet_limit_s)
    profiled = [case.workloads[0] for case in cases if case.name in ("engine 1", "engine 16")]
    return Report(
        settings=settings,
        machine=describe_machine(),
        rows=tuple(summarize(name, measurements) for name, measurements in measured.items()),
        ratios=compare_all(COMPARISONS, measured),
        profiles=tuple(loaded.engine.call("profile", workload) for workload in profiled),
        transport_ms=transport_ms(measured),
        idle=idle,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    options = _parser().parse_args(arguments)
    directory = resolve(MODEL)
    cases = make_cases(load_prompts(options.prompts, Tokenizer(directory)), options.max_tokens)
    with _loaded(directory) as loaded:
        settings = Settings(MODEL, "float32", options.rounds, options.max_tokens)
        report = _measure(loaded, cases, settings, options.quiet_limit_s)
    print_tables(report)
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.throughput", description="Compare transformers, engine and service."
    )
    add_round_options(parser, num_rounds=5)
    add_prompts_option(parser)
    add_output(parser, "throughput")
    return parser


if __name__ == "__main__":
    sys.exit(main())
