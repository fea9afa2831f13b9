"""One stream with a draft model on a separate device, run on real models or on simulated ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drafting_engines import Engines, Models, Run
from benchmarks.pinned_draft import PinnedRanks
from benchmarks.recorded_texts import RecordedText, RecordedTexts
from benchmarks.simulated_models import SimulatedClock, SimulatedDraftWorker, SimulatedTarget
from benchmarks.timed_models import ModelTimes, TimedTarget, TimedWorker
from cluster.workers.groups.worker_group import WorkerGroup
from specdec.types.draft_messages import DraftOutput, DraftStep
from specdec.worker import LocalTarget


class Pinned(Engines):
    """Runs on one target and one draft model. times: by mode."""

    def __init__(
        self,
        directory: Path,
        target: LocalTarget,
        worker: WorkerGroup[DraftStep, DraftOutput],
        ranks: PinnedRanks,
        temperature: float = 0.0,
    ) -> None:
        """Use a target, and a worker with its ranks."""
        super().__init__(directory, temperature, time.perf_counter)
        self.times: dict[str, ModelTimes] = {}
        self._target = target
        self._worker = worker
        self._ranks = ranks
        self._tokens: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}  # of any run

    def forget_times(self) -> None:
        """Drop what was measured of passes."""
        self.times.clear()

    def measure(self, run: Run, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Generate after a prompt. Raises AssertionError for other tokens than an earlier run."""
        times = self.times.setdefault(run.mode, ModelTimes())
        before_s = self._ranks.cpu_s
        worker = TimedWorker(self._worker, times)
        target = TimedTarget(self._target, times)
        tokens = self.run(run, Models(target, worker, times), prompt, max_tokens)
        known = self._tokens.setdefault((prompt, max_tokens), tokens)
        assert known == tokens, "speculation has changed the tokens"
        run.draft_cpu_s += self._ranks.cpu_s - before_s
        run.rounds += [(prompt, row) for row in worker.rounds]

    def outputs(self, max_tokens: int) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the output after each prompt, of the runs with that length."""
        return {prompt: each for (prompt, most), each in self._tokens.items() if most == max_tokens}


class SimulatedRuns(Engines):
    """Runs on simulated devices that take the measured times, with recorded texts."""

    def __init__(
        self, directory: Path, times: Mapping[str, ModelTimes], temperature: float = 0.0
    ) -> None:
        """Simulate the passes of each mode by its `times`."""
        self._now = SimulatedClock()
        super().__init__(directory, temperature, self._now)
        self._times = times

    def measure(self, run: Run, text: RecordedText) -> None:
        """Repeat a run. Raises AssertionError where its tokens are not those of the text."""
        speeds, texts = _Measured(self._times[run.mode]), RecordedTexts({0: text})
        target = SimulatedTarget(self._now, speeds, texts)
        worker = SimulatedDraftWorker(self._now, speeds, texts)
        models = Models(target, worker, ModelTimes())
        tokens = self.run(run, models, text.prompt, len(text.output))
        assert tokens == text.output, "a simulated target has other tokens"


@dataclass(frozen=True)
class _Measured:
    """PassSpeeds that were measured."""

    times: ModelTimes

    @property
    def host_s(self) -> float:
        return self.times.host_step_s

    def of_target(self, num_tokens: int) -> float:
        return self.times.target.seconds(num_tokens)

    def of_draft(self, num_tokens: int) -> float:
        return self.of_synchronous([num_tokens])

    def of_synchronous(self, passes: Sequence[int]) -> float:
        if self.times.synchronous.num_passes:
            return self.times.synchronous.seconds(len(passes))
        return sum(map(self.of_first, passes))  # no step has waited for a draft

    def of_first(self, num_tokens: int) -> float:
        messages = self.times.messages
        messages_s = messages.seconds(1) if messages.num_passes else 0.0
        return self.times.first.seconds(num_tokens) + messages_s

    def of_level(self, num_tokens: int) -> float:
        return self.times.levels.seconds(num_tokens)
