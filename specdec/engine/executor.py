"""The interface of the models of an engine, in this process or in others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from specdec.engine.memory.memory_plan import MemoryPlan
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.factory import (
    MeasureDraft,
    MeasureEngine,
    ProfiledModels,
    make_policy,
    measure_costs,
)
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposer, make_proposer
from specdec.speculation.proposers.draft_adapters import AdapterDrafter
from specdec.types.control import SpeculationControl
from specdec.types.ranks import Target
from specdec.types.reports.stats import Counts

Measured = TypeVar("Measured")


class DraftModel(Proposer, AdapterDrafter, Protocol):
    """A proposer that drafts with a model."""


@dataclass(frozen=True)
class SpeculationFactory:
    """Makes the proposer and the policy for loaded models, and measures what drafting costs.

    plan: limits of the models that were loaded. model, measure_draft: None without a draft model.
    text: see `draft_profile_text`. is_available: whether a configured method can draft now.
    """

    plan: MemoryPlan
    model: DraftModel | None
    measure_draft: MeasureDraft | None
    text: tuple[int, ...] = ()
    is_available: Callable[[], bool] = lambda: True

    def make_proposer(self) -> Proposer | None:
        """Return the configured proposer; None where nothing drafts."""
        return make_proposer(self.plan.engine.speculation, self.model)

    def make_policy(
        self,
        control: SpeculationControl,
        target: Target,
        measure_engine: MeasureEngine,
        text: tuple[int, ...],
    ) -> SpeculationPolicy | None:
        """See `specdec.speculation.policy.factory`; call it before there is a sequence."""
        models = self._profiled(target, measure_engine, text)
        return make_policy(control, self.plan.engine, models, self.is_available)

    def measure_costs(
        self, target: Target, measure_engine: MeasureEngine, text: tuple[int, ...]
    ) -> CostTable:
        """Return the seconds of steps with the configured drafters; call it as `make_policy`."""
        engine = self.plan.engine
        assert engine.speculation is not None, "nothing drafts"
        models = self._profiled(target, measure_engine, text)
        return measure_costs(engine.speculation, engine, models)[None].whole

    def _profiled(
        self, target: Target, measure_engine: MeasureEngine, text: tuple[int, ...]
    ) -> ProfiledModels:
        draft = self.measure_draft, self.plan.draft
        return ProfiledModels(target, measure_engine, *draft, text, self.text)


class Executor(Protocol):
    """The workers of the target, and of the draft model where one is configured, all loaded."""

    @property
    def target(self) -> Target:
        """The target in use, which `restart_target` replaces."""

    @property
    def counts(self) -> Counts:
        """Restarts of each model, and the draft model's catch-up tokens."""

    @property
    def speculation(self) -> SpeculationFactory:
        """Makes what drafts with the loaded models."""

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
