"""Cost of a step by its number of draft tokens, measured once and stored for later runs.

One sequence as long as the benchmarks' prompts. All lengths take turns, and the fastest time of
each counts, because other load on the machine can only add to a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.machine import Machine, describe_machine
from benchmarks.step_bench import PRECISIONS, StepBench
from specdec.config.engine import DraftLimits
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.draft_messages import DraftRow, DraftStep
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import load_draft_runner

MAX_DRAFT_TOKENS = 8
_TEXT_TOKENS = 256
_BLOCK_SIZE = 16
_NUM_BLOCKS = 32
_TOKEN = 100
_NUM_ROUNDS = 10


@dataclass(frozen=True)
class CostTable:
    """Model seconds of a step with one sequence, by number of draft tokens from 0.

    verify_s: of the target, which runs one more token.
    draft_s: of the draft model, 0 for no drafts.
    num_threads: threads of either model.
    """

    machine: Machine
    num_threads: int
    verify_s: tuple[float, ...]
    draft_s: tuple[float, ...]

    def step_s(self, num_drafted: int, num_made: int) -> float:
        """Return the seconds of a step that verifies and model-drafts these numbers of tokens."""
        return self.verify_s[num_drafted] + self.draft_s[num_made]


def read_costs(path: Path) -> CostTable | None:
    """Return the `costs` of a JSON report; None if the file or the entry is missing."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    costs = report.get("costs")
    if costs is None:
        return None
    return CostTable(
        Machine(**costs["machine"]),
        costs["num_threads"],
        tuple(costs["verify_s"]),
        tuple(costs["draft_s"]),
    )


def measure_costs(directory: Path) -> CostTable:
    """Measure the fp32 model as target and its int8 copy as draft model."""
    verify, draft = _verification(directory), _drafting(directory)
    lengths = range(MAX_DRAFT_TOKENS + 1)
    verify_s, draft_s = [float("inf")] * len(lengths), [0.0] + [float("inf")] * MAX_DRAFT_TOKENS
    for _ in tqdm(range(_NUM_ROUNDS), "costs", leave=False):
        for count in lengths:
            verify_s[count] = min(verify_s[count], _seconds(verify, count))
            if count:
                draft_s[count] = min(draft_s[count], _seconds(draft, count))
    return CostTable(
        describe_machine(), torch.get_num_threads(), _rounded(verify_s), _rounded(draft_s)
    )


def _verification(directory: Path) -> Callable[[int], object]:
    bench = StepBench(directory, PRECISIONS["fp32"], 1, _NUM_BLOCKS * _BLOCK_SIZE)
    bench.extend(0, _TEXT_TOKENS)
    return lambda num_draft_tokens: bench.measure(1, num_draft_tokens)


def _drafting(directory: Path) -> Callable[[int], None]:
    limits = DraftLimits(_NUM_BLOCKS, _BLOCK_SIZE, _NUM_BLOCKS * _BLOCK_SIZE, _TEXT_TOKENS)
    runner = load_draft_runner(directory, "float32", limits, TensorParallelGroup(), "int8")
    admission = SequenceAdmission(0, _TEXT_TOKENS, SamplingRules(temperature=0))
    table = BlockTableDelta(0, 0, tuple(range(_NUM_BLOCKS)))
    text = StepRow(0, 0, (_TOKEN,) * _TEXT_TOKENS, 0, False)
    first = DraftStep(0, (), (admission,), (table,), (text,), ())
    runner.draft(first)
    runner.catch_up(first)

    def draft(num_draft_tokens: int) -> None:
        row = DraftRow(0, _TEXT_TOKENS, (_TOKEN,), num_draft_tokens, _TEXT_TOKENS + 1)
        runner.draft(DraftStep(0, (), (), (), (), (row,)))

    return draft


def _seconds(run: Callable[[int], object], count: int) -> float:
    started_at = time.perf_counter()
    run(count)
    return time.perf_counter() - started_at


def _rounded(seconds: list[float]) -> tuple[float, ...]:
    return tuple(round(each, 5) for each in seconds)
