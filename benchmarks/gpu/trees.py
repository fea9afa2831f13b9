"""Steps with a draft tree for each sequence, beside chains of as many drafts.

A step with trees runs on the device, as graphs, and by the operators of the host, which reads
values between them. Weights are random, so that little is accepted; the time does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from benchmarks.gpu.parts import Context, Result
from benchmarks.gpu.steps import GREEDY, Sizes, Steps, model_of
from specdec.types.messages import RowDrafting, StepRow

_BATCHES, _NODES, _CONTEXTS = (1, 8, 32), (7, 24), (1024, 8192)
_CHILDREN = 3
_MOST_RATIO = 1.1


@dataclass(frozen=True)
class TreeCell:
    """Median milliseconds of steps of `batch` sequences with `num_nodes` drafts each.

    chain_ms: as a chain, by the graphs of trees if it is longer than chains are. device_ms,
    host_ms: as a tree, on the device and by the host.
    """

    batch: int
    context: int
    num_nodes: int
    chain_ms: float
    device_ms: float
    host_ms: float


def measure_trees(context: Context) -> Result:
    """Measure trees beside chains in steps of Llama-3.1-8B; a step that the host runs fails it."""
    batches, nodes, lengths = _sizes(context)
    decoder, model = model_of(context)
    sizes = Sizes((max(batches),), (max(lengths) + max(nodes),), (0,), 2**15)
    steps = Steps(decoder, model, sizes, has_graphs=True, max_tree_nodes=max(nodes))
    cells: list[dict[str, float]] = []
    result: Result = {"graphs": steps.report.describe(), "passed": True, "tree_cells": cells}
    for batch, length, num_nodes in product(batches, lengths, nodes):
        if not steps.fits(batch, length + max(nodes)):
            continue
        cell, is_on_device = _measure(steps, batch, length, num_nodes, max(nodes))
        cells.append(asdict(cell))
        result["passed"] &= is_on_device
        if (batch, length, num_nodes) == (1, lengths[0], nodes[0]):
            aim = {"value": cell.device_ms / cell.chain_ms, "at_most": _MOST_RATIO}
            result["aims"] = {f"tree of {num_nodes} at batch 1, times the chain": aim}
        context.save(result)
    return result


def _sizes(context: Context) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return batches, numbers of nodes and contexts."""
    return ((1, 2), (5,), (32,)) if context.is_small else (_BATCHES, _NODES, _CONTEXTS)


def _measure(
    steps: Steps, batch: int, length: int, num_nodes: int, most_nodes: int
) -> tuple[TreeCell, bool]:
    """Measure steps after `length` tokens of each sequence; return whether the device runs them.

    most_nodes: for which each sequence has room.
    """
    admitted = steps.begin(batch, length + most_nodes, 0, GREEDY)
    tokens = (1, *range(2, 2 + num_nodes))
    chains = tuple(StepRow(row.seq_id, length, tokens, num_nodes, True) for row in admitted)
    parents = tuple(node // _CHILDREN - 1 for node in range(num_nodes))
    trees = tuple(row._replace(drafting=RowDrafting(parents=parents)) for row in chains)
    runner = steps.runner
    cell = TreeCell(
        batch,
        length,
        num_nodes,
        chain_ms=steps.median_ms(runner.execute, chains),
        device_ms=steps.median_ms(runner.execute, trees),
        host_ms=steps.median_ms(runner.execute_on_host, trees),
    )
    is_on_device = steps.begin_ahead(trees)
    if is_on_device:
        runner.collect()
    steps.step((), released=tuple(range(batch)))
    return cell, is_on_device
