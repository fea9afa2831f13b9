"""The seams between the engine and its proposer, and whoever holds the models."""

from __future__ import annotations

from typing import Protocol

from specdec.types.messages import DraftOutput, DraftStep, StepInput, VerifyOutput


class Target(Protocol):
    """Scores and verifies steps in order. Raises TargetFailedError when lost."""

    def begin(self, step: StepInput) -> None:
        """Hands over a step; may return before it has run, or the one before it."""

    def collect(self) -> VerifyOutput:
        """Waits for the first step that was begun and not collected."""


class DraftWorker(Protocol):
    """Runs draft steps in order. Raises DraftFailedError when it is lost."""

    def begin(self, step: DraftStep) -> None:
        """Hands over a step; may return before it has run."""

    def collect(self) -> DraftOutput:
        """Waits for the drafts of the step begun last, which must have some."""

    @property
    def is_busy(self) -> bool:
        """Whether it still runs text that an earlier step gave it to catch up on."""
