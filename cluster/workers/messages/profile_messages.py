"""Messages of profiles between a Router and its ranks.

Orders and reports travel between the messages of steps, in order, so a profile begins and ends
between two steps on every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from cluster.workers.messages.frames import Frames
from specdec.types.reports.profile import OperationTime, WorkerProfile

END: Frames = [b"end profile"]
"""Ends a rank's profile, if one is active."""

WRITING_S = 60.0
"""The limit for ranks to write their traces at the end of a profile."""

_BEGIN = b"profile"
_REPORT = b"profiled"


@dataclass(frozen=True)
class WorkerProfileOrder:
    """A profile for the ranks of a group to record.

    num_steps: after these a rank ends its profile, unless it receives END first. directory: for the
    trace, on the rank's node; created if missing. max_bytes: of one rank's trace.
    """

    worker: str
    num_steps: int
    directory: str
    max_bytes: int

    def encode(self) -> Frames:
        """Return the message for every rank."""
        return [_BEGIN, msgpack.packb(asdict(self))]

    def report(self, profile: WorkerProfile) -> Frames:
        """Return the message with which a rank reports its profile."""
        return [_REPORT, self.directory.encode(), msgpack.packb(asdict(profile))]


def is_for_profiles(frames: Frames) -> bool:
    """Return whether a message for a rank is about a profile, not a step."""
    return frames[0] == _BEGIN or frames == END


def order_in(frames: Frames) -> WorkerProfileOrder | None:
    """Return the order in a message about a profile; None for END."""
    return None if frames == END else WorkerProfileOrder(**msgpack.unpackb(frames[1]))


def is_report(frames: Frames) -> bool:
    """Return whether a message of a rank is the report of a profile, not an answer to a step."""
    return frames[0] == _REPORT


class ProfileInbox:
    """The reports of a group's ranks, which arrive between the answers to steps."""

    def __init__(self, order: WorkerProfileOrder, size: int) -> None:
        """Expect `size` reports."""
        self._directory = order.directory
        self._size = size
        self._reports: dict[int, WorkerProfile] = {}

    def take(self, frames: Frames) -> None:
        """Store a report; discard one of an earlier order that was cancelled."""
        _, of_directory, packed = frames
        if of_directory.decode() == self._directory:
            values: dict[str, Any] = msgpack.unpackb(packed)
            operations = tuple(OperationTime(**each) for each in values.pop("operations"))
            report = WorkerProfile(**values, operations=operations)
            self._reports[report.rank] = report

    @property
    def reports(self) -> tuple[WorkerProfile, ...] | None:
        """The reports by rank; None until all have arrived."""
        if len(self._reports) < self._size:
            return None
        return tuple(report for _, report in sorted(self._reports.items()))
