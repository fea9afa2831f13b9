"""Measures tokens per second: transformers, our engine in process, our service over gRPC.

All are loaded, then take turns for several rounds, one and 16 streams, speculation off; figures are
medians over the rounds, and ratios are made within a round first, so that a machine that slows
down for a while does not favour anyone. Besides: n-gram speculation against none on prompts that
ask for edits, where a step's time goes, and what an idle service costs.

    python -m benchmarks.throughput [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.bystanders import MAX_OTHERS_PERCENT, CpuUsage, wait_until_quiet
from benchmarks.contenders import (
    Contender,
    EngineContender,
    Measurement,
    ServiceContender,
    TransformersContender,
    Worker,
    Workload,
)
from benchmarks.machine import describe_machine
from benchmarks.prompts import DEFAULT_PATH, BenchmarkPrompt, load_prompts
from benchmarks.service import ServiceProcess, started_service
from benchmarks.summary import (
    COMPARISONS,
    IdleCost,
    Report,
    Settings,
    compare,
    print_tables,
    summarize,
    transport_ms,
)
from specdec.client import Client
from specdec.models.store import print_progress, resolve
from specdec.speculative_config import SpeculativeConfig
from specdec.tokenizer import Tokenizer

_MODEL = "smollm2-135m-instruct"
_DEFAULT_OUTPUT = Path("docs/benchmarks/throughput.json")
_NUM_STREAMS = 16
_PROMPT_TOKENS = 70  # the prompts nearest to this length are taken
_NUM_SPECULATIVE_TOKENS = 3

_QUIET_LIMIT_S = 120.0
_MAX_ATTEMPTS = 3
_IDLE_SETTLE_S = 10.0
_IDLE_PERIOD_S = 30.0


@dataclass(frozen=True)
class Case:
    """One thing to measure in every round. `workloads` holds one a round, used in turn."""

    name: str
    contender: str
    workloads: tuple[Workload, ...]


def make_cases(prompts: Sequence[BenchmarkPrompt], max_tokens: int) -> list[Case]:
    """Every contender with 1 and 16 streams, and our engine with n-gram speculation on edits."""
    plain = _of_similar_length(prompts)
    edits = [prompt.token_ids for prompt in prompts if prompt.suite == "edit"]
    cases = [
        Case(f"{contender} {count}", contender, _workloads(plain, count, max_tokens))
        for count in (1, _NUM_STREAMS)
        for contender in ("transformers", "engine", "service")
    ]
    for count in (1, _NUM_STREAMS):
        for name, drafts in (("off", 0), ("ngram", _NUM_SPECULATIVE_TOKENS)):
            workloads = _workloads(edits, count, max_tokens, drafts)
            cases.append(Case(f"engine {count}, edits, {name}", "engine", workloads))
    return cases


def _of_similar_length(prompts: Sequence[BenchmarkPrompt]) -> list[tuple[int, ...]]:
    by_distance = sorted(prompts, key=lambda prompt: abs(len(prompt.token_ids) - _PROMPT_TOKENS))
    return [prompt.token_ids for prompt in by_distance[:_NUM_STREAMS]]


def _workloads(
    prompts: Sequence[tuple[int, ...]], num_streams: int, max_tokens: int, num_drafts: int = 0
) -> tuple[Workload, ...]:
    """One a prompt for one stream; for more, one that repeats the prompts as needed."""
    if num_streams == 1:
        return tuple(Workload((prompt,), max_tokens, num_drafts) for prompt in prompts)
    repeated = tuple(prompts[index % len(prompts)] for index in range(num_streams))
    return (Workload(repeated, max_tokens, num_drafts),)


def measure_rounds(
    contenders: Mapping[str, Contender], cases: Sequence[Case], num_rounds: int
) -> dict[str, list[Measurement]]:
    """Each case once a round; every round begins with another case."""
    measured: dict[str, list[Measurement]] = {case.name: [] for case in cases}
    for index in range(num_rounds):
        start = index % len(cases)
        for case in (*cases[start:], *cases[:start]):
            workload = case.workloads[index % len(case.workloads)]
            result = measure_undisturbed(contenders[case.contender], workload)
            measured[case.name].append(result)
            rate = f"{result.tokens_per_s:6.1f} tokens/s"
            print_progress(f"round {index + 1}/{num_rounds}  {case.name:24s} {rate}")
    return measured


def measure_undisturbed(contender: Contender, workload: Workload) -> Measurement:
    """Waits for a quiet machine, and tries again when it did not stay quiet."""
    for _ in range(_MAX_ATTEMPTS):
        wait_until_quiet(_QUIET_LIMIT_S)  # a second at least: spinning threads go to sleep
        before = CpuUsage.now()
        measurement = contender.measure(workload)
        percent = CpuUsage.now().others_percent_since(before)
        if percent <= MAX_OTHERS_PERCENT:
            break
        print_progress(f"disturbed: other processes used {percent:.0f} % of a core")
    return replace(measurement, others_percent=percent)


def _measure_idle(service: ServiceProcess) -> IdleCost:
    print_progress(f"the idle service: {_IDLE_SETTLE_S:.0f} s to settle, then {_IDLE_PERIOD_S:.0f}")
    time.sleep(_IDLE_SETTLE_S)
    before = CpuUsage.now()
    percent = service.cpu_percent(_IDLE_PERIOD_S)
    return IdleCost(percent, _IDLE_PERIOD_S, CpuUsage.now().others_percent_since(before))


@dataclass(frozen=True)
class _Field:
    """Everything that takes part, loaded and at rest."""

    transformers: Worker
    engine: Worker
    service: ServiceProcess
    client: Client

    @property
    def contenders(self) -> dict[str, Contender]:
        return {
            "transformers": self.transformers,
            "engine": self.engine,
            "service": ServiceContender(self.client),
        }


@contextmanager
def _loaded(directory: Path) -> Iterator[_Field]:
    with ExitStack() as stack:
        ngram = SpeculativeConfig("ngram")
        service = stack.enter_context(started_service(_MODEL, speculative_config=ngram))
        yield _Field(
            transformers=stack.enter_context(Worker(TransformersContender, directory)),
            engine=stack.enter_context(Worker(EngineContender, directory)),
            service=service,
            client=stack.enter_context(Client(service.address)),
        )


def _measure(field: _Field, cases: Sequence[Case], settings: Settings) -> Report:
    for case in cases:
        print_progress(f"warming up  {case.name}")
        field.contenders[case.contender].measure(replace(case.workloads[0], max_tokens=8))
    idle = _measure_idle(field.service)
    measured = measure_rounds(field.contenders, cases, settings.num_rounds)
    profiled = [case.workloads[0] for case in cases if case.name in ("engine 1", "engine 16")]
    return Report(
        settings=settings,
        machine=describe_machine(),
        rows=tuple(summarize(name, measurements) for name, measurements in measured.items()),
        ratios=tuple(compare(comparison, measured) for comparison in COMPARISONS),
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
        report = _measure(field, cases, settings)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    print_tables(report)
    print(json.dumps(asdict(report)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.throughput", description="Compare transformers, engine and service."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96, help="to generate, a stream")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PATH, help="JSON lines file")
    parser.add_argument("--output", type=Path, default=_DEFAULT_OUTPUT, help="for the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
