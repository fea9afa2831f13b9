"""Draft workers that several replicas share, as a Ray Serve deployment.

Each replica of the deployment is one worker, and Serve replaces one that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from cluster.config.serve_config import ServeConfig
from cluster.control.peers import DRAFT_POOL
from cluster.observability import logs
from cluster.replica.group_specs import draft_spec
from cluster.serve.autoscaling import LOAD, scaling
from cluster.serve.node_memory import node_shares
from cluster.serve.start_errors import refusing_repeatable
from cluster.workers.groups.ranks import RANK_ENVIRONMENT
from cluster.workers.ray.resources import (
    CPUS_PER_WORKER,
    LocatedModels,
    gpus_per_rank,
    memory_per_replica,
    shared_draft_bundle,
    shared_draft_labels,
)
from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest
from cluster.workers.shared_draft.pool_seats import WorkerReport
from cluster.workers.shared_draft.seat_memory import seat_of_worker
from cluster.workers.shared_draft.shared_draft_worker import SharedDraftWorker
from specdec.engine.models.model_detection import with_detected_models
from specdec.engine.models.model_resolution import resolve_models, with_resolved_dtype
from specdec.models.resolve import log_progress
from specdec.speculation.proposers import DraftVocabulary

_MAX_ONGOING_REQUESTS = 1000
_HEALTH_CHECK_PERIOD_S = 3.0
_SHUTDOWN_TIMEOUT_S = 5.0
_DRAIN_POLL_S, _NUM_DRAIN_POLLS = 0.1, 40
"""A Router needs up to three looks to leave a worker, of one second each."""


class DraftPoolReplica:
    """A shared draft worker. Its constructor returns when the worker is warm."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Mapping[str, Any], located: LocatedModels | None
    ) -> None:
        """Start the worker; the arguments are those of RouterReplica."""
        serve_config = ServeConfig.from_mapping(config)
        logs.configure(serve_config.logs)
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        own_id = ray.get_runtime_context().get_node_id()
        [node] = [each for each in ray.nodes() if each["NodeID"] == own_id]
        self._node = node["NodeManagerAddress"], int(node["NodeManagerPort"])
        with refusing_repeatable(located):
            await asyncio.to_thread(self._start, serve_config, context.app_name, located)

    def _start(self, config: ServeConfig, application: str, located: LocatedModels | None) -> None:
        if located is None:
            config = with_detected_models(config, log_progress)
            directories = resolve_models(config, log_progress)
            replicas_per_node = node_shares(config, application).draft
            worker_bytes = memory_per_replica(config, replicas_per_node)
        else:
            directories, worker_bytes = located.directories, located.memory_bytes
            replicas_per_node = located.replicas_per_node
        models = directories.configs()
        limits, bytes_of_seat = seat_of_worker(
            config, models, worker_bytes, is_shared=located is not None
        )
        assert directories.draft is not None, "no draft model was found"
        vocabulary = DraftVocabulary.between(
            directories.draft, directories.target, config.model_options
        )
        config = with_resolved_dtype(config, models)
        spec = draft_spec(config, directories, limits, vocabulary, replicas_per_node)
        self._seat = limits.num_blocks, bytes_of_seat
        self._worker = SharedDraftWorker(spec, config.num_draft_seats, self._name)

    async def report(self) -> WorkerReport:
        """Describe this worker."""
        num_blocks, bytes_of_seat = self._seat
        return WorkerReport(
            name=self._name,
            node=self._node,
            num_blocks=num_blocks,
            seat_bytes=bytes_of_seat,
            num_taken=self._worker.loop.num_taken,
            uses=self._worker.loop.shares.uses(),
        )

    async def admit_if_addressed(self, name: str, request: SeatRequest) -> Seat | None:
        """Return a seat at this worker; None if another one is meant, or there is none."""
        if name != self._name:
            return None
        return await asyncio.to_thread(self._worker.admit, request)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for cluster.serve.autoscaling; Serve calls this every few seconds."""
        uses = self._worker.loop.shares.uses().values()
        return {LOAD: min(1.0, sum(each.recent for each in uses))}

    async def __del__(self) -> None:
        """End the worker when its Routers have left it; Serve calls this when the replica stops.

        They no longer see its reports then, and take seats at other workers.
        """
        if not hasattr(self, "_worker"):
            return  # stopped while it starts
        for _ in range(_NUM_DRAIN_POLLS):
            if not self._worker.loop.num_taken:
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        self._worker.loop.stop()


def draft_pool(config: ServeConfig, located: LocatedModels | None) -> serve.Application:
    """Bind the draft workers that the replicas of a model share."""
    fewest, most = config.fewest_shared_draft_workers, config.num_shared_draft_workers
    deployment = serve.deployment(DraftPoolReplica).options(
        name=DRAFT_POOL,
        ray_actor_options={
            "num_cpus": CPUS_PER_WORKER,
            "num_gpus": gpus_per_rank(config),
            "runtime_env": {"env_vars": RANK_ENVIRONMENT},
        },
        placement_group_bundles=[shared_draft_bundle(config)],
        placement_group_bundle_label_selector=shared_draft_labels(config),
        placement_group_strategy="PACK",
        num_replicas=most if fewest == most else None,
        autoscaling_config=None
        if fewest == most
        else scaling(config, fewest, most, config.target_draft_utilization),
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        logging_config={
            "log_level": logs.SERVE_LEVELS[config.log_level],
            "enable_access_log": False,
        },
        graceful_shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return deployment.bind(config.to_mapping(), located)
