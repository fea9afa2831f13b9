"""The real HTTP application and ControlPlane, with scripted replicas.

The replicas' counters grow with the wall clock while they have load, so that charts change.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from cluster.api.base.authentication import AdminAccess
from cluster.api.http_app import make_app
from cluster.control.client import ControlClient
from cluster.control.overrides import OverrideLimits
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from cluster.replica.preprocessor import Preprocessor
from cluster.replica.router import Generation
from specdec.client import Counts, DecisionNews, HistogramCounts, ReplicaReport, SpeculationState
from specdec.engine.metrics.metrics import FIRST_TOKEN, INTER_TOKEN
from specdec.models.config.model_config import ModelConfig
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.types.control import SpeculationControl
from specdec.types.errors import InvalidValueError
from specdec.types.reports.fleet import MemoryUse
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from tests.cluster.admin_service import LocalHandle, operator_service

CONFIGURED = SpeculationControl("auto", threshold=32, num_speculative_tokens=5)
GIB = 2**30
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ANSWER = "The river begins as a thread of cold water under the stones, and it carries boats. " * 4


STEPS_PER_S = 12.0
"""Steps of a replica that decodes."""

ACCEPTANCE = (0.85, 0.8, 0.75, 0.7, 0.65)
"""Acceptance of a draft token by position, if those before it were accepted."""

MEMORY = MemoryUse(3 * GIB, 24 * GIB, 15 * GIB, 80 * GIB, 62 * GIB)

LATENCY_SHARES = (0.6, 0.3, 0.1)
"""Shares of the observations in a bucket and the two after it."""


@dataclass
class ScriptedReplica:
    """A replica that applies the state of the ControlPlane, at a load that the test sets.

    drafted_share: of the steps while speculation is on, and speedup: of all steps; a share below 1
    also has decisions that change in each report. failed: calls by gRPC status code. is_stuck:
    whether it ignores new settings.
    """

    replica_id: str
    requests_per_s: float = 0.0
    num_decoding: int = 0
    drafted_share: float = 1.0
    speedup: float = 1.9
    is_ready: bool = True
    reason_not_ready: str = "the model is starting again"
    is_draft_worker_up: bool | None = True
    num_restarts: int = 0
    memory: MemoryUse | None = MEMORY
    failed: Counter[str] = field(default_factory=Counter)
    state: SpeculationState | None = None
    changes: list[DecisionNews] = field(default_factory=list)
    counted_at_s: float = field(default_factory=time.monotonic)
    counted: Counter[Any] = field(default_factory=Counter)  # not rounded
    is_flipped: bool = False
    is_stuck: bool = False

    async def apply(self, state: SpeculationState) -> None:
        if not self.is_stuck:
            self.state = state

    @property
    def control(self) -> SpeculationControl:
        return CONFIGURED if self.state is None else self.state.in_force

    @property
    def is_on(self) -> bool:
        control = self.control
        is_within = control.mode == "auto" and self.num_decoding <= control.threshold
        return control.mode == "on" or is_within

    @property
    def num_chosen_tokens(self) -> int:
        return self.control.num_speculative_tokens if self.is_on and not self.is_flipped else 0

    @property
    def reason(self) -> str:
        control = self.control
        if control.is_by_rule:
            return "rule"
        if control.mode != "auto":
            return "operator"
        if self.num_decoding > control.threshold:
            return "threshold"
        return "probe" if self.is_flipped else "goodput"

    def report(self) -> ReplicaReport:
        self._count()
        self._decide()
        return ReplicaReport(
            self.replica_id,
            is_ready=self.is_ready,
            reason="" if self.is_ready else self.reason_not_ready,
            num_running=self.num_decoding + (self.num_decoding > 0),
            num_waiting=max(0, self.num_decoding - 8),
            num_decoding=self.num_decoding,
            kv_cache_usage=min(1.0, self.num_decoding / 40),
            is_speculation_on=self.num_chosen_tokens > 0,
            speculation_version=None if self.state is None else self.state.version,
            num_chosen_tokens=self.num_chosen_tokens,
            decision_reason=self.reason,
            decision_changes=tuple(self.changes[-32:]),
            counts=self._counts(),
            is_draft_worker_up=self.is_draft_worker_up,
            memory=self.memory,
        )

    def _count(self) -> None:
        """Count what happened since the last report."""
        now_s = time.monotonic()
        seconds, self.counted_at_s = now_s - self.counted_at_s, now_s
        counted = self.counted
        counted["requests"] += self.requests_per_s * seconds
        if not self.num_decoding:
            return
        share = self.drafted_share if self.is_on else 0.0
        steps = STEPS_PER_S * seconds
        counted["steps"] += steps
        counted["drafted steps"] += steps * share
        counted["spent"] += seconds
        counted["undrafted"] += seconds * (self.speedup if share else 1.0)
        counted["tokens"] += steps * self.num_decoding
        reached = steps * self.num_decoding * share
        counted["drafts"] += reached
        for position in range(self.control.num_speculative_tokens):
            counted["drafted", position] += steps * self.num_decoding * share
            counted["reached", position] += reached
            reached *= ACCEPTANCE[position]
            counted["accepted", position] += reached
            counted["tokens"] += reached

    def _counts(self) -> Counts:
        counted = {name: int(value) for name, value in self.counted.items()}

        def by_position(kind: str) -> tuple[int, ...]:
            return tuple(counted.get((kind, index), 0) for index in range(len(ACCEPTANCE)))

        drafted, accepted = by_position("drafted"), by_position("accepted")
        return Counts(
            num_requests=counted["requests"],
            num_generated_tokens=counted.get("tokens", 0),
            num_steps=counted.get("steps", 0),
            num_drafted_steps=counted.get("drafted steps", 0),
            spent_s=self.counted["spent"],
            undrafted_s=self.counted["undrafted"],
            speculation=SpeculationStats(counted.get("drafts", 0), sum(drafted), sum(accepted)),
            drafted_by_position=drafted,
            reached_by_position=by_position("reached"),
            accepted_by_position=accepted,
            histograms={
                FIRST_TOKEN: self._histogram(self.counted["requests"], first=4),
                INTER_TOKEN: self._histogram(self.counted["steps"] * 10, first=2),
            },
            failed=dict(self.failed),
            num_target_restarts=self.num_restarts,
        )

    def _histogram(self, number: float, first: int) -> HistogramCounts:
        shares = [0.0] * (len(BOUNDS_S) + 1)
        shares[first : first + 3] = LATENCY_SHARES
        return HistogramCounts(BOUNDS_S, tuple(round(number * share) for share in shares), 0.0)

    def _decide(self) -> None:
        flips = self.reason in ("goodput", "probe") and self.drafted_share < 1
        self.is_flipped = flips and not self.is_flipped
        last = self.changes[-1] if self.changes else None
        if last is None or (last.num_draft_tokens, last.reason) != (
            self.num_chosen_tokens,
            self.reason,
        ):
            at = datetime.now(UTC)
            self.changes.append(
                DecisionNews(at, self.num_chosen_tokens, self.reason, self.num_decoding)
            )


class ScriptedRouter:
    """The part of a Router that the HTTP application uses. It outputs a fixed text."""

    is_ready = True
    failure = None

    def __init__(self, model: Path) -> None:
        self.config = SimpleNamespace(served_model_name="tiny-llama", request_timeout_s=3600.0)
        self.text = Preprocessor(model, ModelConfig.from_directory(model))
        self.calls: list[Any] = []
        self.num_aborted = 0

    async def generate(self, call: Any, deadline: Any) -> Generation:
        self.calls.append(call)
        if call.params.max_tokens > 1000:
            raise InvalidValueError("max_tokens", call.params.max_tokens, "at most 1000")
        return Generation(call.request_id, 42, self._outputs(call))

    async def _outputs(self, call: Any) -> AsyncGenerator[EngineOutput, None]:
        tokenizer = self.text.tokenizer
        ids = tokenizer.encode(ANSWER, add_special_tokens=False)[: call.params.max_tokens]
        length = 0 if call.params.speculation.enabled is False else 3
        detokenizer = IncrementalDetokenizer(tokenizer)
        stats, num_output, step = SpeculationStats(), 0, 0
        try:
            while num_output < len(ids):
                await asyncio.sleep(0.02)
                accepted = min(step % (length + 1), len(ids) - num_output - 1)
                step, num_output = step + 1, num_output + accepted + 1
                stats = stats.after_draft(length, accepted)
                is_last = num_output == len(ids)
                new = tuple(ids[num_output - accepted - 1 : num_output])
                for token_id in new:
                    detokenizer.append(token_id)
                yield EngineOutput(
                    "r1",
                    new,
                    detokenizer.flush() if is_last else detokenizer.take(),
                    FinishReason.LENGTH if is_last else None,
                    5,
                    num_output,
                    stats,
                    is_drafted=(True,) * accepted + (False,),
                    text_lengths=detokenizer.lengths,
                    is_last=is_last,
                )
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += 1
            raise


@dataclass(frozen=True)
class RunningFleet:
    """The application at `url`. Calls to `plane` go through `run`, onto its event loop."""

    url: str
    plane: ControlPlane
    replicas: list[ScriptedReplica]
    router: ScriptedRouter
    loop: asyncio.AbstractEventLoop
    server: uvicorn.Server

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def drop_streams(self) -> None:
        """Close every connection, as a network that fails."""
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()


@contextmanager
def running_fleet(
    model: Path,
    state_dir: Path,
    port: int,
    num_replicas: int = 2,
    token: str | None = None,
    configured: SpeculationControl | None = CONFIGURED,
) -> Iterator[RunningFleet]:
    """Serve on an event loop in a thread until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    fleet = run(_start(loop, model, state_dir, port, num_replicas, token, configured))
    reports = asyncio.run_coroutine_threadsafe(_report_periodically(fleet), loop)
    try:
        yield fleet
    finally:
        reports.cancel()
        fleet.server.should_exit = True
        time.sleep(0.3)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _start(
    loop: asyncio.AbstractEventLoop,
    model: Path,
    state_dir: Path,
    port: int,
    num_replicas: int,
    token: str | None,
    configured: SpeculationControl | None,
) -> RunningFleet:
    limits = OverrideLimits()
    plane = ControlPlane(configured, ControlStore(state_dir, "tiny-llama"), limits=limits)
    replicas = [ScriptedReplica(f"replica-{index}") for index in range(num_replicas)]
    link = ControlClient(LocalHandle(plane), replicas[0].apply, replicas[0].report)
    router = ScriptedRouter(model)
    operators = operator_service(link, AdminAccess(token))
    app = make_app(lambda: router, lambda: operators)  # type: ignore[arg-type,return-value]
    config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    loop.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    return RunningFleet(f"http://127.0.0.1:{port}", plane, replicas, router, loop, server)


async def _report_periodically(fleet: RunningFleet) -> None:
    """Apply the state to each replica and report its statistics, four times per second."""
    while True:
        state = await fleet.plane.speculation()
        for replica in fleet.replicas:
            await replica.apply(state)
            await fleet.plane.report(replica.report(), uptime_s=time.monotonic() % 1e5)
        await asyncio.sleep(0.25)
