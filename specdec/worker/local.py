"""Workers in this process, one rank each, that implement the protocols of `specdec.types.worker`."""

from __future__ import annotations

from collections import deque

from specdec.types.messages import DraftOutput, DraftStep, StepInput, VerifyOutput
from specdec.worker.draft_worker import DraftRunner
from specdec.worker.target_worker import ModelRunner


class LocalTarget:
    """The target model; see Target."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps: deque[StepInput] = deque()

    def begin(self, step: StepInput) -> None:
        """Store the step for `collect`."""
        self._steps.append(step)

    def collect(self) -> VerifyOutput:
        """Execute the step."""
        return self._runner.execute(self._steps.popleft())


class LocalDraftWorker:
    """The draft model; see DraftWorker."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self._output: DraftOutput | None = None

    def begin(self, step: DraftStep) -> None:
        """Execute the whole step."""
        self._output = self._runner.draft(step)
        self._runner.catch_up(step)

    def collect(self) -> DraftOutput:
        """Return the drafts of the last `begin`."""
        assert self._output is not None, "collect without begin"
        return self._output

    @property
    def is_busy(self) -> bool:
        return False
