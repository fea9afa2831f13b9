"""The engine with its models, settings and metrics: the core of a replica and of `specdec.LLM`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from specdec.config.llm import LLMConfig
from specdec.engine.engine import Engine
from specdec.engine.engine_profiler import EngineProfiler
from specdec.engine.engine_thread import EngineThread
from specdec.engine.head_probe import HeadProbe, likely_causes
from specdec.engine.loaded.adapters import Adapters
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.metrics.metrics import Metrics, StepRecorder
from specdec.engine.models.model_resolution import Models, with_resolved_dtype
from specdec.engine.orders.adapter_control import AdapterControl
from specdec.engine.orders.drafter_control import DrafterControl
from specdec.models.resolve import portable_name
from specdec.speculation.policy.factory import MeasureEngine
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposer, load_corpora
from specdec.speculation.proposers.draft_adapters import AdapterDrafter
from specdec.text.tokenizer import Tokenizer
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.control import SpeculationControl
from specdec.types.drafters import (
    CONFIGURED_VERSION,
    DrafterOrder,
    DrafterReport,
    HeadFile,
)
from specdec.types.errors import BadLogitsError, InvalidValueError, NotReadyError
from specdec.types.messages import BASE_MODEL
from specdec.types.ranks import Target
from specdec.types.reports.stats import Counts, EngineStats
from specdec.types.sampling.sampling_params import SamplingDefaults

Config = TypeVar("Config", bound=LLMConfig)
Measured = TypeVar("Measured")

logger = logging.getLogger(__name__)


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


class EngineCore(Generic[Config]):
    """An engine with its configuration, plan, models, metrics and thread.

    Construction plans the limits before any model is loaded, `load` makes the engine of the loaded
    models, and `start_thread` runs it for an event loop.

    control: the speculation settings in force, which the engine adopts between two steps; None
    where nothing can draft.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        target_bytes: int,
        draft_bytes: int | None = None,
        *,
        in_process: bool = False,
    ) -> None:
        """Plan the memory; the sizes are those of `memory_plan`, whose errors it raises."""
        self.config = with_resolved_dtype(config, models)
        self.model = models.target
        if config.generation_config == "none":
            self.model = replace(models.target, sampling_defaults=SamplingDefaults())
        self.plan = memory_plan(
            self.config, models, target_bytes, draft_bytes, in_process=in_process
        )
        self.metrics = Metrics()
        self._head = models.head
        self._head_probe_acceptance: float | None = None
        self._drafters: DrafterControl | None = None
        limits = self.plan.engine.adapters
        self.adapters = None if limits is None else Adapters(limits.max_loaded)
        self.adapter_control: AdapterControl | None = None
        self.thread: EngineThread | None = None
        speculation = config.speculative_config
        self.control = speculation.control if speculation else None
        self._executor: Executor | None = None
        self._engine: Engine | None = None
        self._final_stats: EngineStats | None = None

    def load(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        full_batch: int,
        recorder: StepRecorder | None = None,
    ) -> None:
        """Measure the models and make the engine, which takes seconds. From any thread.

        full_batch: the largest intended number of decoding requests. recorder: None for `metrics`.
        """
        policy = None
        drafters = self._drafter_versions()
        self._probe_head(executor, tokenizer)
        if self.control is not None:
            profiler = EngineProfiler(self.plan.engine, self.model, tokenizer)
            policy = executor.make_policy(self.control, full_batch, profiler.measure, profiler.text)
        proposer = executor.make_proposer()
        load_corpora(proposer, partial(tokenizer.encode, add_special_tokens=False))
        self._engine = Engine(
            self.plan.engine,
            self.model,
            executor.target,
            tokenizer,
            proposer,
            policy,
            drafters=drafters,
            adapters=self.adapters,
            recorder=recorder or self.metrics,
        )
        self._executor = executor
        self._load_adapters(executor)
        if drafters is not None and self._head is not None:
            self._drafters = DrafterControl(self._engine, drafters, self._head)

    def _load_adapters(self, executor: Executor) -> None:
        """Load the adapters of the configuration. Raises what `AdapterControl.execute` raises."""
        limits, orders = self.plan.engine.adapters, self.config.startup_adapters
        if limits is None or self.adapters is None:
            return
        self.adapters.drafter = executor.adapter_drafter
        control = AdapterControl(
            self.engine, self.adapters, limits, self.config.request_name, self.plan.draft
        )
        self.adapter_control = control
        executor.measure(lambda _: control.load_all(orders))

    def _drafter_versions(self) -> DrafterVersions | None:
        """Return the versions of the draft head, the configured one alone; None without a head."""
        config, head = self.config.head, self._head
        if config is None or head is None:
            return None
        name = config.model or self.config.model
        file = HeadFile(CONFIGURED_VERSION, portable_name(name), str(head.directory))
        return DrafterVersions(file)

    def _probe_head(self, executor: Executor, tokenizer: Tokenizer) -> None:
        """Measure whether the drafts of a head fit the target; log a warning where they do not."""
        if self._head is None:
            return
        probe = HeadProbe(self.plan.engine, tokenizer, self.model.eos_token_ids)
        try:
            result = executor.measure(probe.measure)
        except BadLogitsError as error:
            logger.warning("draft head: not probed: the target cannot continue a text: %s", error)
            return
        if result is None:
            return
        self._head_probe_acceptance = result.acceptance
        if result.is_sound:
            logger.info("draft head: %s", result.describe())
            return
        causes = likely_causes(result, self._head, self.config.model)
        logger.warning(
            "draft head: %s%s; %s. The head was %s",
            result.describe(),
            ", which is low" if result.is_low else "",
            "; ".join(causes)
            or "it may belong to another target, or its layers, norms or rope "
            "differ from what its files were taken for",
            self._head.describe()[0],
        )

    def start_thread(self) -> EngineThread:
        """Run the engine for the running event loop, in place of an earlier one."""
        engine, executor = self.engine, self._executor
        assert executor is not None, "the models are not loaded"
        if self.control is not None:  # it may have changed while the models were measured
            engine.set_speculation(self.control)
        self.thread = EngineThread(
            engine, executor.restart_target, executor.mark_target_lost, executor.forgive_losses
        )
        return self.thread

    @property
    def engine(self) -> Engine:
        """The engine. Raises NotReadyError after the end."""
        if self._engine is None:
            raise NotReadyError("it has been shut down")
        return self._engine

    def set_control(self, control: SpeculationControl) -> None:
        """Put settings in force from the next step on, without waiting for it.

        Raises NotReadyError after the end.
        """
        engine, self.control = self.engine, control
        if self.thread is None:
            engine.set_speculation(control)
        else:
            self.thread.post(lambda: engine.set_speculation(control))

    async def apply_control(self, control: SpeculationControl) -> None:
        """Put settings in force; the next step goes by them when this returns.

        Without a drafter nothing changes; before the thread starts they wait for it.
        """
        if self.control is None:
            return
        self.control = control
        if self.thread is not None:
            await self.thread.set_speculation(control)

    async def order_drafter(self, order: DrafterOrder, replica_id: str = "") -> DrafterReport:
        """Execute an order for the versions of the draft head; see `DrafterControl.execute`.

        Raises NotReadyError before the engine's thread has started, and for a change while the
        target restarts: a version that is loaded meanwhile would count as the cause of the loss.
        """
        if self.thread is None:
            raise NotReadyError("the model is still loading")
        if order.has_change and self.thread.is_recovering:
            raise NotReadyError("the target restarts; send the order again once it has")
        if self._drafters is None:
            limit = "a service with a draft head on the target's ranks; see docs/methods.md"
            raise InvalidValueError("drafter", "none", limit)
        return await self._drafters.execute(order, self.thread, replica_id)

    async def order_adapter(self, order: AdapterOrder, replica_id: str = "") -> AdapterReport:
        """Execute an order for the adapters; see `AdapterControl.execute`.

        Raises NotReadyError before the engine's thread has started, and for a change while the
        target restarts.
        """
        if self.thread is None:
            raise NotReadyError("the model is still loading")
        if order.name and self.thread.is_recovering:
            raise NotReadyError("the target restarts; send the order again once it has")
        return await self.require_adapters().execute(order, self.thread, replica_id)

    def require_adapters(self) -> AdapterControl:
        """Return the control of adapters. Raises InvalidValueError where none can be loaded."""
        if self.adapter_control is None:
            limit = "True for adapters to be loaded; start the service with --enable-lora"
            raise InvalidValueError("enable_lora", False, limit)
        return self.adapter_control

    def adapter_id(self, name: str) -> int:
        """Return the id of a named adapter, BASE_MODEL for another name. From any thread."""
        return BASE_MODEL if self.adapters is None else self.adapters.ids.get(name, BASE_MODEL)

    @property
    def last_stats(self) -> EngineStats:
        """The engine's latest stats, with its own counters alone. Does not block."""
        thread, engine = self.thread, self._engine  # `stop` drops them after it sets _final_stats
        if self._final_stats is not None:
            return self._final_stats
        if thread is not None:
            return thread.last_stats
        assert engine is not None, "neither an engine nor its final stats"
        return engine.stats()

    def stats(self) -> EngineStats:
        """Return the latest stats, with all counters of engine, requests and models."""
        if self._final_stats is not None:
            return self._final_stats
        stats, executor = self.last_stats, self._executor
        models = executor.counts if executor is not None else Counts()
        return replace(
            stats,
            mode=self.control.mode if self.control else "",
            head_probe_acceptance=self._head_probe_acceptance,
            counts=Counts.sum((stats.counts, self.metrics.counts, models)),
        )

    def stop(self) -> None:
        """Stop the thread and drop the engine, but keep its stats; the models stay loaded."""
        if self.thread is not None:
            self.thread.stop()
        self._final_stats = self.stats()
        self.thread = self._engine = self._drafters = self.adapter_control = None
