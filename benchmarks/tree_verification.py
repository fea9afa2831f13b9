"""Measure the verification of a tree of drafts against that of a chain with as many tokens.

One sequence of SmolLM2 with native kernels, in fp32 and int8. Chain and tree take turns within each
round; the ratio compares best times, and beside it medians.

    python -m benchmarks.tree_verification [--nodes 16] [--rounds 40] [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.step_bench import PRECISIONS, StepBench
from benchmarks.summary import Bar, at_most, print_bars
from benchmarks.workloads import MODEL
from specdec.models.resolve import resolve
from specdec.sampling.tree_growth import fitted_choices
from specdec.types.static_tree import StaticTree

_PRECISIONS = ("fp32", "int8")
_CONTEXT_TOKENS = (128, 1000)
_RATES = ((0.6, 0.15, 0.08, 0.04),) * 8
"""Acceptance by depth and rank that shapes the tree."""

_MOST_RATIO = 1.1


@dataclass(frozen=True)
class TreeCost:
    """Milliseconds of a step with a chain and with a tree of `num_nodes`. ratio: of best times."""

    precision: str
    num_context_tokens: int
    num_nodes: int
    depth: int
    chain_ms: float
    tree_ms: float
    chain_median_ms: float
    tree_median_ms: float

    @property
    def ratio(self) -> float:
        """Best time of the tree over that of the chain."""
        return self.tree_ms / self.chain_ms


@dataclass(frozen=True)
class TreeReport:
    """Complete results."""

    command: str
    machine: Machine
    model: str
    rows: tuple[TreeCost, ...]
    bars: tuple[Bar, ...]


def measure(directory: Path, precision: str, num_nodes: int, num_rounds: int) -> list[TreeCost]:
    """Measure at each context length, in ascending order, after a warm-up round."""
    choices = fitted_choices(_RATES, num_nodes)
    parents = StaticTree.of_choices(choices).parents
    bench = StepBench(directory, PRECISIONS[precision], 1, max(_CONTEXT_TOKENS) + num_nodes + 1)
    costs = []
    for num_tokens in _CONTEXT_TOKENS:
        bench.extend(0, num_tokens)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for index in range(num_rounds + 1):
            for is_tree in (index % 2 == 0, index % 2 == 1):
                time = bench.measure(1, num_nodes, parents if is_tree else None)
                if index > 0:
                    seconds[is_tree].append(1000 * time.step_s)
        costs.append(
            TreeCost(
                precision,
                num_tokens,
                num_nodes,
                max(map(len, choices)),
                min(seconds[False]),
                min(seconds[True]),
                statistics.median(seconds[False]),
                statistics.median(seconds[True]),
            )
        )
    return costs


def bars(rows: Sequence[TreeCost]) -> tuple[Bar, ...]:
    """Return the limit of each row's ratio."""
    return tuple(
        at_most(
            f"{row.precision}, {row.num_context_tokens} tokens, tree over chain",
            row.ratio,
            _MOST_RATIO,
        )
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="benchmarks.tree_verification", description="Measure trees of drafts against chains."
    )
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    add_output(parser)
    options = parser.parse_args(given)
    directory = resolve(MODEL)
    rows = tuple(
        row
        for name in _PRECISIONS
        for row in measure(directory, name, options.nodes, options.rounds)
    )
    for row in rows:
        print(
            f"{row.precision:5} {row.num_context_tokens:5} tokens: chain {row.chain_ms:.2f} ms, "
            f"tree {row.tree_ms:.2f} ms (medians {row.chain_median_ms:.2f}, "
            f"{row.tree_median_ms:.2f}), ratio {row.ratio:.3f}"
        )
    found = bars(rows)
    print_bars(found)
    command = command_line("benchmarks.tree_verification", given)
    write_report(TreeReport(command, describe_machine(), MODEL, rows, found), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
