"""The Router: admission, readiness and report of one replica.

`specdec.engine.core` has its engine, `phases.py` what it does before and after its start,
`ray_executor.py` its models, `preprocessor.py` its tokenizer and grammars, and `instrumentation.py`
its measurements.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version

from ray.util.placement_group import PlacementGroup

from cluster.config.serve_config import ServeConfig
from cluster.observability.logs import current_request_id
from cluster.observability.request_context import current_caller
from cluster.replica.instrumentation import Instrumentation
from cluster.replica.orders import AbortOrder
from cluster.replica.phases import Loading, Serving
from cluster.replica.preprocessor import Preprocessor
from cluster.replica.ray_executor import ReplicaExecutor
from cluster.replica.report import ReplicaLoad
from cluster.replica.sample_buffer import SampleBuffer
from cluster.workers.profiling import Profiling
from cluster.workers.ray.resources import ReplicaMemory
from cluster.workers.shared_draft.draft_seats import DraftSeats
from specdec.engine.core import EngineCore
from specdec.engine.engine_thread import EngineThread
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.engine.phases import RunningEngine
from specdec.sequences.prediction import PredictedText
from specdec.sequences.sequence import EngineRequest
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.control import SpeculationState
from specdec.types.deadline import Deadline
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import TargetFailedError, UnknownModelError
from specdec.types.messages import BASE_MODEL
from specdec.types.reports.fleet import ReplicaReport
from specdec.types.reports.profile import ProfileOrder, ProfileReport
from specdec.types.request import DetokenizeRequest, GenerateRequest, TokenizeRequest
from specdec.types.responses import EngineOutput, ModelInfo
from specdec.types.samples import SampleBatch, SampleOrder
from specdec.types.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_VERSION = version("specdec")

DEFAULT_MODEL = "default"
"""SGLang's name for the served model; an adapter of this name takes precedence."""


@dataclass(frozen=True)
class Generation:
    """A running request. The seed is known before the first token."""

    request_id: str
    seed: int
    outputs: AsyncGenerator[EngineOutput, None]


