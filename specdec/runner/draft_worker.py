"""The seam between the draft-model proposer and whoever holds the draft model."""

from __future__ import annotations

from typing import Protocol

from specdec.runner.draft_runner import DraftRunner
from specdec.step import DraftOutput, DraftStep


class DraftWorker(Protocol):
    """Runs draft steps in order. Raises DraftFailedError when it is lost."""

    def begin(self, step: DraftStep) -> None:
        """Hands over a step; may return before it has run."""

    def collect(self) -> DraftOutput:
        """Waits for the drafts of the step begun last, which must have some."""

    @property
    def is_busy(self) -> bool:
        """Whether it still runs text that an earlier step gave it to catch up on."""


class LocalDraftWorker:
    """The draft model in this process, on one rank."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self._output: DraftOutput | None = None

    def begin(self, step: DraftStep) -> None:
        """Runs the whole step."""
        self._output = self._runner.draft(step)
        self._runner.catch_up(step)

    def collect(self) -> DraftOutput:
        """The drafts that `begin` made."""
        assert self._output is not None, "collect without begin"
        return self._output

    @property
    def is_busy(self) -> bool:
        return False
