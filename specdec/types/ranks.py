"""The protocols by which the engine knows the ranks of its models."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from specdec.types.adapters import AdapterFile
from specdec.types.draft_messages import AheadOutput, DraftOutput, DraftStep
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput, VerifyOutput


class Target(Protocol):
    """Runs and verifies the target model's steps in order. Raises TargetFailedError when lost."""

    def begin(self, step: StepInput) -> None:
        """Send a step; may return before it, or the one before it, has run."""

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step that was begun and not collected."""


@runtime_checkable
class HeadTarget(Target, Protocol):
    """A target whose ranks draft with a head that can be replaced.

    A rank keeps the active head, the one before it, and one that is loaded but not active yet.
    """

    def begin_head_load(self, head: HeadFile) -> None:
        """Have every rank load a head, unless it has that version; may return before it has."""

    def collect_head_load(self) -> str | None:
        """Return why a rank could not load it; empty if all have; None until all have answered.

        Does not wait. A rank that could not load it continues with its active head.
        """

    def switch_head(self, version: int) -> None:
        """Draft with a loaded version from the next step on that is begun."""


@runtime_checkable
class AdapterRanks(Protocol):
    """Ranks of a model that can load adapters, in the order of steps and one after the other."""

    def begin_adapter_load(self, adapter: AdapterFile) -> None:
        """Have every rank load an adapter; may return before it has. One at a time."""

    def collect_adapter_load(self) -> str | None:
        """Return why a rank could not load it; empty if all have; None until all have answered.

        Does not wait. After a fault other ranks may have it.
        """

    def unload_adapter(self, adapter_id: int) -> None:
        """Have every rank that has an adapter free it; no step that begins from now on names it."""


@runtime_checkable
class AdapterTarget(Target, AdapterRanks, Protocol):
    """A target whose ranks can load adapters."""


class DraftWorker(Protocol):
    """Runs the draft model's steps in order. Raises DraftFailedError when lost."""

    def begin(self, step: DraftStep) -> None:
        """Send a step; may return before it has run."""

    def collect(self) -> DraftOutput:
        """Wait for the drafts of the last step, which must have some."""

    def collect_ahead(self, *, wait: bool) -> list[AheadOutput]:
        """Return the outputs of `ahead` rows that were not collected yet, in the order of steps.

        wait: for those of all steps that were begun; otherwise those that have arrived.
        """

    def poll_busy(self) -> bool:
        """Read what has arrived; return whether an earlier step's catch-up text still runs."""
