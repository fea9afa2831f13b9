"""Messages about versions of a draft head between a Router and the ranks of a target.

They travel between the messages of steps, in order, so all ranks switch before the same step.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import msgpack

from cluster.workers.messages.frames import Frames
from specdec.types.drafters import HeadFile

LOADING_S = 120.0
"""Addition to the time limit of a step while ranks load a head, which can include a download."""

_LOAD = b"load head"
_LOADED = b"loaded head"
_SWITCH = b"switch head"


class LoadReport(NamedTuple):
    """A rank's answer to a load. fault: why it could not load the version; empty if it has it."""

    rank: int
    version: int
    fault: str

    def encode(self) -> Frames:
        """Return the message for the Router."""
        return [_LOADED, msgpack.packb(tuple(self))]


def load_message(head: HeadFile) -> Frames:
    """Return the message that has every rank load a head."""
    return [_LOAD, msgpack.packb(asdict(head))]


def switch_message(version: int) -> Frames:
    """Return the message that has every rank draft with a loaded version."""
    return [_SWITCH, msgpack.packb(version)]


def is_for_heads(frames: Frames) -> bool:
    """Return whether a message for a rank is about a version of the head, not a step."""
    return frames[0] in (_LOAD, _SWITCH)


def is_load_report(frames: Frames) -> bool:
    """Return whether a message of a rank is the answer to a load."""
    return frames[0] == _LOADED


def order_in(frames: Frames) -> HeadFile | int:
    """Return the head to load, or the version to draft with."""
    kind, packed = frames
    content = msgpack.unpackb(packed)
    return HeadFile(**content) if kind == _LOAD else int(content)


class LoadInbox:
    """The reports of all ranks about one load, which arrive between the answers to steps."""

    def __init__(self, number: int, size: int) -> None:
        """Expect `size` reports. number: the version of the head, or the id of the adapter."""
        self._number = number
        self._size = size
        self._faults: dict[int, str] = {}

    def take(self, frames: Frames) -> None:
        """Store a report; discard one about another load."""
        rank, number, fault = msgpack.unpackb(frames[1])
        if number == self._number:
            self._faults[rank] = fault

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks have answered."""
        return len(self._faults) == self._size

    @property
    def fault(self) -> str | None:
        """The fault of the first rank that has one; empty if none has; None until all answered."""
        if not self.is_complete:
            return None
        faults = (f"rank {rank}: {each}" for rank, each in sorted(self._faults.items()) if each)
        return next(faults, "")
