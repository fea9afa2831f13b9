"""The models of a `specdec.LLM` on Ray: several ranks each, in processes of their own."""

from __future__ import annotations

import atexit
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from cluster.config.serve_config import ServeConfig
from cluster.workers.ray_runtime import LocalRay, start_ray
from cluster.workers.resources import check_ranks, placement_bundles
from specdec.config.hardware import available_cpus
from specdec.config.llm import LLMConfig
from specdec.engine.memory_plan import MemoryPlan
from specdec.engine.model_resolution import ModelDirectories
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposer
from specdec.types.control import SpeculationControl
from specdec.types.counters import Counts
from specdec.types.worker import Target

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from cluster.replica.models import ReplicaModels


class RayExecutor:
    """See specdec.llm.executors.LLMExecutor; found by the entry point `ray`.

    On the Ray that the program is connected to, else on one of its own, which ends with this.
    What is lost is replaced, as in a service.
    """

    def __init__(self, config: LLMConfig, directories: ModelDirectories, plan: MemoryPlan) -> None:
        """Starts the ranks; leaves nothing behind where that fails."""
        given = {each.name: getattr(config, each.name) for each in fields(LLMConfig)}
        self._config = ServeConfig(**given, served_model_name="llm")
        self._own_ray: LocalRay | None = None
        self._models: ReplicaModels | None = None
        self._placement: PlacementGroup | None = None
        self._is_closed = False
        try:
            self._connect(directories)
            # Registered after Ray's own and so run before it, while there are actors to be ended.
            atexit.register(self.close)
            self._start(directories, plan)
        except BaseException:
            self.close()
            raise

    def _connect(self, directories: ModelDirectories) -> None:
        """Ray is imported here, since it reads the environment then."""
        if _has_ray():
            return
        check_ranks(self._config, directories.configs(), available_cpus())
        self._own_ray = start_ray()

    def _start(self, directories: ModelDirectories, plan: MemoryPlan) -> None:
        from ray.util import placement_group

        from cluster.replica.models import ReplicaModels

        self._models = ReplicaModels(self._config, directories, plan)
        self._placement = placement_group(placement_bundles(self._config), strategy="PACK")
        self._models.load(self._placement)

    @property
    def _started(self) -> ReplicaModels:
        assert self._models is not None, "the models have not been started"
        return self._models

    @property
    def target(self) -> Target:
        """See Executor."""
        return self._started.target

    @property
    def counts(self) -> Counts:
        """See Executor."""
        return self._started.counts

    def make_proposer(self) -> Proposer | None:
        """See Executor."""
        return self._started.make_proposer()

    def make_policy(self, control: SpeculationControl, full_batch: int) -> SpeculationPolicy | None:
        """See Executor."""
        return self._started.make_policy(control, full_batch)

    def lose_target(self) -> None:
        """See Executor."""
        self._started.lose_target()

    def remake_target(self) -> Target:
        """See Executor."""
        return self._started.remake_target()

    def close(self) -> None:
        """See Executor; without effect where Ray has ended, and all that ran on it."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if _has_ray():
            self._end_ranks()
        if self._own_ray is not None:
            self._own_ray.stop()

    def _end_ranks(self) -> None:
        from ray.util import remove_placement_group

        if self._models is not None:
            self._models.end()
        if self._placement is not None:
            remove_placement_group(self._placement)


def _has_ray() -> bool:
    """Whether the program is connected to one; without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
