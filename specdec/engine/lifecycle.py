"""The states of an engine: with loaded models, with a running thread, and stopped."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from specdec.engine.engine import Engine
from specdec.engine.engine_thread import EngineThread
from specdec.engine.executor import Executor
from specdec.engine.metrics.metrics import Metrics
from specdec.engine.orders.adapter_control import AdapterControl, require_adapters
from specdec.engine.orders.drafter_control import DrafterControl
from specdec.sequences.sequence import EngineRequest
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.control import SpeculationControl
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.reports.stats import Counts, EngineStats


@dataclass
class SpeculationSettings:
    """The speculation settings in force, which the engine adopts between two steps.

    control: None where nothing can draft.
    """

    control: SpeculationControl | None


@dataclass(frozen=True, eq=False)
class LoadedEngine:
    """An engine with its models, before its thread runs.

    drafters: None without a draft head. adapters: None where none can be loaded.
    head_probe_acceptance: None where it was not measured.
    """

    engine: Engine
    executor: Executor
    metrics: Metrics
    settings: SpeculationSettings
    drafters: DrafterControl | None = None
    adapters: AdapterControl | None = None
    head_probe_acceptance: float | None = None

    def start_thread(self) -> RunningEngine:
        """Run the engine for the running event loop, in place of an earlier thread."""
        control, executor = self.settings.control, self.executor
        if control is not None:  # it may have changed while the models were measured
            self.engine.set_speculation(control)
        thread = EngineThread(
            self.engine,
            executor.restart_target,
            executor.mark_target_lost,
            executor.forgive_losses,
        )
        return RunningEngine(self, thread)

    def set_control(self, control: SpeculationControl) -> None:
        """Put settings in force."""
        self.settings.control = control
        self.engine.set_speculation(control)

    def check(self, request: EngineRequest) -> None:
        """Raise what `Engine.add` would raise."""
        self.engine.check(request)

    def abort(self, request_id: str) -> None:
        """End the requests with this id: none runs yet."""

    @property
    def last_stats(self) -> EngineStats:
        """The engine's stats, with its own counters alone."""
        return self.engine.stats()

    def stats(self) -> EngineStats:
        """Return the stats, with all counters of engine, requests and models."""
        return self.with_all_counters(self.last_stats)

    def with_all_counters(self, stats: EngineStats) -> EngineStats:
        """Return an engine's stats with its sizes, and with those of requests and models."""
        control, config = self.settings.control, self.engine.config
        num_states = stats.num_running + (stats.num_snapshots or 0)
        return replace(
            stats,
            mode=control.mode if control else "",
            head_probe_acceptance=self.head_probe_acceptance,
            block_size=config.block_size,
            num_kv_blocks=config.num_blocks,
            state_bytes=num_states * config.state_bytes if config.state_bytes else None,
            max_loras=config.adapters.max_loras if config.adapters else 0,
            at_s=time.time(),
            counts=Counts.sum((stats.counts, self.metrics.counts, self.executor.counts)),
        )

    def on_running_loop(self) -> RunningEngine:
        """Return the engine with a thread for the running event loop."""
        return self.start_thread()

    def stop(self) -> StoppedEngine:
        """Drop the engine, but keep its stats; the models stay loaded."""
        return StoppedEngine(self.stats())


@dataclass(frozen=True, eq=False)
class RunningEngine:
    """A loaded engine whose thread runs."""

    loaded: LoadedEngine
    thread: EngineThread

    def set_control(self, control: SpeculationControl) -> None:
        """Put settings in force from the next step on, without waiting for it."""
        self.loaded.settings.control = control
        self.thread.post(lambda: self.loaded.engine.set_speculation(control))

    async def apply_control(self, control: SpeculationControl) -> None:
        """Put settings in force; the next step goes by them when this returns.

        Without a drafter nothing changes.
        """
        if self.loaded.settings.control is None:
            return
        self.loaded.settings.control = control
        await self.thread.set_speculation(control)

    async def order_drafter(self, order: DrafterOrder, replica_id: str = "") -> DrafterReport:
        """Execute an order for the versions of the draft head; see `DrafterControl.execute`.

        Raises NotReadyError for a change while the target restarts: a version that is loaded
        meanwhile would count as the cause of the loss.
        """
        self._check_change(has_change=order.has_change)
        if self.loaded.drafters is None:
            limit = "a service with a draft head on the target's ranks; see docs/methods.md"
            raise InvalidValueError("drafter", "none", limit)
        return await self.loaded.drafters.execute(order, self.thread, replica_id)

    async def order_adapter(self, order: AdapterOrder, replica_id: str = "") -> AdapterReport:
        """Execute an order for the adapters; see `AdapterControl.execute`.

        Raises NotReadyError for a change while the target restarts.
        """
        self._check_change(has_change=bool(order.name))
        control = require_adapters(self.loaded.adapters)
        return await control.execute(order, self.thread, replica_id)

    def _check_change(self, *, has_change: bool) -> None:
        if has_change and self.thread.is_recovering:
            raise NotReadyError("the target restarts; send the order again once it has")

    def check(self, request: EngineRequest) -> None:
        """Raise what `Engine.add` would raise."""
        self.loaded.engine.check(request)

    def abort(self, request_id: str) -> None:
        """End the requests with this id."""
        self.thread.abort(request_id)

    @property
    def last_stats(self) -> EngineStats:
        """The engine's latest stats, with its own counters alone. Does not block."""
        return self.thread.last_stats

    def stats(self) -> EngineStats:
        """Return the latest stats, with all counters of engine, requests and models."""
        return self.loaded.with_all_counters(self.last_stats)

    def on_running_loop(self) -> RunningEngine:
        """Return the engine with a thread for the running event loop: this one, or another.

        Raises the failure of the engine, and NotReadyError where another thread cannot take over.
        """
        if self.thread.event_loop is asyncio.get_running_loop():
            return self
        self._require_replaceable()
        self.thread.stop()
        if self.thread.failure is not None:  # the step in flight was its last
            raise self.thread.failure
        return self.loaded.start_thread()

    def _require_replaceable(self) -> None:
        thread = self.thread
        if thread.failure is not None:
            raise thread.failure
        if thread.is_recovering:
            raise NotReadyError("the models are being started again")
        if thread.num_streams and not thread.event_loop.is_closed():
            raise NotReadyError("another event loop has streams that are open")

    def stop(self) -> StoppedEngine:
        """Stop the thread and drop the engine, but keep its stats; the models stay loaded."""
        self.thread.stop()
        return StoppedEngine(self.stats())


@dataclass(frozen=True)
class StoppedEngine:
    """An engine that has ended, with its last stats."""

    last_stats: EngineStats

    def stats(self) -> EngineStats:
        """Return the last stats."""
        return self.last_stats

    def set_control(self, control: SpeculationControl) -> None:
        """Raise NotReadyError."""
        raise ended()

    def check(self, request: EngineRequest) -> None:
        """Raise NotReadyError."""
        raise ended()

    def abort(self, request_id: str) -> None:
        """End the requests with this id: none runs any more."""

    def on_running_loop(self) -> RunningEngine:
        """Raise NotReadyError."""
        raise ended()

    def stop(self) -> StoppedEngine:
        """Return this: there is nothing left to stop."""
        return self


def ended() -> NotReadyError:
    """Return the error of calls after the end."""
    return NotReadyError("it has been shut down")
