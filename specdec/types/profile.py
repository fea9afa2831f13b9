"""What an operator asks of a profile of the models at work, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types.validation import check_types, require_range

MAX_PROFILE_STEPS = 100
"""Each step leaves hundreds of kilobytes of events, which are kept in memory until the end."""

MIN_PROFILE_TIMEOUT_S = 0.1
MAX_PROFILE_TIMEOUT_S = 300.0
DEFAULT_PROFILE_STEPS = 10
DEFAULT_PROFILE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ProfileOrder:
    """How much to profile: so many steps, or what runs of them within `timeout_s` seconds.

    replica_id: whose models; empty for those of whichever replica answers. Raises
    InvalidValueError.
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
    """What an operation has taken over all steps, in milliseconds.

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

    worker: `target` or `draft model`. num_steps: fewer than asked for where no more came.
    trace_path: on the rank's node; empty where there is none. trace_bytes: its size. operations:
    those that took most, the longest first. fault: why there is no trace, if there is none.
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
    """The profiles of one replica's ranks, and how many seconds it took to take them."""

    replica_id: str
    elapsed_s: float
    workers: tuple[WorkerProfile, ...]
