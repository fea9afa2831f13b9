"""Draft workers that several replicas share, as a Ray Serve deployment, and their Routers' seats.

Each replica of the deployment keeps one worker. A Router that starts, or whose worker is lost,
takes a seat at the worker that has the most of them free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util.placement_group import PlacementGroup

from cluster.config.serve_config import ServeConfig
from cluster.control.peers import DRAFT_HOST
from cluster.observability import logs
from cluster.replica.group_specs import draft_spec
from cluster.serve.node_memory import draft_host_bytes, node_shares
from cluster.serve.start_errors import refusing_repeatable
from cluster.workers.group_spec import GroupSpec, log_progress
from cluster.workers.ray.resources import (
    CPUS_PER_DRAFT_HOST,
    FoundByDriver,
    draft_host_bundle,
    draft_host_labels,
)
from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest
from cluster.workers.shared_draft.shared_draft_group import SharedDraftGroup, start_worker
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.memory.shared_draft_memory import seat_bytes, seat_limits
from specdec.engine.models.model_detection import with_detected_models
from specdec.engine.models.model_resolution import (
    ModelDirectories,
    resolve_models,
    with_resolved_dtype,
)
from specdec.speculation.proposers import DraftVocabulary
from specdec.types.errors import DraftFailedError

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_ANSWER_TIMEOUT_S = 15.0
_POLL_S = 0.5
_MAX_ONGOING_REQUESTS = 1000
_HEALTH_CHECK_PERIOD_S = 3.0
_ONLY_BUNDLE = 0


@dataclass(frozen=True)
class HostReport:
    """A host. num_taken: of its seats. num_blocks: of each seat.

    seat_bytes: memory that the plan of a Router may count on; None where all are on one machine,
        whose memory the Router divides.
    """

    host_id: str
    num_taken: int
    num_blocks: int
    seat_bytes: int | None


class DraftHostReplica:
    """Keeps one shared draft worker. Its constructor returns when the worker is warm."""

    _group: SharedDraftGroup | None = None

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Mapping[str, Any], found: FoundByDriver | None
    ) -> None:
        """Start the worker; the arguments are those of RouterReplica."""
        serve_config = ServeConfig.from_mapping(config)
        logs.configure(serve_config.logs)
        context = serve.get_replica_context()
        self._host_id = context.replica_id.unique_id
        placement = ray.util.get_current_placement_group()
        self._seat_bytes: int | None = None
        self._num_blocks = 0
        with refusing_repeatable(found):
            await asyncio.to_thread(self._start, serve_config, placement, context.app_name, found)

    def _start(
        self,
        config: ServeConfig,
        placement: PlacementGroup,
        application: str,
        found: FoundByDriver | None,
    ) -> None:
        num_seats = config.replicas_per_draft_worker
        if found is None:
            config = with_detected_models(config, log_progress)
            directories = resolve_models(config, log_progress)
            models, shares = directories.configs(), node_shares(config, application)
            worker_bytes = draft_host_bytes(config, placement, shares)
            self._seat_bytes = seat_bytes(config, models, worker_bytes, num_seats)
            limits, num_sharing = seat_limits(config, models, self._seat_bytes), shares.draft
        else:
            directories, models = found.directories, found.directories.configs()
            num_sharing = found.num_sharing
            plan = memory_plan(with_resolved_dtype(config, models), models, found.memory_bytes)
            assert plan.draft is not None, "no draft model is configured"
            limits = plan.draft
        self._num_blocks = limits.num_blocks
        config = with_resolved_dtype(config, models)
        vocabulary = _vocabulary(config, directories)
        spec = draft_spec(config, directories, limits, vocabulary, num_sharing)
        self._begin(replace(spec, bundle_index=_ONLY_BUNDLE), num_seats, placement)

    def _begin(self, spec: GroupSpec, num_seats: int, placement: PlacementGroup) -> None:
        group = SharedDraftGroup(partial(start_worker, spec, num_seats, placement))
        group.start()
        self._group = group

    async def report(self) -> HostReport | None:
        """Describe this host; None while it has no worker."""
        if self._group is None:
            return None
        num_taken = await asyncio.to_thread(self._group.num_taken)
        if num_taken is None:
            return None
        return HostReport(self._host_id, num_taken, self._num_blocks, self._seat_bytes)

    async def admit_if_addressed(self, host_id: str, request: SeatRequest) -> Seat | None:
        """Return a seat at this host; None if another one is meant, or there is none."""
        if host_id != self._host_id or self._group is None:
            return None
        return await asyncio.to_thread(self._group.admit, request)

    async def __del__(self) -> None:
        """End the worker; Serve calls this when the replica stops."""
        if self._group is not None:
            await asyncio.to_thread(self._group.close)


def _vocabulary(config: ServeConfig, directories: ModelDirectories) -> DraftVocabulary:
    assert directories.draft is not None, "no draft model was found"
    return DraftVocabulary.between(directories.draft, directories.target, config.model_options)


def draft_hosts(config: ServeConfig, found: FoundByDriver | None) -> serve.Application:
    """Bind the hosts of the draft workers that the replicas of a model share."""
    deployment = serve.deployment(DraftHostReplica).options(
        name=DRAFT_HOST,
        ray_actor_options={"num_cpus": CPUS_PER_DRAFT_HOST},
        placement_group_bundles=[draft_host_bundle(config)],
        placement_group_bundle_label_selector=draft_host_labels(config),
        placement_group_strategy="PACK",
        num_replicas=config.num_shared_draft_workers,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        logging_config={
            "log_level": logs.SERVE_LEVELS[config.log_level],
            "enable_access_log": False,
        },
        graceful_shutdown_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return deployment.bind(config.to_mapping(), found)


class HostSeats:
    """Seats at the hosts of an application; see DraftSeats. Call it from a thread without a loop.

    clock, sleep: in seconds.
    """

    def __init__(
        self,
        hosts: Any,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """hosts: a handle of the deployment."""
        self._hosts = hosts
        self._clock = clock
        self._sleep = sleep

    def take(self, request: SeatRequest, timeout_s: float) -> Seat:
        """See DraftSeats. Workers with the most free seats come first."""
        ends_at_s = self._clock() + timeout_s
        while True:
            for report in self._reports():
                seats = self._answers("admit_if_addressed", Seat, report.host_id, request)
                if seats:
                    return seats[0]
            self._wait(ends_at_s, f"no shared draft worker had a free seat within {timeout_s:g} s")

    def num_blocks(self, timeout_s: float) -> int:
        """See DraftSeats."""
        return min(each.num_blocks for each in self._first_reports(timeout_s))

    def seat_bytes(self, timeout_s: float) -> int | None:
        """Return the memory that a Router's plan may count on; see HostReport."""
        found = [each.seat_bytes for each in self._first_reports(timeout_s)]
        return None if None in found else min(filter(None, found))

    def _first_reports(self, timeout_s: float) -> list[HostReport]:
        ends_at_s = self._clock() + timeout_s
        while not (reports := self._reports()):
            self._wait(ends_at_s, f"no shared draft worker was warm within {timeout_s:g} s")
        return reports

    def _wait(self, ends_at_s: float, reason: str) -> None:
        if self._clock() >= ends_at_s:
            raise DraftFailedError(reason)
        self._sleep(_POLL_S)

    def _reports(self) -> list[HostReport]:
        reports = self._answers("report", HostReport)
        return sorted(reports, key=lambda each: (each.num_taken, each.host_id))

    def _answers(self, method: str, kind: type[AnswerT], *arguments: Any) -> list[AnswerT]:
        """Return the answers of a kind that running hosts give in time."""
        try:
            responses = self._hosts.broadcast(method, *arguments)
            answers = responses.results(timeout_s=_ANSWER_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.debug("no host of a draft worker answers: %s", error)  # one is starting
            return []
        return [each for each in answers if isinstance(each, kind)]
