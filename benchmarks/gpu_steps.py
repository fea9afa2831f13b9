"""Step times of a model on its device, compared with the time to read its weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.kernels.reference.packed_weight import PackedWeight
from specdec.models.llama import CausalDecoder
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import TargetModelRunner

NUM_VERIFIED_ROWS = 8

_ROUNDS = 20
_CONTEXT_TOKENS = 64
_GPU_BUFFER_BYTES, _CPU_BUFFER_BYTES = 2**30, 2**27


@dataclass(frozen=True)
class StepTimes:
    """Median step times. floor_ms: time to read the weights, a lower bound of any step.

    verify_ms: one sequence with 7 draft tokens, so 8 rows.
    peak_bytes: peak device memory, 0 where the device does not count it.
    """

    weight_bytes: int
    bandwidth_bytes_per_s: float
    floor_ms: float
    decode_ms: float
    verify_ms: float
    peak_bytes: int


def measure_steps(runner: TargetModelRunner) -> StepTimes:
    """Measure the steps of one sequence. The runner's KV pool must be empty."""
    device = runner.model.device
    _prefill(runner)
    decode_s = median_s(lambda: _step(runner, num_drafts=0), device)
    verify_s = median_s(lambda: _step(runner, num_drafts=NUM_VERIFIED_ROWS - 1), device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    num_bytes, bytes_per_s = matrix_bytes(runner), bandwidth(device)
    return StepTimes(
        weight_bytes=num_bytes,
        bandwidth_bytes_per_s=bytes_per_s,
        floor_ms=num_bytes / bytes_per_s * 1e3,
        decode_ms=decode_s * 1e3,
        verify_ms=verify_s * 1e3,
        peak_bytes=peak,
    )


def _prefill(runner: TargetModelRunner) -> None:
    num_blocks = -(-(_CONTEXT_TOKENS + NUM_VERIFIED_ROWS) // runner.block_size)
    admission = SequenceAdmission(0, _CONTEXT_TOKENS, SamplingRules(temperature=0.0))
    table = BlockTableDelta(0, 0, tuple(range(num_blocks)))
    row = StepRow(0, 0, (1,) * _CONTEXT_TOKENS, 0, True)
    runner.execute(StepInput(0, (), (admission,), (table,), (row,)))


def _step(runner: TargetModelRunner, num_drafts: int) -> None:
    """Run the same positions each time; their KV is overwritten and the cost stays equal."""
    row = StepRow(0, _CONTEXT_TOKENS, (1,) * (1 + num_drafts), num_drafts, True)
    runner.execute(StepInput(1, (), (), (), (row,)))


def median_s(work: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Return the median seconds of some work on a device, after a first run that is not timed."""
    work()
    times = []
    for _ in range(rounds):
        synchronize(device)
        started_at = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started_at)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_bytes(runner: TargetModelRunner) -> int:
    """Return the bytes of linear layers and head, which each step reads once."""
    assert isinstance(runner.model, CausalDecoder)
    matrices = (getattr(module, "matrix", None) for module in runner.model.modules())
    weights = [getattr(matrix, "weight", None) for matrix in matrices]
    dense = sum(weight.nbytes for weight in weights if isinstance(weight, torch.Tensor))
    return dense + sum(each.num_bytes for each in weights if isinstance(each, PackedWeight))


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of copies larger than any cache."""
    num_bytes = _GPU_BUFFER_BYTES if device.type == "cuda" else _CPU_BUFFER_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_s(lambda: target.copy_(source), device)
