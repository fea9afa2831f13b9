"""Cases that take turns: each once per round, with a rotating first case.

Ratios are computed within a round, so a temporary slowdown of the machine favours no case.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from benchmarks.bystanders import MAX_OTHERS_PERCENT, CpuUsage, wait_until_quiet
from benchmarks.workloads import Contender, Measurement, Workload
from specdec.models.resolve import print_progress

DEFAULT_QUIET_LIMIT_S = 120.0
_MAX_ATTEMPTS = 3
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """One thing to measure in each round. `workloads` are used in turn, one per round."""

    name: str
    contender: str
    workloads: tuple[Workload, ...]


Measured = Mapping[str, Sequence[Measurement]]
"""One measurement per round, by case name."""


def warm_up(contenders: Mapping[str, Contender], cases: Sequence[Case]) -> None:
    """Run the first tokens of each case once."""
    for case in tqdm(cases, "warming up", leave=False):
        workload = replace(case.workloads[0], max_tokens=_WARM_UP_TOKENS)
        contenders[case.contender].measure(workload)


def measure_rounds(
    contenders: Mapping[str, Contender],
    cases: Sequence[Case],
    num_rounds: int,
    quiet_limit_s: float = DEFAULT_QUIET_LIMIT_S,
) -> dict[str, list[Measurement]]:
    """Measure all cases in each round.

    quiet_limit_s: how long to wait for an idle machine before each measurement.
    """
    measured: dict[str, list[Measurement]] = {case.name: [] for case in cases}
    turns = [(index, case) for index in range(num_rounds) for case in _rotated(cases, index)]
    with tqdm(turns, "measuring", leave=False) as shown:
        for index, case in shown:
            shown.set_postfix_str(f"round {index + 1}/{num_rounds} {case.name}")
            workload = case.workloads[index % len(case.workloads)]
            result = measure_undisturbed(contenders[case.contender], workload, quiet_limit_s)
            measured[case.name].append(result)
    return measured


def measure_undisturbed(
    contender: Contender, workload: Workload, quiet_limit_s: float = DEFAULT_QUIET_LIMIT_S
) -> Measurement:
    """Wait for an idle machine, and repeat the measurement if it was disturbed.

    With a limit of 0 do neither, and only report the CPU usage of other processes.
    """
    for _ in range(_MAX_ATTEMPTS if quiet_limit_s else 1):
        if quiet_limit_s:
            wait_until_quiet(quiet_limit_s)  # at least one second, so spinning threads go to sleep
        before = CpuUsage.now()
        measurement = contender.measure(workload)
        percent = CpuUsage.now().others_percent_since(before)
        if percent <= MAX_OTHERS_PERCENT:
            break
        if quiet_limit_s:
            print_progress(f"disturbed: other processes used {percent:.0f} % of a core")
    return replace(measurement, others_percent=percent)


def add_round_options(parser: argparse.ArgumentParser, num_rounds: int) -> None:
    """Add the options for the number of rounds and the wait for an idle machine."""
    parser.add_argument("--rounds", type=int, default=num_rounds)
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens to generate per stream")
    parser.add_argument(
        "--quiet-limit-s",
        type=float,
        default=DEFAULT_QUIET_LIMIT_S,
        help="maximum wait for an idle machine before each measurement; 0 disables the check",
    )


def _rotated(cases: Sequence[Case], index: int) -> list[Case]:
    start = index % len(cases)
    return [*cases[start:], *cases[:start]]
