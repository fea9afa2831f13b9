"""Profiles the steps of one rank with torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from specdec.kernels.forward_batch import ModelInput
from specdec.kernels.sample import RowArgmax
from specdec.models.loading import Decoder
from specdec.types.profile import OperationTime
from specdec.worker.base import Runner

NUM_OPERATIONS = 20


class _MarkedDecoder:
    """A decoder whose calls are named in the profile: native kernels are no operations of torch."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def vocab_slice(self) -> range:
        return self._model.vocab_slice

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """See Decoder."""
        return self._model.new_kv_cache(num_slots)

    def __call__(self, batch: ModelInput, kv_cache: Tensor) -> Tensor:
        """See Decoder."""
        with record_function("forward"):
            return self._model(batch, kv_cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See Decoder."""
        with record_function("logits"):
            return self._model.compute_logits(hidden)

    def compute_logits_and_argmax(self, hidden: Tensor) -> tuple[Tensor, RowArgmax]:
        """See Decoder."""
        with record_function("logits"):
            return self._model.compute_logits_and_argmax(hidden)


@dataclass(frozen=True)
class SavedTrace:
    """A trace in Chrome's format, and what it adds up to. size_bytes: 0 where it was too large."""

    size_bytes: int
    operations: tuple[OperationTime, ...]


class StepProfiler:
    """Records the steps of a runner, from when it is made until it is saved.

    To be used on the thread that runs the steps. Until then the runner is slower.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._model = runner.model
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        runner.model = _MarkedDecoder(runner.model)
        self.num_steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step runs inside."""
        with record_function("step"):
            yield
        self.num_steps += 1

    def save(self, path: Path, max_bytes: int) -> SavedTrace:
        """Ends, and writes the trace, gzipped; none that is larger. Raises OSError.

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
        """Ends, and leaves the runner as it was."""
        self._runner.model = self._model
        self._profile.stop()


def _operations(recorded: profile) -> tuple[OperationTime, ...]:
    """The operations that took most, on the CPU and the GPU together."""
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
