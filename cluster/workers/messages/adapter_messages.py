"""Messages about adapters between a Router and the ranks of a target.

They travel between the messages of steps, in order, so a rank has every adapter that a step names.
"""

from __future__ import annotations

from dataclasses import asdict

import msgpack

from cluster.workers.messages.frames import Frames
from specdec.types.adapters import AdapterFile

_LOAD = b"load adapter"
_LOADED = b"loaded adapter"
_UNLOAD = b"unload adapter"


def load_message(adapter: AdapterFile) -> Frames:
    """Return the message that has every rank load an adapter."""
    return [_LOAD, msgpack.packb(asdict(adapter))]


def unload_message(adapter_id: int) -> Frames:
    """Return the message that has every rank free an adapter."""
    return [_UNLOAD, msgpack.packb(adapter_id)]


def load_report(rank: int, adapter_id: int, fault: str) -> Frames:
    """Return a rank's answer to a load, which a LoadInbox takes; fault: empty if it has it."""
    return [_LOADED, msgpack.packb((rank, adapter_id, fault))]


def is_for_adapters(frames: Frames) -> bool:
    """Return whether a message for a rank is about an adapter, not a step."""
    return frames[0] in (_LOAD, _UNLOAD)


def is_adapter_report(frames: Frames) -> bool:
    """Return whether a message of a rank is the answer to a load."""
    return frames[0] == _LOADED


def order_in(frames: Frames) -> AdapterFile | int:
    """Return the adapter to load, or the id of the one to free."""
    kind, packed = frames
    content = msgpack.unpackb(packed)
    return AdapterFile(**content) if kind == _LOAD else int(content)
