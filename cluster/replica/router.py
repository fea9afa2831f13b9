"""The Router: admission, control and the engine of one replica.

`ray_executor.py` keeps its models, `preprocessor.py` its tokenizer and grammars, and
`instrumentation.py` measures what they do.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

from ray.util.placement_group import PlacementGroup

from cluster.config.serve_config import ServeConfig
from cluster.observability.logs import current_request_id
from cluster.replica.instrumentation import ReplicaObserver
from cluster.replica.load import ReplicaLoad
from cluster.replica.preprocessor import ReplicaText
from cluster.replica.ray_executor import RayExecutor
from cluster.replica.report import decision_fields
from cluster.workers.profiling import Profiling
from cluster.workers.resources import ReplicaMemory
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import EngineLoop
from specdec.engine.memory_plan import memory_plan
from specdec.engine.metrics import BATCH_SIZE, Metrics, counts_of
from specdec.engine.model_resolution import ModelDirectories, with_settled_dtype
from specdec.engine.outputs import RequestOutput
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control_changes import SpeculationState
from specdec.types.errors import NotReadyError, TargetFailedError, UnknownModelError
from specdec.types.fleet import ReplicaReport
from specdec.types.profile import ProfileOrder, ProfileReport
from specdec.types.request import DetokenizeRequest, GenerateRequest, TokenizeRequest
from specdec.types.responses import ModelInfo
from specdec.types.sampling_params import SamplingDefaults, SamplingParams
from specdec.types.worker import Target

logger = logging.getLogger(__name__)

_VERSION = version("specdec")


@dataclass(frozen=True)
class Generation:
    """A request under way. The seed is known before the first token."""

    seed: int
    outputs: AsyncGenerator[RequestOutput, None]


class Router:
    """Owns an engine and the models it drives. Not ready until `start` has returned."""

    def __init__(
        self,
        config: ServeConfig,
        directories: ModelDirectories,
        memory: ReplicaMemory,
        replica: str = "local",
        num_sharing: int = 1,
    ) -> None:
        """memory: what this replica may take. replica: the name that the cluster knows it by.

        num_sharing: how many replicas share the cores of a node.
        """
        models = directories.configs()
        config = self.config = with_settled_dtype(config, models)
        self.metrics = Metrics()
        self._replica = replica
        self._model = models.target
        if config.generation_config == "none":
            self._model = replace(models.target, sampling_defaults=SamplingDefaults())
        self._plan = memory_plan(config, models, memory.target_bytes, memory.draft_bytes)
        self.text = ReplicaText(directories.target, self._model)
        self._models = RayExecutor(config, directories, self._plan, num_sharing)
        self._loop: EngineLoop | None = None
        speculation = config.speculative_config
        self._control = speculation.control if speculation else None
        self._speculation_version: int | None = None
        self.num_requests = 0
        self._load = ReplicaLoad(config.target_requests_per_replica, time.monotonic)
        self._observer = ReplicaObserver(config, replica, self.metrics)
        self._profiling = Profiling(config.profile_dir, config.profile_max_mib, replica)

    async def start(self, placement: PlacementGroup | None) -> None:
        """Starts the models, warms them up and begins to serve. Raises what loading raises."""
        text = asyncio.create_task(asyncio.to_thread(self.text.load))  # models take longer
        try:
            await asyncio.to_thread(self._models.load, placement)
        finally:
            await text
        logger.info("the models are loaded and warm")
        policy = await asyncio.to_thread(self._make_policy)
        engine = Engine(
            self._plan.engine,
            self._model,
            self._observer.timed_target(self._models.target),
            self.text.tokenizer,
            proposer=self._observer.timed_proposer(self._models.make_proposer()),
            policy=policy,
        )
        if self._control is not None:  # it may have changed while steps were measured
            engine.set_speculation(self._control)
        self._loop = EngineLoop(
            engine,
            self._remake_target,
            self.metrics[BATCH_SIZE].observe,
            self._models.lose_target,
        )
        logger.info("ready: %s with %s", self.config.served_model_name, self._plan)

    def _make_policy(self) -> SpeculationPolicy | None:
        if self._control is None:
            return None
        full = min(self.config.max_num_seqs, round(self.config.target_requests_per_replica))
        return self._models.make_policy(self._control, max(1, full))

    def _remake_target(self) -> Target:
        return self._observer.timed_target(self._models.remake_target())

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered now."""
        return not self._why_not_ready

    @property
    def _why_not_ready(self) -> str:
        """Empty while it is ready."""
        loop = self._loop
        if loop is None:
            return "the model is loading"
        if loop.failure is not None:
            return "the model stopped answering"
        if loop.is_recovering:
            return "the model is starting again"
        return "it is draining" if loop.is_draining else ""

    def load_in_requests(self) -> float:
        """How much of this replica the load takes; to be asked every few seconds.

        Known without asking the engine. Each choice of a request counts as one.
        """
        if self._loop is None:
            return 0.0
        stats = self._loop.last_stats
        return self._load.requests(
            self._loop.num_sequences, stats.num_generated_tokens, stats.capacity_tokens_per_s
        )

    @property
    def failure(self) -> TargetFailedError | None:
        """Why the engine is lost; None while it is not."""
        return None if self._loop is None else self._loop.failure

    async def check_models(self) -> None:
        """Has a worker that died unnoticed replaced. Raises TargetFailedError if none can be."""
        loop = self._loop
        if loop is None:
            return
        if loop.failure is not None:
            raise loop.failure
        if not loop.is_recovering:
            await self._models.check(loop)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuses requests, and returns when none runs any more or the time for it is up.

        timeout_s: None for drain_timeout_s; 0 breaks them off.
        """
        if self._loop is not None:
            await self._loop.drain(self.config.drain_timeout_s if timeout_s is None else timeout_s)

    async def close(self) -> None:
        """Ends the engine and the models; streams still open end with an error."""
        if self._loop is not None:
            await self._loop.close()
        await asyncio.to_thread(self._models.close)
        await asyncio.to_thread(self._observer.close)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self._plan.engine.max_model_len

    async def apply_speculation(self, state: SpeculationState) -> None:
        """Goes by what is wanted of speculation, from the next step on."""
        if self._control is not None:
            self._control = state.in_force
            if self._loop is not None:
                with suppress(TargetFailedError, NotReadyError):  # over; the next Router asks anew
                    await self._loop.set_speculation(state.in_force)
        self._speculation_version = state.version

    def report(self) -> ReplicaReport:
        """How this replica is, by the name that the cluster knows it by."""
        reason = self._why_not_ready
        if self._loop is None:
            return ReplicaReport(self._replica, is_ready=False, reason=reason)
        stats = self._loop.last_stats
        return ReplicaReport(
            self._replica,
            is_ready=not reason,
            reason=reason,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_decoding=stats.num_decoding,
            kv_cache_usage=1 - stats.num_free_blocks / stats.num_blocks,
            is_speculation_on=stats.is_speculation_on and self._models.can_draft,
            speculation_version=self._speculation_version,
            **decision_fields(stats, time.monotonic(), datetime.now(UTC)),
            estimated_speedup=stats.estimated_speedup,
            estimated_tokens_per_s=stats.estimated_tokens_per_s,
            mode=self._control.mode if self._control else "",
            is_draft_worker_up=self._models.is_draft_up,
            counts=counts_of(stats, self.num_requests, self.metrics, self._models.counts),
        )

    async def profile(self, order: ProfileOrder) -> ProfileReport:
        """Profiles the models of this replica. Raises what `Profiling.take` raises."""
        if self._loop is None:
            raise NotReadyError("the model is still loading")
        return await self._profiling.take(order, self._models.profiled, self._loop.call)

    async def generate(self, call: GenerateRequest) -> Generation:
        """Start a request. Its outputs raise the engine's errors."""
        request_id = call.request_id or secrets.token_hex(8)
        current_request_id.set(request_id)
        observer = self._observer.begin(request_id, call)
        try:
            loop = self.check_admission(call.model, call.params.n)
            request = await self._prepare(request_id, call)
        except BaseException as error:
            observer.on_refused(error)
            raise
        observer.on_queued(request)
        return Generation(request.seed, loop.generate(request, observer))

    async def _prepare(self, request_id: str, call: GenerateRequest) -> EngineRequest:
        """Return an admitted request with token ids, compiled grammar and seed."""
        self.num_requests += call.params.n
        return EngineRequest.of(
            call,
            await self.text.encode(call.prompt),
            secrets.randbits(63) if call.params.seed is None else call.params.seed,
            await self.text.compile(call.params.structured_output),
            request_id=request_id,
            queue_deadline_s=time.monotonic() + self.config.queue_timeout_s,
        )

    def check_admission(self, model: str, num_choices: int) -> EngineLoop:
        """Return the engine loop if a request with this number of choices would be admitted now.

        Raises UnknownModelError, NotReadyError and OverloadedError.
        """
        self._check_model(model)
        if self._loop is None:
            raise NotReadyError("the model is still loading")
        self._loop.require_room(num_choices)
        return self._loop

    def max_tokens(self, params: SamplingParams) -> int:
        """How long a choice can get, after the shortest of prompts."""
        asked = params.settled(self._model.sampling_defaults).max_tokens
        return self.max_model_len if asked is None else min(asked, self.max_model_len)

    async def tokenize(self, call: TokenizeRequest) -> list[int]:
        """Return the token ids of a text or a chat."""
        self._check_model(call.model)
        add = call.add_special_tokens
        return list(await self.text.encode(call.prompt, add_special_tokens=add))

    async def detokenize(self, call: DetokenizeRequest) -> str:
        """Return the text of token ids without special tokens."""
        self._check_model(call.model)
        return await self.text.decode(call.token_ids)

    def model_info(self, model: str) -> ModelInfo:
        """What is served, and how."""
        self._check_model(model)
        speculation = self.config.speculative_config
        return ModelInfo(
            model=self.config.served_model_name,
            architecture=self._model.architecture,
            dtype=self.config.settled_dtype,
            vocab_size=self._model.vocab_size,
            max_model_len=self.max_model_len,
            tensor_parallel_size=self.config.tensor_parallel_size,
            speculation_method=speculation.method if speculation else None,
            num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
            version=_VERSION,
            sampling_defaults=self._model.sampling_defaults,
            speculation_methods=speculation.methods if speculation else (),
        )

    def _check_model(self, model: str) -> None:
        if model and model != self.config.served_model_name:
            raise UnknownModelError(model, self.config.served_model_name)
