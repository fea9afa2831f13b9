"""The interface of the models of an engine, in this process or in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from specdec.speculation.policy.factory import MeasureEngine
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposer
from specdec.speculation.proposers.draft_adapters import AdapterDrafter
from specdec.types.control import SpeculationControl
from specdec.types.ranks import Target
from specdec.types.reports.stats import Counts

Measured = TypeVar("Measured")


class Executor(Protocol):
    """The workers of the target, and of the draft model where one is configured."""

    def load(self) -> None:
        """Load the models and warm them up. Raises what loading raises."""

    @property
    def target(self) -> Target:
        """The target in use, which `restart_target` replaces."""

    @property
    def counts(self) -> Counts:
        """Restarts of each model, and the draft model's catch-up tokens."""

    def make_proposer(self) -> Proposer | None:
        """Return the configured proposer; None where nothing drafts."""

    @property
    def adapter_drafter(self) -> AdapterDrafter | None:
        """The draft model, which may load adapters; None without one."""

    def make_policy(
        self,
        control: SpeculationControl,
        full_batch: int,
        measure_engine: MeasureEngine,
        text: tuple[int, ...],
    ) -> SpeculationPolicy | None:
        """See `specdec.speculation.policy.factory`; call it before there is a sequence."""

    def measure(self, function: Callable[[Target], Measured]) -> Measured:
        """Call a function with the target, before there is a sequence."""

    def mark_target_lost(self) -> None:
        """Prepare for `restart_target`; called on the engine's thread."""

    def forgive_losses(self) -> None:
        """Do not count the losses so far as failures of the target: a request caused them."""

    def restart_target(self) -> Target:
        """Replace a lost target; called on a recovery thread. Raises TargetFailedError."""

    def close(self) -> None:
        """End the models after the engine's last call. From any thread, also at exit."""
