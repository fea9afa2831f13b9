"""Measures tokens per second: transformers, our engine in process, our service over gRPC.

All are loaded, then take turns for several rounds, one and 16 streams, speculation off; figures are
medians over the rounds, and ratios are made within a round first, so that a machine that slows
down for a while does not favour anyone. Besides: n-gram speculation against none on prompts that
ask for edits, where a step's time goes, and what an idle service costs.

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
from benchmarks.prompts import DEFAULT_PATH, BenchmarkPrompt, load_prompts, of_similar_length
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
from benchmarks.workloads import NO_METHOD, Contender, Workload, all_at_once, one_by_one
from specdec.config.llm import LLMConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer

_MODEL = "smollm2-135m-instruct"
_NUM_STREAMS = 16
_NUM_SPECULATIVE_TOKENS = 3

_IDLE_SETTLE_S = 10.0
_IDLE_PERIOD_S = 30.0


def make_cases(prompts: Sequence[BenchmarkPrompt], max_tokens: int) -> list[Case]:
    """Every contender with 1 and 16 streams, and our engine with n-gram speculation on edits."""
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
    """One a prompt for one stream; for more, one that repeats the prompts as needed."""
    if num_streams == 1:
        return one_by_one(prompts, max_tokens, method)
    return all_at_once(prompts, num_streams, max_tokens, method)


def _measure_idle(service: ServiceProcess) -> IdleCost:
    print_progress(f"the idle service: {_IDLE_SETTLE_S:.0f} s to settle, then {_IDLE_PERIOD_S:.0f}")
    time.sleep(_IDLE_SETTLE_S)
    before = CpuUsage.now()
    percent = service.cpu_percent(_IDLE_PERIOD_S)
    return IdleCost(percent, _IDLE_PERIOD_S, CpuUsage.now().others_percent_since(before))


@dataclass(frozen=True)
class _Field:
    """Everything that takes part, loaded and at rest."""

    transformers: PeerProcess
    engine: Worker
    service: ServiceProcess

    @property
    def contenders(self) -> dict[str, Contender]:
        return {
            "transformers": self.transformers,
            "engine": self.engine,
            "service": ServiceContender(self.service.address),
        }


@contextmanager
def _loaded(directory: Path) -> Iterator[_Field]:
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
                _MODEL,
                speculative_config=SpeculativeConfig.of("ngram"),
                enable_prefix_caching=False,
            )
        )
        log = Path(stack.enter_context(TemporaryDirectory())) / "transformers.log"
        yield _Field(
            transformers=stack.enter_context(PeerProcess(launch, log)),
            engine=stack.enter_context(
                Worker(partial(EngineContender, settings=settings), directory)
            ),
            service=service,
        )


def _measure(
    field: _Field, cases: Sequence[Case], settings: Settings, quiet_limit_s: float
) -> Report:
    warm_up(field.contenders, cases)
    idle = _measure_idle(field.service)
    measured = measure_rounds(field.contenders, cases, settings.num_rounds, quiet_limit_s)
    profiled = [case.workloads[0] for case in cases if case.name in ("engine 1", "engine 16")]
    return Report(
        settings=settings,
        machine=describe_machine(),
        rows=tuple(summarize(name, measurements) for name, measurements in measured.items()),
        ratios=compare_all(COMPARISONS, measured),
        profiles=tuple(field.engine.call("profile", workload) for workload in profiled),
        transport_ms=transport_ms(measured),
        idle=idle,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, which does not depend on the aims: machines differ."""
    options = _parser().parse_args(arguments)
    directory = resolve(_MODEL)
    cases = make_cases(load_prompts(options.prompts, Tokenizer(directory)), options.max_tokens)
    with _loaded(directory) as field:
        settings = Settings(_MODEL, "float32", options.rounds, options.max_tokens)
        report = _measure(field, cases, settings, options.quiet_limit_s)
    print_tables(report)
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.throughput", description="Compare transformers, engine and service."
    )
    add_round_options(parser, num_rounds=5)
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PATH, help="JSON lines file")
    add_output(parser, "throughput")
    return parser


if __name__ == "__main__":
    sys.exit(main())