class Router:
    """The engine of one replica and its models. Not ready until `start` has returned."""

    def __init__(
        self,
        config: ServeConfig,
        directories: ModelDirectories,
        memory: ReplicaMemory,
        replica: str = "local",
        num_sharing: int = 1,
        seats: DraftSeats | None = None,
    ) -> None:
        """memory: limits of this replica. replica: its name in the cluster.

        num_sharing: the number of replicas that share the cores of a node. seats: see
        ReplicaExecutor.
        """
        self.core = EngineCore(
            config, directories.configs(), memory.target_bytes, memory.draft_bytes
        )
        config = self.config = self.core.config
        self.metrics = self.core.metrics
        self._replica = replica
        self._model = self.core.model
        self.text = Preprocessor(directories.target, self._model, config.chat_template)
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._models = ReplicaExecutor(config, directories, self.core.plan, num_sharing, seats)
        self._speculation_version: int | None = None
        self._phase: Loading | Serving = Loading(replica, self.core.settings)
        self._instrumentation = Instrumentation(config, replica, self.metrics)
        self._samples = SampleBuffer(
            config.training_buffer_tokens, config.training_cache_salt or "", replica
        )
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
        full = max(1, min(config.max_num_seqs, round(config.target_requests_per_replica)))
        loaded = await asyncio.to_thread(
            self.core.load, self._models, self.text.tokenizer, full, self._instrumentation
        )
        self.serve(loaded.start_thread())
        logger.info("ready: %s with %s", config.served_model_name, self.core.plan)

    def serve(self, engine: RunningEngine) -> None:
        """Begin to serve with an engine that has been started."""
        load = ReplicaLoad(self.config.target_requests_per_replica, time.monotonic)
        self._phase = Serving(self._replica, engine, self._models, load)

    @property
    def is_ready(self) -> bool:
        """Return whether requests are admitted now."""
        return not self._phase.why_not_ready

    @property
    def failure(self) -> TargetFailedError | None:
        """Why the engine is lost; None while it is not."""
        return self._phase.failure

    def running_engine(self) -> RunningEngine:
        """Return the engine. Raises NotReadyError while the models load."""
        return self._phase.running_engine()

    def load_in_requests(self) -> float:
        """Return the load for the autoscaler, which asks every few seconds. Does not block.

        Each choice of a request counts as one.
        """
        return self._phase.load_in_requests()

    async def check_models(self) -> None:
        """Restart a worker whose loss no step noticed. Raises TargetFailedError if that failed."""
        await self._phase.check_models()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests and wait until the open ones have ended, at most `timeout_s`.

        timeout_s: None for drain_timeout_s; 0 ends them now.
        """
        await self._phase.drain(self.config.drain_timeout_s if timeout_s is None else timeout_s)

    async def close(self) -> None:
        """End the engine and the models; open streams end with an error."""
        await self._phase.close()
        await asyncio.to_thread(self._models.close)
        await asyncio.to_thread(self._instrumentation.close)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        return self.core.plan.engine.max_model_len

    @property
    def kv_cache_tokens(self) -> int:
        """Number of tokens whose KV fits into the cache."""
        engine = self.core.plan.engine
        return engine.num_blocks * engine.block_size

    async def apply_speculation(self, state: SpeculationState) -> None:
        """Put the settings of a state in force; the next step goes by them when this returns."""
        await self._phase.apply_control(state.in_force)
        self._speculation_version = state.version

    def report(self) -> ReplicaReport:
        """Return this replica's state for the ControlPlane."""
        return self._phase.report(self._speculation_version)

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

    async def generate(
        self,
        call: GenerateRequest,
        *,
        deadline: Deadline | None = None,
        is_admitted: bool = False,
        on_admitted: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Start a request. It and its outputs raise the engine's errors, and `deadline.error`.

        is_admitted: it continues an admitted request, so that neither a drain nor a full queue
        rejects it, and it does not expire in the queue. on_admitted: called when the engine has
        accepted it, while the first output is awaited.
        """
        request_id = call.request_id or secrets.token_hex(8)
        current_request_id.set(request_id)
        measured = self._instrumentation.begin(request_id, call)
        async with deadline.enforce() if deadline else nullcontext():
            try:
                thread = self._thread_for(call.model)
                if not is_admitted:
                    thread.require_room(call.params.n)
                timeout_s = math.inf if is_admitted else self.config.queue_timeout_s
                request = await self._prepare(request_id, call, timeout_s)
            except BaseException as error:
                measured.on_refused(error)
                raise
        measured.on_queued(request)
        caller = current_caller.get()
        outputs = thread.generate(
            request, measured, caller, deadline, is_admitted=is_admitted, on_admitted=on_admitted
        )
        if self._samples.accepts(call) and request.adapter_id == BASE_MODEL:
            temperature = call.params.resolved(self._model.sampling_defaults).temperature
            outputs = self._samples.recording(request, temperature, outputs)
        return Generation(request_id, request.seed, outputs)

    async def _prepare(
        self, request_id: str, call: GenerateRequest, queue_timeout_s: float
    ) -> EngineRequest:
        """Return an admitted request with token ids, compiled grammar and seed."""
        self.metrics.num_requests += call.params.n
        return EngineRequest.of(
            call,
            await self.text.encode(call.prompt),
            self.new_seed() if call.params.seed is None else call.params.seed,
            await self.text.compile(call.params.structured_output, current_caller.get()),
            adapter_id=self._adapter_of(call.model),
            request_id=request_id,
            prediction=await self._predicted_text(call.params.speculation.prediction),
            queue_deadline_s=time.monotonic() + queue_timeout_s,
        )

    def abort(self, order: AbortOrder) -> None:
        """End the requests that an order applies to; an unknown id is no error."""
        self._phase.abort(order)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache unless requests run or wait; return whether it was emptied.

        Raises NotReadyError.
        """
        return await self.running_engine().thread.clear_prefix_cache()

    async def _predicted_text(self, text: str | None) -> PredictedText | None:
        """Return predicted output, without tokens that cannot fit the context."""
        if text is None:
            return None
        token_ids = await self.text.encode(text, add_special_tokens=False)
        return await asyncio.to_thread(PredictedText, token_ids[: self.max_model_len])

    def new_seed(self) -> int:
        """Return the seed of a request without one; see `ServeConfig.seed`."""
        return self._seeds.getrandbits(63)

    def check_admission(self, model: str, num_choices: int) -> None:
        """Check whether a request of `num_choices` would be admitted now.

        Raises UnknownModelError, NotReadyError, OverloadedError, and InvalidValueError for more
        choices than ever fit.
        """
        self._thread_for(model).require_room(num_choices)

    def _thread_for(self, model: str) -> EngineThread:
        """Return the engine for requests of a model. Raises UnknownModelError, NotReadyError."""
        self._check_model(model)
        return self.running_engine().thread

    def max_tokens(self, params: SamplingParams) -> int:
        """Return the most tokens of a choice, after the shortest possible prompt."""
        default = self._model.sampling_defaults.max_tokens
        asked = default if params.max_tokens is None else params.max_tokens
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
        """Return the served model, or an adapter of it, and its main settings."""
        is_adapter = self._adapter_of(model) != BASE_MODEL
        speculation, name = self.config.speculative_config, self.config.served_model_name
        return ModelInfo(
            model=model if is_adapter else name,
            parent=name if is_adapter else "",
            architecture=self._model.architecture,
            dtype=self.config.resolved_dtype,
            vocab_size=self._model.vocab_size,
            max_model_len=self.max_model_len,
            tensor_parallel_size=self.config.tensor_parallel_size,
            speculation_method=speculation.method if speculation else None,
            num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
            version=_VERSION,
            sampling_defaults=self._model.sampling_defaults,
            speculation_methods=speculation.methods if speculation else (),
        )

    def model_infos(self) -> tuple[ModelInfo, ...]:
        """Return the served model, then its adapters by name."""
        return tuple(map(self.model_info, ("", *sorted(self.adapter_names))))

    @property
    def adapter_names(self) -> Collection[str]:
        """Names of the adapters that requests may use now."""
        adapters = self.core.adapters
        return () if adapters is None else adapters.ids.keys()

    def _adapter_of(self, model: str) -> int:
        """Return the adapter that a request names; BASE_MODEL for the model itself.

        Raises UnknownModelError.
        """
        if model in ("", self.config.served_model_name):
            return BASE_MODEL
        adapter_id = self.core.adapter_id(model)
        if adapter_id == BASE_MODEL and model != DEFAULT_MODEL:
            raise UnknownModelError(model, self.config.served_model_name, *self.adapter_names)
        return adapter_id

    def _check_model(self, model: str) -> None:
        self._adapter_of(model)
