"""Request and result of profiling the models of a replica."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types.validation import check_types, require_range

MAX_PROFILE_STEPS = 100
"""Each step records hundreds of kilobytes of events, which stay in memory until the end."""

MIN_PROFILE_TIMEOUT_S = 0.1
MAX_PROFILE_TIMEOUT_S = 300.0
DEFAULT_PROFILE_STEPS = 10
DEFAULT_PROFILE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ProfileOrder:
    """Request to profile `num_steps` steps, or those that run within `timeout_s` seconds.

    replica_id: empty for the replica that receives the request. Raises InvalidValueError.
    """

    num_steps: int = DEFAULT_PROFILE_STEPS
    timeout_s: float = DEFAULT_PROFILE_TIMEOUT_S
    replica_id: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        require_range("num_steps", self.num_steps, 1, MAX_PROFILE_STEPS)
        require_range("timeout_s", self.timeout_s, MIN_PROFILE_TIMEOUT_S, MAX_PROFILE_TIMEOUT_S)


@dataclass(frozen=True)
class OperationTime:
    """Time of an operation over all steps, in milliseconds.

    self_ms: on the CPU, without the operations that it called. total_ms: with them. device_ms: on
    the GPU, without them.
    """

    name: str
    num_calls: int
    self_ms: float
    total_ms: float
    device_ms: float


@dataclass(frozen=True)
class WorkerProfile:
    """The profile of one rank of a model.

    worker: `target` or `draft model`. num_steps: number of steps that were profiled.
    trace_path: on the rank's node; empty without a trace. trace_bytes: its size. operations: those
    that took the longest, in descending order. fault: why there is no trace; empty with one.
    """

    worker: str
    rank: int
    num_steps: int
    trace_path: str = ""
    trace_bytes: int = 0
    operations: tuple[OperationTime, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class ProfileReport:
    """The profiles of one replica's ranks; taking them took `elapsed_s` seconds."""

    replica_id: str
    elapsed_s: float
    workers: tuple[WorkerProfile, ...]
