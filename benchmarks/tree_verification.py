"""Verification of a tree of drafts beside that of a chain with as many tokens: cases to time.

A step of one sequence with native kernels, sampling and verification included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.step_bench import Precision, StepBench
from specdec.sampling.tree_growth import fitted_choices
from specdec.types.drafts.static_tree import StaticTree

NUM_NODES = 16
CONTEXT_TOKENS = (128, 1000)

_RATES = ((0.6, 0.15, 0.08, 0.04),) * 8
"""Acceptance by depth and rank that shapes the tree."""


class TreeBench:
    """A target with one sequence at each length of the context, and drafts behind it."""

    def __init__(self, directory: Path, precision: Precision, num_nodes: int = NUM_NODES) -> None:
        """Load the model with torch's number of threads, and run the contexts."""
        choices = fitted_choices(_RATES, num_nodes)
        self.depth = max(map(len, choices))
        self.num_nodes = num_nodes
        self._parents = StaticTree.of_choices(choices).parents
        self._benches = {
            num_tokens: StepBench(
                directory, precision, 1, num_tokens + num_nodes + 1, None, torch.get_num_threads()
            )
            for num_tokens in CONTEXT_TOKENS
        }
        for num_tokens, bench in self._benches.items():
            bench.extend(0, num_tokens)

    def pairs(self) -> Mapping[int, tuple[Callable[[], object], Callable[[], object]]]:
        """Return the steps with a chain and with a tree, by the number of tokens before them."""
        return {
            num_tokens: (self._step(bench, None), self._step(bench, self._parents))
            for num_tokens, bench in self._benches.items()
        }

    def _step(self, bench: StepBench, parents: tuple[int, ...] | None) -> Callable[[], object]:
        return lambda: bench.measure(1, self.num_nodes, parents)
