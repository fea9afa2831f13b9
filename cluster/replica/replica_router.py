"""The Router of a replica: the engine in this process, its models, readiness and report.

`specdec.engine.engine_setup` loads its engine, `lifecycle.py` has its states, `ray_executor.py` its
models, and `instrumentation.py` its measurements.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Mapping

from ray.util.placement_group import PlacementGroup

from cluster.config.serve_config import ServeConfig
from cluster.replica.instrumentation import Instrumentation
from cluster.replica.lifecycle import Loading, Serving
from cluster.replica.ray_executor import ReplicaExecutor
from cluster.replica.receipts import FutureModel, read_model
from cluster.replica.report import ReplicaLoad
from cluster.replica.router import RoutedModel, Router
from cluster.replica.sample_buffer import SampleBuffer
from cluster.workers.profiling import Profiling
from cluster.workers.ray.resources import ReplicaMemory
from cluster.workers.shared_draft.pool_seats import PoolSeats
from specdec.engine.engine_setup import EngineSetup
from specdec.engine.engine_thread import EngineThread
from specdec.engine.lifecycle import RunningEngine
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.control import SpeculationState
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import TargetFailedError
from specdec.types.reports.fleet import ReplicaReport
from specdec.types.reports.profile import ProfileOrder, ProfileReport
from specdec.types.samples import SampleBatch, SampleOrder

logger = logging.getLogger(__name__)


class ReplicaRouter(Router):
    """The engine of one replica and its models. Not ready until `start` has returned."""

    def __init__(
        self,
        config: ServeConfig,
        directories: ModelDirectories,
        memory: ReplicaMemory,
        replica: str = "local",
        replicas_per_node: int = 1,
        seats: PoolSeats | None = None,
    ) -> None:
        """memory: limits of this replica. replica: its name in the cluster.

        replicas_per_node: those that share its cores. seats: see ReplicaExecutor.
        """
        setup = self.setup = EngineSetup(
            config, directories.configs(), memory.target_bytes, memory.draft_bytes
        )
        config, engine = setup.config, setup.plan.engine
        self.routed = RoutedModel(config, engine, setup.model, directories.target, replica)
        super().__init__(
            self.routed,
            setup.metrics,
            Instrumentation(config, replica, setup.metrics),
            SampleBuffer(config.training_buffer_tokens, config.training_cache_salt or "", replica),
        )
        self._replica = replica
        self._models = ReplicaExecutor(config, directories, setup.plan, replicas_per_node, seats)
        self._speculation_version: int | None = None
        self._state: Loading | Serving = Loading(replica, setup.settings)
        self._profiling = Profiling(config.profile_dir, config.profile_max_mib, replica)

    async def start(self, placement: PlacementGroup | None) -> None:
        """Start and warm up the models, and begin to serve. Raises what loading raises."""
        config = self.config
        text = asyncio.create_task(asyncio.to_thread(self.text.load))  # models take longer
        try:
            await asyncio.to_thread(self._models.load, placement)
        finally:
            await text
        logger.info("the models are loaded and warm")
        loaded = await asyncio.to_thread(
            self.setup.load, self._models, self.text.tokenizer, self._instrumentation
        )
        self.serve(loaded.start_thread())
        logger.info("ready: %s with %s", config.served_model_name, self.setup.plan.describe())

    def serve(self, engine: RunningEngine) -> None:
        """Begin to serve with an engine that has been started."""
        load = ReplicaLoad(self.config.target_requests_per_replica, time.monotonic)
        self._state = Serving(self._replica, engine, self._models, load)

    @property
    def why_not_ready(self) -> str:
        """See Router."""
        return self._state.why_not_ready

    @property
    def failure(self) -> TargetFailedError | None:
        """See Router."""
        return self._state.failure

    def running_engine(self) -> RunningEngine:
        """Return the engine. Raises NotReadyError while the models load."""
        return self._state.running_engine()

    def load_in_requests(self) -> float:
        """Return the load for the autoscaler, which asks every few seconds. Does not block.

        Each choice of a request counts as one.
        """
        return self._state.load_in_requests()

    async def check_models(self) -> None:
        """Restart a worker whose loss no step noticed. Raises TargetFailedError if that failed."""
        await self._state.check_models()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests and wait until the open ones have ended, at most `timeout_s`.

        timeout_s: None for drain_timeout_s; 0 ends them now.
        """
        await self._state.drain(self.config.drain_timeout_s if timeout_s is None else timeout_s)

    async def close(self) -> None:
        """End the engine and the models; open streams end with an error."""
        await self.auditor.close()
        await self._state.close()
        await asyncio.to_thread(self._models.close)
        await asyncio.to_thread(self.text.close)
        await asyncio.to_thread(self._instrumentation.close)

    @property
    def kv_cache_tokens(self) -> int:
        """Number of tokens whose KV fits into the cache."""
        engine = self.setup.plan.engine
        return engine.num_blocks * engine.block_size

    async def apply_speculation(self, state: SpeculationState) -> None:
        """Put the settings of a state in force; the next step goes by them when this returns."""
        await self._state.apply_control(state.in_force)
        self._speculation_version = state.version

    def report(self) -> ReplicaReport:
        """Return this replica's state for the ControlPlane."""
        return self._state.report(self._speculation_version)

    async def profile(self, order: ProfileOrder) -> ProfileReport:
        """Profile the models of this replica. Raises what `Profiling.take` raises."""
        thread = self.running_engine().thread
        return await self._profiling.take(order, self._models.profiled, thread.call)

    async def order_drafter(self, order: DrafterOrder) -> DrafterReport:
        """Execute an order for the versions of this replica's draft head.

        Raises what `RunningEngine.order_drafter` raises.
        """
        return await self.running_engine().order_drafter(order, self._replica)

    async def order_adapter(self, order: AdapterOrder) -> AdapterReport:
        """Execute an order for the adapters of this replica.

        Raises what `RunningEngine.order_adapter` raises.
        """
        return await self.running_engine().order_adapter(order, self._replica)

    def take_samples(self, order: SampleOrder) -> SampleBatch:
        """Return answers for training, and forget them; see `SampleBuffer.take`."""
        return self._samples.take(order)

    def add_sample(self, token_ids: array[int], num_prompt_tokens: int, temperature: float) -> None:
        """Keep an answer of a front end for training; see `SampleBuffer.add`."""
        self._samples.add(token_ids, num_prompt_tokens, temperature)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache unless requests run or wait; return whether it was emptied.

        Raises NotReadyError.
        """
        return await self.running_engine().thread.clear_prefix_cache()

    def _describe_model(self) -> FutureModel:
        return read_model(self.config, self.routed.directory, self._model, self.max_model_len)

    def _client(self) -> EngineThread:
        return self.running_engine().thread

    @property
    def adapter_ids(self) -> Mapping[str, int]:
        """See Router."""
        adapters = self.setup.adapters
        return {} if adapters is None else adapters.ids
