"""Messages about files that ranks load between steps: versions of a draft head, and adapters.

They travel between the messages of steps, in order: all ranks switch to a version before the same
step, and a rank has every adapter that a step names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Generic, TypeVar

import msgpack

from cluster.workers.messages.frames import Frames
from specdec.types.adapters import AdapterFile
from specdec.types.drafters import HeadFile

LOADING_S = 120.0
"""Addition to the time limit of a step while ranks load a file, which can include a download, or
on a GPU capture the graphs of a head that they switch to: hundreds, in ten seconds or more."""

FileT = TypeVar("FileT", bound=HeadFile | AdapterFile)


class LoadMessages(Generic[FileT]):
    """Messages between a Router and the ranks of a model about files of one kind.

    number: the field that identifies a file. change: verb for what ranks do with a loaded one.
    """

    def __init__(self, kind: str, file: type[FileT], number: str, change: str) -> None:
        self._file = file
        self._number = number
        self._load, self._loaded, self._change = (
            f"{verb} {kind}".encode() for verb in ("load", "loaded", change)
        )

    def load(self, file: FileT) -> Frames:
        """Return the message that has every rank load a file."""
        return [self._load, msgpack.packb(asdict(file))]

    def change(self, number: int) -> Frames:
        """Return the message that has every rank draft with a loaded head, or free an adapter."""
        return [self._change, msgpack.packb(number)]

    def report(self, rank: int, number: int, fault: str) -> Frames:
        """Return a rank's answer to a load. fault: empty if it has the file."""
        return [self._loaded, msgpack.packb((rank, number, fault))]

    def is_order(self, frames: Frames) -> bool:
        """Return whether a message for a rank is about these files, not a step."""
        return frames[0] in (self._load, self._change)

    def is_report(self, frames: Frames) -> bool:
        """Return whether a message of a rank is the answer to a load."""
        return frames[0] == self._loaded

    def order_in(self, frames: Frames) -> FileT | int:
        """Return the file to load, or the number of the one to change to or to free."""
        kind, packed = frames
        content = msgpack.unpackb(packed)
        return self._file(**content) if kind == self._load else int(content)

    def execute(
        self,
        frames: Frames,
        rank: int,
        load: Callable[[FileT], str],
        change: Callable[[int], None],
    ) -> Iterator[Frames]:
        """Execute an order on a rank, and yield its report. load: returns the fault."""
        order = self.order_in(frames)
        if isinstance(order, int):
            change(order)
        else:
            yield self.report(rank, getattr(order, self._number), load(order))

    def inbox(self, file: FileT, size: int) -> LoadInbox:
        """Return the inbox for the reports of `size` ranks about a file."""
        return LoadInbox(getattr(file, self._number), size)


HEADS = LoadMessages("head", HeadFile, number="version", change="switch")
ADAPTERS = LoadMessages("adapter", AdapterFile, number="adapter_id", change="unload")


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
    def extra_s(self) -> float:
        """Addition to the time limit of a step: LOADING_S until all ranks have answered."""
        return LOADING_S if len(self._faults) < self._size else 0.0

    @property
    def fault(self) -> str | None:
        """The fault of the first rank that has one; empty if none has; None until all answered."""
        if len(self._faults) < self._size:
            return None
        faults = (f"rank {rank}: {each}" for rank, each in sorted(self._faults.items()) if each)
        return next(faults, "")
