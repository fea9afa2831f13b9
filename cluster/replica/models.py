"""The models of a replica: the target, and the draft model where one drafts."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from cluster.config.serve_config import ServeConfig
from cluster.workers.draft_group import DraftGroup
from cluster.workers.draft_supervisor import DraftSupervisor
from cluster.workers.model_source import ModelSource
from cluster.workers.profiling import ProfiledModel
from cluster.workers.resources import DRAFT_BUNDLE, TARGET_BUNDLE
from cluster.workers.target_group import TargetGroup
from cluster.workers.target_supervisor import TargetSupervisor
from cluster.workers.worker_group import GroupSpec
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.quantization import QuantizationMethod
from specdec.engine.engine_thread import EngineLoop
from specdec.engine.memory_plan import MemoryPlan
from specdec.engine.model_resolution import ModelDirectories
from specdec.speculation.policy.factory import make_policy
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import DraftVocabulary, Proposer, make_proposer
from specdec.types.control import SpeculationControl
from specdec.types.counters import ModelCounts
from specdec.types.errors import TargetFailedError
from specdec.types.worker import Target

_DRAFT_TIMEOUT_S = 10.0
"""Streams wait for drafts; a worker that takes so long is better done without."""


class ReplicaModels:
    """Starts the models, has lost ones replaced, and ends them. There are none until `start`."""

    def __init__(
        self,
        config: ServeConfig,
        directories: ModelDirectories,
        plan: MemoryPlan,
        num_sharing: int = 1,
    ) -> None:
        """plan: the limits of both, decided. num_sharing: replicas that share a node's cores."""
        self._config = config
        self._directories = directories
        self._plan = plan
        self._num_sharing = num_sharing
        self._target: TargetSupervisor | None = None
        self._draft: DraftSupervisor | None = None

    async def start(self, placement: PlacementGroup | None) -> None:
        """Starts both at once; they are warm when it returns. Raises what loading raises.

        `close` ends what has been started by then.
        """
        await asyncio.to_thread(self.load, placement)

    def load(self, placement: PlacementGroup | None) -> None:
        """The same, for who has no event loop."""
        with ThreadPoolExecutor(1) as other:
            draft = other.submit(self._start_draft, placement)
            try:
                self._target = self._start_target(placement)
            finally:
                self._draft = draft.result()

    @property
    def target(self) -> Target:
        """The one in use, which `remake_target` replaces."""
        return self._started.current

    def lose_target(self) -> None:
        """Has the target taken no more profiles, before `remake_target`; on the engine's thread."""
        self._started.lose()

    def remake_target(self) -> Target:
        """Kills the target and starts another; raises TargetFailedError in a crash loop."""
        return self._started.remake()

    async def check(self, loop: EngineLoop) -> None:
        """Has a worker replaced that died while no step noticed; `loop` hears of a lost target."""
        if self._draft is not None:
            loop.post(self._draft.check)
        target = self._started.current
        try:
            await asyncio.to_thread(target.check_alive)
        except TargetFailedError as error:
            if target is self._started.current:  # else a step has noticed too
                loop.lose_target(error)

    async def close(self) -> None:
        """Ends both, after the engine's last call."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """The same, for who has no event loop."""
        if self._draft is not None:
            self._draft.close()
        if self._target is not None:
            self._target.close()

    def make_proposer(self) -> Proposer | None:
        """What drafts as it is configured; None where nothing does."""
        return make_proposer(self._plan.engine.speculation, self._draft)

    def make_policy(self, control: SpeculationControl, full_batch: int) -> SpeculationPolicy | None:
        """Measures the models where the policy goes by that; see `speculation_policy`.

        To be called before they know of any sequence, and not on the event loop.
        """
        return make_policy(
            control,
            self._plan.engine,
            self.target,
            None if self._draft is None else self._draft.measure,
            self._plan.draft,
            lambda: self.can_draft,
            full_batch,
        )

    @property
    def can_draft(self) -> bool:
        """Whether anything drafts now, where anything was configured to."""
        speculation = self._config.speculative_config
        has_lookup = speculation is not None and len(speculation.methods) > 1
        return self._draft is None or self._draft.is_available or has_lookup

    @property
    def is_draft_up(self) -> bool | None:
        """Whether a draft model's worker is there to draft; None where there is no draft model."""
        return None if self._draft is None else self._draft.is_available

    @property
    def counts(self) -> ModelCounts:
        """How often each was made again, and what the draft model has caught up on."""
        target, draft = self._target, self._draft
        return ModelCounts(
            num_target_restarts=target.num_restarts if target else 0,
            num_draft_restarts=draft.num_restarts if draft else 0,
            num_catch_up_tokens=draft.num_catch_up_tokens if draft else 0,
        )

    @property
    def profiled(self) -> dict[str, ProfiledModel]:
        """Both by name, the target first."""
        models: dict[str, ProfiledModel] = {"target": self._started}
        if self._draft is not None:
            models["draft model"] = self._draft
        return models

    @property
    def _started(self) -> TargetSupervisor:
        assert self._target is not None, "the models have not been started"
        return self._target

    def _start_target(self, placement: PlacementGroup | None) -> TargetSupervisor:
        config, limits = self._config, self._plan.engine
        size, quantization = config.tensor_parallel_size, config.quantization_method
        source = ModelSource(config.model, self._directories.target)
        spec = self._group_spec("target", source, size, limits, quantization)
        return TargetSupervisor(lambda: TargetGroup(spec, placement))

    def _start_draft(self, placement: PlacementGroup | None) -> DraftSupervisor | None:
        limits, drafting = self._plan.draft, self._config.draft_model
        if limits is None or drafting is None:
            return None
        directory, size = self._directories.draft, drafting.draft_tensor_parallel_size
        assert directory is not None, "a plan for a draft model that is nowhere"
        source = ModelSource(drafting.model or self._config.model, directory)
        spec = self._group_spec("draft model", source, size, limits, drafting.quantization)
        vocabulary = DraftVocabulary.between(directory, self._directories.target)
        spec = replace(spec, vocabulary=vocabulary.shared)
        return DraftSupervisor(lambda: DraftGroup(spec, placement), limits, vocabulary)

    def _group_spec(
        self,
        name: str,
        source: ModelSource,
        size: int,
        limits: EngineConfig | DraftLimits,
        quantization: QuantizationMethod | None,
    ) -> GroupSpec:
        config = self._config
        is_target = isinstance(limits, EngineConfig)
        timeout_s = config.step_timeout_s
        return GroupSpec(
            name=name,
            model=source,
            dtype=config.settled_dtype,
            device=config.device,
            quantization=quantization,
            kernels=config.kernels,
            tensor_parallel_size=size,
            limits=limits,
            num_replicas=self._num_sharing,
            bundle_index=TARGET_BUNDLE if is_target else DRAFT_BUNDLE,
            transport=None if config.transport == "auto" else config.transport,
            start_timeout_s=config.start_timeout_s,
            step_timeout_s=timeout_s if is_target else min(timeout_s, _DRAFT_TIMEOUT_S),
            logs=config.logs,
        )
