"""What a Router and the ranks of its models say to one another about a profile.

Orders and reports travel between the messages of steps, in order, so a profile begins and ends
between two steps on every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from specdec.types.profile import OperationTime, WorkerProfile

Frames = list[bytes]

END: Frames = [b"end profile"]
"""Has a rank end its profile, if one runs."""

_BEGIN = b"profile"
_REPORT = b"profiled"


@dataclass(frozen=True)
class ShardOrder:
    """What the ranks of a group are to do.

    num_steps: after which a rank ends its profile, unless it is told to before. directory: for the
    trace, on the rank's node; made if it is not there. max_bytes: of one rank's trace.
    """

    worker: str
    num_steps: int
    directory: str
    max_bytes: int

    def encode(self) -> Frames:
        """The message for every rank."""
        return [_BEGIN, msgpack.packb(asdict(self))]

    def report(self, profile: WorkerProfile) -> Frames:
        """The message that a rank answers with."""
        return [_REPORT, self.directory.encode(), msgpack.packb(asdict(profile))]


def is_for_profiles(frames: Frames) -> bool:
    """Whether a message for a rank is about a profile, and no step."""
    return frames[0] == _BEGIN or frames == END


def order_in(frames: Frames) -> ShardOrder | None:
    """What a rank is to profile; None where it is to end."""
    return None if frames == END else ShardOrder(**msgpack.unpackb(frames[1]))


def is_report(frames: Frames) -> bool:
    """Whether a message of a rank is the report of a profile, and no answer to a step."""
    return frames[0] == _REPORT


class ProfileInbox:
    """The reports of a group's ranks, as they come between the answers to steps."""

    def __init__(self, order: ShardOrder, size: int) -> None:
        """size: how many ranks there are."""
        self._directory = order.directory
        self._size = size
        self._reports: dict[int, WorkerProfile] = {}

    def take(self, frames: Frames) -> None:
        """Keeps a report, unless it is of an earlier order, which was given up on."""
        _, of_directory, packed = frames
        if of_directory.decode() == self._directory:
            report = _decode_report(packed)
            self._reports[report.rank] = report

    @property
    def is_complete(self) -> bool:
        """Whether every rank has reported."""
        return len(self._reports) == self._size

    @property
    def reports(self) -> tuple[WorkerProfile, ...] | None:
        """Those of all ranks, by rank; None until all have come."""
        if not self.is_complete:
            return None
        return tuple(report for _, report in sorted(self._reports.items()))


def _decode_report(packed: bytes) -> WorkerProfile:
    values: dict[str, Any] = msgpack.unpackb(packed)
    operations = tuple(OperationTime(**each) for each in values.pop("operations"))
    return WorkerProfile(**values, operations=operations)
