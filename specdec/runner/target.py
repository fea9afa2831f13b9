"""The seam between the engine and whoever holds the target model."""

from __future__ import annotations

from typing import Protocol

from specdec.runner.model_runner import ModelRunner
from specdec.step import StepInput, VerifyOutput


class Target(Protocol):
    """Scores and verifies steps, one in flight at a time. Raises TargetFailedError when lost."""

    def begin(self, step: StepInput) -> None:
        """Hands over a step; may return before it has run."""

    def collect(self) -> VerifyOutput:
        """Waits for the step begun last."""


class LocalTarget:
    """The model in this process, on one rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._step: StepInput | None = None

    def begin(self, step: StepInput) -> None:
        """Keeps the step for `collect`."""
        self._step = step

    def collect(self) -> VerifyOutput:
        """Runs the step."""
        assert self._step is not None, "collect without begin"
        step, self._step = self._step, None
        return self._runner.execute(step)
