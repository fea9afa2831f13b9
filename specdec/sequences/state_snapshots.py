"""Snapshots of the states of recurrent layers, which let sequences resume after a cached prefix.

A snapshot is a copy of a sequence's states after a full KV block. It has the key of this block, so
it is shared as the block is, and is dropped with it. The ranks copy in the order of steps; here are
the slots of the copies, and which positions are worth one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass

from specdec.types.messages import Snapshot
from specdec.types.reports.stats import Counts

LEAST_SAVED_BLOCKS = 4
"""Least blocks between two snapshots of a sequence: each costs a copy, in a prompt also a row."""


@dataclass
class _Progress:
    """A sequence with blocks, in blocks from its start.

    num_saved: up to its last snapshot. num_shared: that were cached when it was admitted, whether
    it could use them or not. prompt_end: that a sequence with the same tokens could use.
    resumed: key of the snapshot that the ranks have yet to resume it from. latest: key of its
    snapshot in the output, which the next one replaces.
    """

    num_saved: int
    num_shared: int
    prompt_end: int
    resumed: bytes | None
    latest: bytes | None = None


class StateSnapshots:
    """Slots of snapshots, by the keys of KV blocks; the least recently used one is replaced."""

    def __init__(
        self, num_slots: int, interval: int, block_size: int, counts: Counts | None = None
    ) -> None:
        """interval: blocks between the snapshots of a long prompt. block_size: in tokens.

        counts: of the engine.
        """
        self.num_slots = num_slots
        self._counts = counts or Counts()
        self._interval, self._block_size = interval, block_size
        self._free = list(range(num_slots))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: set[int] = set()  # slots of snapshots that the ranks have yet to take
        self._sequences: dict[int, _Progress] = {}

    def __len__(self) -> int:
        """Return the number of snapshots."""
        return len(self._slots)

    def num_usable(self, keys: Sequence[bytes]) -> int:
        """Return after how many of a sequence's cached blocks the last snapshot is.

        keys: its root key, then those of the blocks.
        """
        return next((i for i in range(len(keys) - 1, 0, -1) if keys[i] in self._slots), 0)

    def admit(self, seq_id: int, keys: Sequence[bytes], num_usable: int, num_tokens: int) -> None:
        """Add a sequence of `num_tokens` that resumes after the first of its cached blocks."""
        num_cached = len(keys) - 1
        resumed = keys[num_usable] if num_usable else None
        prompt_end = (num_tokens - 1) // self._block_size
        self._sequences[seq_id] = _Progress(num_usable, num_cached, prompt_end, resumed)
        self._counts.num_resumed_tokens += num_usable * self._block_size
        self._counts.num_stateless_tokens += (num_cached - num_usable) * self._block_size
        if resumed is not None:
            self._slots.move_to_end(resumed)
            for each in self._sequences.values():
                if each.latest == resumed:  # shared by now: it stays
                    each.latest = None

    def resumption(self, seq_id: int) -> Snapshot | None:
        """Return the snapshot that the ranks begin an admitted sequence with; None without one."""
        progress = self._sequences[seq_id]
        if progress.resumed is None:
            return None
        return Snapshot(self._slots[progress.resumed], progress.num_saved * self._block_size)

    def sent(self, seq_id: int) -> None:
        """Record that the ranks are sent a sequence: its snapshot may be replaced by later ones."""
        self._sequences[seq_id].resumed = None

    def release(self, seq_id: int) -> None:
        """Forget a sequence, which may be unknown; its snapshots stay."""
        self._sequences.pop(seq_id, None)

    def cut(self, seq_id: int, start: int, count: int) -> int:
        """Return how many of the next `count` tokens run until a position worth a snapshot."""
        if not self.num_slots:
            return count
        progress, first = self._sequences[seq_id], start // self._block_size + 1
        least = max(first, progress.num_saved + LEAST_SAVED_BLOCKS)
        ends = [-(-least // self._interval) * self._interval]
        ends += [each for each in (progress.num_shared, progress.prompt_end) if each >= least]
        return min(count, min(ends) * self._block_size - start)

    def begin_save(self, seq_id: int, position: int) -> int | None:
        """Return a slot for the states of a running sequence at a block border, if worth it.

        None otherwise, and where no slot can be replaced. `end_save` follows.
        """
        progress, place = self._sequences[seq_id], position // self._block_size
        if not self._is_worth(progress, place) or (slot := self._take()) is None:
            return None
        progress.num_saved = place
        self._pending.add(slot)
        return slot

    def end_save(self, seq_id: int, slot: int, key: bytes | None) -> None:
        """Keep a snapshot that the ranks have taken under the key of a cached block.

        None: it is of no use. The sequence may have been released since.
        """
        self._pending.remove(slot)
        if key is None or key in self._slots:
            self._free.append(slot)
            return
        self._slots[key] = slot
        self._counts.num_saved_states += 1
        progress = self._sequences.get(seq_id)
        if progress is None:
            return
        if progress.latest is not None:
            self.drop(progress.latest)
        place = progress.num_saved
        is_kept = place <= progress.prompt_end or place % self._interval == 0
        progress.latest = None if is_kept else key

    def touch(self, key: bytes) -> None:
        """Make the snapshot of a block, if there is one, the most recently used."""
        if key in self._slots:
            self._slots.move_to_end(key)

    def drop(self, key: bytes) -> None:
        """Drop the snapshot of a block, if there is one."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Drop all snapshots, as when the states are lost. No sequence may have blocks."""
        assert not self._sequences, "clear while sequences have states"
        self._slots.clear()
        self._pending.clear()
        self._free = list(range(self.num_slots))

    def check_integrity(self, seq_ids: Set[int], keys: Set[bytes]) -> None:
        """Assert that no slot is lost or used twice, and that snapshots have cached blocks.

        seq_ids: of the sequences with blocks. keys: of cached blocks.
        """
        slots = sorted([*self._free, *self._slots.values(), *self._pending])
        assert slots == list(range(self.num_slots)), "slots of snapshots lost or shared"
        assert self._sequences.keys() == seq_ids, "states of sequences without blocks"
        assert self._slots.keys() <= keys, "snapshots without their blocks"
        assert self._resumed <= self._slots.keys(), "a snapshot was replaced before its use"

    @property
    def _resumed(self) -> set[bytes]:
        """Keys of the snapshots that ranks have yet to resume sequences from."""
        each_of = self._sequences.values()
        return {each.resumed for each in each_of if each.resumed is not None}

    def _is_worth(self, progress: _Progress, place: int) -> bool:
        """Return whether a snapshot after the first `place` blocks is worth a slot."""
        is_late = place >= progress.prompt_end
        is_place = is_late or place % self._interval == 0 or place == progress.num_shared
        return is_place and place - progress.num_saved >= LEAST_SAVED_BLOCKS

    def _take(self) -> int | None:
        """Return a free slot, or that of the snapshot that was used least recently."""
        if self._free:
            return self._free.pop()
        resumed = self._resumed
        key = next((each for each in self._slots if each not in resumed), None)
        return None if key is None else self._slots.pop(key)
