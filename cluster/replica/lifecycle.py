"""The states of a replica: while its models load, and once they are warm."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime

import ray

from cluster.replica.memory import MemoryMeter
from cluster.replica.ray_executor import ReplicaExecutor
from cluster.replica.report import ReplicaLoad, decision_news
from specdec.engine.lifecycle import RunningEngine, SpeculationSettings
from specdec.types.control import SpeculationControl
from specdec.types.errors import NotReadyError, TargetFailedError
from specdec.types.reports.fleet import DRAINING, LOADING, ReplicaReport


class Loading:
    """A replica whose models load: it refuses requests, and has none to wait for."""

    why_not_ready = LOADING
    failure: TargetFailedError | None = None

    def __init__(self, replica: str, settings: SpeculationSettings) -> None:
        """Store the settings of the engine that is being loaded."""
        self._replica = replica
        self._settings = settings

    def running_engine(self) -> RunningEngine:
        """Raise NotReadyError."""
        raise NotReadyError("the model is still loading")

    def load_in_requests(self) -> float:
        """Return the load of no request."""
        return 0.0

    async def check_models(self) -> None:
        """Do nothing: loading raises what is wrong."""

    async def apply_control(self, control: SpeculationControl) -> None:
        """Put settings in force when the engine starts. Without a drafter nothing changes."""
        if self._settings.control is not None:
            self._settings.control = control

    def report(self, speculation_version: int | None) -> ReplicaReport:
        """Return the state for the ControlPlane."""
        del speculation_version  # no settings are in force yet
        return ReplicaReport(self._replica, is_ready=False, reason=self.why_not_ready)

    async def drain(self, timeout_s: float) -> None:
        """Wait for open requests: there are none."""

    async def close(self) -> None:
        """End the engine: there is none."""


class Serving:
    """A replica whose engine runs, restarts of its models included."""

    def __init__(
        self, replica: str, engine: RunningEngine, models: ReplicaExecutor, load: ReplicaLoad
    ) -> None:
        self._replica = replica
        self._engine = engine
        self._thread = engine.thread
        self._models = models
        self._load = load
        self._memory = MemoryMeter()
        self._address = str(ray.util.get_node_ip_address())

    @property
    def why_not_ready(self) -> str:
        """Empty while the replica is ready."""
        thread = self._thread
        if thread.failure is not None:
            return "the model stopped answering"
        if thread.is_recovering:
            return "the model is starting again"
        return DRAINING if thread.is_draining else ""

    @property
    def failure(self) -> TargetFailedError | None:
        """Why the engine is lost; None while it is not."""
        return self._thread.failure

    def running_engine(self) -> RunningEngine:
        """Return the engine."""
        return self._engine

    def load_in_requests(self) -> float:
        """Return the load for the autoscaler. Does not block."""
        stats = self._thread.last_stats
        curve, target = stats.service_curve, self._load.target_requests
        return self._load.requests(
            self._thread.num_sequences,
            stats.counts.num_generated_tokens,
            curve.batch_tokens_per_s(target) if curve else None,
        )

    async def check_models(self) -> None:
        """Restart a worker whose loss no step noticed. Raises TargetFailedError if that failed."""
        if self._thread.failure is not None:
            raise self._thread.failure
        if not self._thread.is_recovering:
            await self._models.check(self._thread)

    async def apply_control(self, control: SpeculationControl) -> None:
        """Put settings in force; the next step goes by them when this returns."""
        with suppress(TargetFailedError, NotReadyError):  # ended; the next Router asks again
            await self._engine.apply_control(control)

    def report(self, speculation_version: int | None) -> ReplicaReport:
        """Return the state for the ControlPlane. speculation_version: of the settings in force."""
        reason, stats = self.why_not_ready, self._engine.stats()
        return ReplicaReport(
            self._replica,
            is_ready=not reason,
            reason=reason,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_decoding=stats.num_decoding,
            kv_cache_usage=stats.kv_cache_usage,
            is_speculation_on=stats.is_speculation_on and self._models.can_draft,
            speculation_version=speculation_version,
            num_chosen_tokens=stats.num_chosen_tokens,
            decision_reason=stats.chosen.reason.value if stats.chosen else "",
            decision_changes=decision_news(stats, time.monotonic(), datetime.now(UTC)),
            estimated_speedup=stats.estimated_speedup,
            estimated_tokens_per_s=stats.estimated_tokens_per_s,
            profile_error=stats.profile_error,
            head_probe_acceptance=stats.head_probe_acceptance,
            drafter_version=stats.drafter_version,
            service_curve=stats.service_curve,
            mode=stats.mode,
            is_draft_worker_up=self._models.is_draft_up,
            memory=self._memory.read(self._models.places_on(self._address)),
            block_size=stats.block_size,
            num_kv_blocks=stats.num_kv_blocks,
            num_snapshots=stats.num_snapshots,
            state_bytes=stats.state_bytes,
            max_loras=stats.max_loras,
            adapters_in_use=stats.adapters_in_use,
            at_s=stats.at_s,
            counts=stats.counts,
        )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until the open ones have ended, at most `timeout_s`."""
        await self._thread.drain(timeout_s)

    async def close(self) -> None:
        """End the engine; open streams end with an error."""
        await self._thread.close()
