"""Interfaces of the workers that run the models, towards the engine and its proposer."""

from __future__ import annotations

from typing import Protocol

from specdec.types.messages import DraftOutput, DraftStep, StepInput, VerifyOutput


class Target(Protocol):
    """Runs and verifies the target model's steps in order. Raises TargetFailedError when lost."""

    def begin(self, step: StepInput) -> None:
        """Send a step; may return before it, or the one before it, has run."""

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step that was begun and not collected."""


class DraftWorker(Protocol):
    """Runs the draft model's steps in order. Raises DraftFailedError when lost."""

    def begin(self, step: DraftStep) -> None:
        """Send a step; may return before it has run."""

    def collect(self) -> DraftOutput:
        """Wait for the drafts of the last step, which must have some."""

    @property
    def is_busy(self) -> bool:
        """Whether an earlier step's catch-up text is still running."""
