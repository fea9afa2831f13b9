"""The models of a replica or of a `specdec.LLM` on Ray, each rank in its own process."""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.config.serve_config import ServeConfig
from cluster.replica.group_specs import draft_spec, target_spec
from cluster.workers.ray.ray_runtime import LocalRay, start_ray
from cluster.workers.ray.resources import check_ranks, placement_bundles
from specdec.config.engine import DraftLimits
from specdec.config.hardware import available_cpus
from specdec.config.llm import LLMConfig
from specdec.engine.engine_profiler import draft_profile_text
from specdec.engine.engine_thread import EngineThread
from specdec.engine.executor import SpeculationFactory
from specdec.engine.memory.memory_plan import MemoryPlan
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.speculation.proposers import DraftVocabulary
from specdec.types.errors import InvalidValueError
from specdec.types.ranks import Target
from specdec.types.reports.stats import Counts

if TYPE_CHECKING:  # they import Ray, which reads the environment when it is imported
    from ray.util.placement_group import PlacementGroup

    from cluster.workers.group_spec import RankPlace
    from cluster.workers.groups.supervisors import DraftSupervisor, Supervisor, TargetSupervisor
    from cluster.workers.shared_draft.pool_seats import PoolSeats

Measured = TypeVar("Measured")


class ReplicaExecutor:
    """Models in worker groups that are restarted when lost; see `Executor`."""

    def __init__(
        self,
        config: ServeConfig,
        directories: ModelDirectories,
        plan: MemoryPlan,
        replicas_per_node: int = 1,
        seats: PoolSeats | None = None,
    ) -> None:
        """Store what `load` needs.

        replicas_per_node: those that share its cores. seats: at draft workers that several replicas
        share; None where each has its own.
        """
        self._config = config
        self._directories = directories
        self._plan = plan
        self._replicas_per_node = replicas_per_node
        self._seats = seats
        self._target: TargetSupervisor | None = None
        self._draft: DraftSupervisor | None = None
        self._is_closed = False

    def load(self, placement: PlacementGroup) -> None:
        """Start both models at once on a replica's resources, and return when they are warm.

        Closes the executor if loading fails.
        """
        try:
            self._start_models(placement)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See Executor."""
        if not self._is_closed:
            self._is_closed = True
            self._end_models()

    def _end_models(self) -> None:
        for supervisor in (self._draft, self._target):
            if supervisor is not None:
                supervisor.close()

    @property
    def target(self) -> Target:
        """See Executor."""
        return self._started.current

    def mark_target_lost(self) -> None:
        """See Executor."""
        self._started.mark_lost()

    def forgive_losses(self) -> None:
        """See Executor."""
        self._started.forgive_losses()

    def restart_target(self) -> Target:
        """See Executor."""
        return self._started.restart()

    async def check(self, loop: EngineThread) -> None:
        """Detect ranks that died while no step ran; report the loss of the target to `loop`."""
        if self._draft is not None:
            loop.post(self._draft.check)
        await asyncio.to_thread(self._started.check, loop.mark_target_lost)

    @property
    def speculation(self) -> SpeculationFactory:
        """See Executor."""
        return SpeculationFactory(
            self._plan,
            self._draft,
            None if self._draft is None else self._draft.measure,
            draft_profile_text(self._directories.draft),
            lambda: self.can_draft,
        )

    def measure(self, function: Callable[[Target], Measured]) -> Measured:
        """See Executor."""
        return function(self.target)

    @property
    def can_draft(self) -> bool:
        """Return whether a configured drafting method is available now."""
        speculation = self._config.speculative_config
        has_other = speculation is not None and len(speculation.methods) > 1
        return self._draft is None or self._draft.is_available or has_other

    @property
    def is_draft_up(self) -> bool | None:
        """Return whether the draft model is available; None where there is none."""
        return None if self._draft is None else self._draft.is_available

    @property
    def counts(self) -> Counts:
        """See Executor."""
        target, draft = self._target, self._draft
        own = Counts(
            num_target_restarts=target.num_restarts if target else 0,
            num_draft_restarts=draft.num_restarts if draft else 0,
            num_draft_moves=draft.num_moves if draft else 0,
            num_late_drafts=draft.num_late_drafts if draft else 0,
        )
        return own if draft is None else own.plus(draft.counts)

    def places_on(self, address: str) -> list[RankPlace]:
        """Return where the ranks on a node run, without those that replicas share."""
        models = [each for each in (self._target, self._draft) if each is not None]
        places = (place for each in models for place in each.places)
        return [place for place in places if place.address == address]

    @property
    def profiled(self) -> dict[str, Supervisor[Any, Any]]:
        """The models by name, the target first."""
        models: dict[str, Supervisor[Any, Any]] = {"target": self._started}
        if self._draft is not None:
            models["draft model"] = self._draft
        return models

    @property
    def _started(self) -> TargetSupervisor:
        assert self._target is not None, "the models have not been started"
        return self._target

    def _start_models(self, placement: PlacementGroup) -> None:
        with ThreadPoolExecutor(1) as thread:
            draft = thread.submit(self._start_draft, placement)
            try:
                self._target = self._start_target(placement)
            finally:
                self._draft = draft.result()

    def _start_target(self, placement: PlacementGroup) -> TargetSupervisor:
        from cluster.workers.groups.supervisors import TargetSupervisor
        from cluster.workers.groups.target_group import TargetGroup

        limits = self._plan.engine
        spec = target_spec(self._config, self._directories, limits, self._replicas_per_node)
        return TargetSupervisor(lambda: TargetGroup(spec, placement))

    def _start_draft(self, placement: PlacementGroup) -> DraftSupervisor | None:
        from cluster.workers.groups.ranks import Ranks
        from cluster.workers.groups.roles import DRAFT
        from cluster.workers.groups.spare import SpareRanks
        from cluster.workers.groups.supervisors import DraftSupervisor
        from cluster.workers.groups.target_group import AdapterGroup

        limits, directory = self._plan.draft, self._directories.draft
        if limits is None or self._config.draft_model is None or directory is None:
            return None
        options = self._config.model_options
        vocabulary = DraftVocabulary.between(directory, self._directories.target, options)
        self._plan = with_possible_drafts_ahead(self._plan, vocabulary)
        if self._seats is not None:
            return self._share_draft_worker(self._seats, limits, vocabulary)
        spec = draft_spec(
            self._config, self._directories, limits, vocabulary, self._replicas_per_node
        )
        if not self._config.spare_draft_worker:
            start = partial(AdapterGroup, DRAFT, spec, placement)
            return DraftSupervisor(start, limits, vocabulary)
        spare = SpareRanks(
            lambda ranks: AdapterGroup(DRAFT, spec, placement, ranks),
            lambda lost: Ranks.opened(DRAFT.actor, spec, placement, lost.places),
        )
        return DraftSupervisor(spare.start, limits, vocabulary, spare)

    def _share_draft_worker(
        self, seats: PoolSeats, limits: DraftLimits, vocabulary: DraftVocabulary
    ) -> DraftSupervisor:
        """Draft on a worker with a seat for this replica, within the blocks that it has there."""
        from cluster.workers.shared_draft.pool_supervisor import PoolSupervisor

        timeout_s = self._config.start_timeout_s
        limits = replace(limits, num_blocks=min(limits.num_blocks, seats.num_blocks(timeout_s)))
        self._plan = replace(self._plan, draft=limits)
        spec = draft_spec(
            self._config, self._directories, limits, vocabulary, self._replicas_per_node
        )
        return PoolSupervisor(seats, spec, vocabulary)


class RayExecutor(ReplicaExecutor):
    """The models of an `LLM`, which finds this by the entry point `ray`.

    They are those of a replica, with the service's defaults of what an `LLM` does not configure.
    """

    def __init__(self, config: LLMConfig, directories: ModelDirectories, plan: MemoryPlan) -> None:
        """Load the models on the Ray that the program is connected to, or else on a private one.

        The private one ends with this executor. Raises what loading raises.
        """
        values = {each.name: getattr(config, each.name) for each in fields(LLMConfig)}
        service = ServeConfig(**values, served_model_name="llm", spare_draft_worker=False)
        super().__init__(service, directories, plan)
        self._own_ray: LocalRay | None = None
        self._own_placement: PlacementGroup | None = None
        try:
            self.load(self._reserve())
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> PlacementGroup:
        if not _has_ray():
            check_ranks(self._config, self._directories.configs(), available_cpus())
            self._own_ray = start_ray()
        # Registered after Ray's own handler and so executed before it, while the actors exist.
        atexit.register(self.close)
        from ray.util import placement_group

        self._own_placement = placement_group(placement_bundles(self._config), strategy="PACK")
        return self._own_placement

    def _end_models(self) -> None:
        """End what has been started; no worker is left where Ray has ended."""
        atexit.unregister(self.close)
        if self._own_placement is None or _has_ray():
            super()._end_models()
        if self._own_placement is not None and _has_ray():
            from ray.util import remove_placement_group

            remove_placement_group(self._own_placement)
        if self._own_ray is not None:
            self._own_ray.stop()


def with_possible_drafts_ahead(plan: MemoryPlan, vocabulary: DraftVocabulary) -> MemoryPlan:
    """Return the plan without drafts ahead where the draft model cannot make them.

    Raises InvalidValueError where a kind of them was chosen, rather than auto.
    """
    speculation = plan.engine.speculation
    if speculation is None or vocabulary.drafts_ahead:
        return plan
    drafting = speculation.draft_model
    if drafting is not None and drafting.async_drafting in ("continuing", "outcomes"):
        limit = (
            "off or auto with this draft model: its tokenizer is not the target's, so a draft that "
            "is accepted in part may be other tokens in the longer text"
        )
        raise InvalidValueError("speculative_config.async_drafting", drafting.async_drafting, limit)
    return replace(plan, engine=replace(plan.engine, speculation=speculation.without_drafts_ahead))


def _has_ray() -> bool:
    """Return whether the program is connected to Ray, without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
