"""Memory of the seats at a draft worker that several Routers share."""

from __future__ import annotations

from dataclasses import replace

from cluster.config.serve_config import ServeConfig
from specdec.config.engine import DraftLimits
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.memory.shared_draft_memory import UNLIMITED_BYTES, seat_bytes, seat_limits
from specdec.engine.models.model_resolution import Models, with_resolved_dtype
from specdec.types.errors import InvalidValueError, OutOfMemoryError

_GIB = 2**30


def seat_of_worker(
    config: ServeConfig, models: Models, worker_bytes: int, *, is_shared: bool
) -> tuple[DraftLimits, int | None]:
    """Return the limits of a seat, and `WorkerReport.seat_bytes`.

    worker_bytes: memory of the worker. is_shared: whether that is the memory of a machine, which
    plans divide among replicas; a worker on a GPU has it alone. Raises what `memory_plan` and
    `seat_of_plan` raise, and OutOfMemoryError for seats that are too small.
    """
    if is_shared and config.device == "cpu":
        plan = memory_plan(with_resolved_dtype(config, models), models, worker_bytes)
        assert plan.draft is not None, "no draft model is configured"
        return seat_of_plan(config, plan.draft), None
    bytes_of_seat = seat_bytes(config, models, worker_bytes, config.num_draft_seats)
    try:
        return seat_limits(config, models, bytes_of_seat), bytes_of_seat
    except OutOfMemoryError as error:
        seat_limits(config, models, UNLIMITED_BYTES)  # raises what more memory would not help
        setting, pool = "replicas_per_draft_worker", ""
        if config.max_draft_workers is not None:  # with a seat for each replica
            setting = "num_replicas" if config.max_replicas is None else "max_replicas"
            pool = f" (max_draft_workers is {config.max_draft_workers})"
        raise OutOfMemoryError(
            f"a shared draft worker has {worker_bytes / _GIB:.1f} GiB; the part of each of its "
            f"{config.num_draft_seats} seats{pool} is {bytes_of_seat / _GIB:.2f}, with the weights "
            f"and the workspace of all, too little for one sequence: lower {setting}, "
            "max_num_seqs or speculative_config.max_model_len, or take a smaller draft model"
        ) from error


def seat_of_plan(config: ServeConfig, limits: DraftLimits) -> DraftLimits:
    """Return the limits of a seat, where one machine has the seats of a replica at all workers.

    limits: of the replica's plan. Raises InvalidValueError for seats that cannot hold one sequence.
    """
    num_workers = config.num_shared_draft_workers
    num_seats = max(1, num_workers * config.num_draft_seats // config.most_replicas)
    num_blocks = limits.num_blocks // num_seats
    of_sequence = -(-limits.max_model_len // limits.block_size)
    if num_blocks < of_sequence:
        limit = f"at most {limits.num_blocks // of_sequence}, for whose seats the memory is enough"
        raise InvalidValueError("max_draft_workers", num_workers, limit)
    return replace(limits, num_blocks=num_blocks)
