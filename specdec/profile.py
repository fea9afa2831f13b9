"""What an operator asks of a profile of the models at work, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import InvalidValueError

MAX_PROFILE_STEPS = 100
"""Each step leaves hundreds of kilobytes of events, which are kept in memory until the end."""

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
        if type(self.num_steps) is not int or not 1 <= self.num_steps <= MAX_PROFILE_STEPS:
            limit = f"a whole number from 1 to {MAX_PROFILE_STEPS}"
            raise InvalidValueError("num_steps", self.num_steps, limit)
        is_number = isinstance(self.timeout_s, int | float) and self.timeout_s is not True
        if not is_number or not 0 < self.timeout_s <= MAX_PROFILE_TIMEOUT_S:
            limit = f"a number of seconds above 0, at most {MAX_PROFILE_TIMEOUT_S:g}"
            raise InvalidValueError("timeout_s", self.timeout_s, limit)
        if not isinstance(self.replica_id, str):
            raise InvalidValueError("replica_id", self.replica_id, "a text")


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
