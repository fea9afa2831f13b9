"""Models in this process, on one rank each, as the protocols of `specdec.types.messages`."""

from __future__ import annotations

from collections import deque

from specdec.types.messages import DraftOutput, DraftStep, StepInput, VerifyOutput
from specdec.worker.draft_model_runner import DraftModelRunner
from specdec.worker.target_model_runner import TargetModelRunner


class LocalTarget:
    """The target model; see Target."""

    def __init__(self, runner: TargetModelRunner) -> None:
        self._runner = runner
        self._steps: deque[StepInput] = deque()

    def begin(self, step: StepInput) -> None:
        """Queue the step for `collect`."""
        self._steps.append(step)

    def collect(self) -> VerifyOutput:
        """Run the step, and return its output."""
        return self._runner.execute(self._steps.popleft())


class LocalDraftWorker:
    """The draft model; see DraftWorker."""

    def __init__(self, runner: DraftModelRunner) -> None:
        self._runner = runner
        self._output: DraftOutput | None = None

    def begin(self, step: DraftStep) -> None:
        """Run the whole step."""
        self._output = self._runner.draft(step)
        self._runner.catch_up(step)

    def collect(self) -> DraftOutput:
        """Return the drafts that `begin` made."""
        assert self._output is not None, "collect without begin"
        return self._output

    @property
    def is_busy(self) -> bool:
        return False
