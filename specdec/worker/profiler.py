"""Profiles the steps of one rank with torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from specdec.kernels.reference.forward_batch import ForwardBatch
from specdec.models.loading import Decoder
from specdec.types.reports.profile import OperationTime
from specdec.worker.model_runner import ModelRunner

NUM_OPERATIONS = 20


class _MarkedDecoder:
    """Decoder whose calls are named in the profile: native kernels are not torch operations."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def __call__(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """See Decoder."""
        with record_function("forward"):
            return self._model(batch, kv_cache)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._model, name)
        if name == "forward_with_taps":
            return record_function("forward")(attribute)
        if name.startswith("compute_logits"):
            return record_function("logits")(attribute)
        return attribute


@dataclass(frozen=True)
class SavedTrace:
    """A trace in Chrome's format, and its most expensive operations.

    size_bytes: 0 if the trace was too large and was not kept.
    """

    size_bytes: int
    operations: tuple[OperationTime, ...]


class StepProfiler:
    """Profiler of a runner's steps, from its construction until `save` or `stop`.

    Must be used on the thread that runs the steps. The runner is slower while it is active.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._model = runner.model
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        runner.model = cast(Decoder, _MarkedDecoder(runner.model))
        self.num_steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one step, which runs inside this context."""
        with record_function("step"):
            yield
        self.num_steps += 1

    def save(self, path: Path, max_bytes: int) -> SavedTrace:
        """Stop, and write the gzipped trace unless it exceeds `max_bytes`. Raises OSError.

        Takes a second or more for a hundred steps.
        """
        self.stop()
        operations = _operations(self._profile)
        self._profile.export_chrome_trace(str(path))
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            path.unlink()
            size_bytes = 0
        return SavedTrace(size_bytes, operations)

    def stop(self) -> None:
        """Stop, and restore the runner's model."""
        self._runner.model = self._model
        self._profile.stop()


def _operations(recorded: profile) -> tuple[OperationTime, ...]:
    """Return the operations with the most own time, on the CPU and the GPU together."""
    averages = sorted(
        recorded.key_averages(),
        key=lambda each: each.self_cpu_time_total + each.self_device_time_total,
        reverse=True,
    )
    return tuple(
        OperationTime(
            each.key,
            each.count,
            each.self_cpu_time_total / 1e3,
            each.cpu_time_total / 1e3,
            each.self_device_time_total / 1e3,
        )
        for each in averages[:NUM_OPERATIONS]
    )
