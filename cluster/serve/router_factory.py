"""Makes the Router of a replica: locates its models and the memory that they may use."""

from __future__ import annotations

from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from cluster.config.serve_config import ServeConfig
from cluster.replica.replica_router import ReplicaRouter
from cluster.serve.node_memory import node_shares, replica_memory
from cluster.workers.ray.resources import LocatedModels, ReplicaMemory
from cluster.workers.shared_draft.pool_seats import PoolSeats
from specdec.config.hardware import available_memory_bytes
from specdec.engine.models.model_detection import with_detected_models
from specdec.engine.models.model_resolution import resolve_models
from specdec.engine.models.preflight import check_draft_model, check_target
from specdec.models.resolve import log_progress


def make_router(
    config: ServeConfig,
    placement: PlacementGroup,
    application: str,
    replica_id: str,
    located: LocatedModels | None,
    seats: PoolSeats | None,
) -> ReplicaRouter:
    """Create the Router; without `located`, locate models and memory here."""
    if located is None:
        shares = node_shares(config, application)
        config = with_detected_models(config, log_progress)
        check_target(config, log_progress)
        directories = resolve_models(config, log_progress)
        check_draft_model(config, directories, log_progress)
        memory = replica_memory(config, placement, shares)
        if seats is not None:
            memory = replace(memory, draft_bytes=seats.seat_bytes(config.start_timeout_s))
        return ReplicaRouter(config, directories, memory, replica_id, shares.target, seats)
    bytes_now = available_memory_bytes() if config.device == "cpu" else located.memory_bytes
    memory = ReplicaMemory(min(located.memory_bytes, bytes_now))
    return ReplicaRouter(
        config, located.directories, memory, replica_id, located.replicas_per_node, seats
    )
