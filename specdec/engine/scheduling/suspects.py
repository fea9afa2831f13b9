"""Finds the sequence whose forward pass ends the target, such as by an OOM kill.

A request that is run again after each restart would end the target each time. The sequences in
flight at two losses in a row, without a token decoded between, are suspects: each runs alone, and
the one that loses the target then is the cause. Two losses for other reasons delay the streams but
end none.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from operator import attrgetter

from specdec.engine.scheduling.decode_run import Rows
from specdec.sequences.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)


class Suspects:
    """The sequences that run alone after the loss of a target, one after the other."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []  # by rank; the first one runs alone
        self._at_last_loss: set[Sequence] = set()  # in flight then, and have not decoded since

    @property
    def current(self) -> Sequence | None:
        """The suspect that runs alone now; None while all sequences may run."""
        while self._waiting and _has_ended(self._waiting[0]):
            self._waiting.pop(0)
        return self._waiting[0] if self._waiting else None

    def record_loss(self, in_flight: Collection[Sequence]) -> Sequence | None:
        """Record the sequences in flight at a loss; return the one that caused it, if known."""
        current = self.current
        if current is not None and current in in_flight:
            self._clear(current)
            return current
        repeated = [seq for seq in in_flight if seq in self._at_last_loss]
        if repeated:
            logger.warning("%d sequences run alone: two losses in a row", len(repeated))
        self._waiting = sorted({*self._waiting, *repeated}, key=attrgetter("rank"))
        if in_flight:
            self._at_last_loss = set(in_flight)
        return None

    def complete(self, rows: Rows) -> bool:
        """Clear what has decoded; return whether another suspect is to run alone now.

        Prefill does not clear a sequence: kernels and memory of the two differ.
        """
        current = self.current
        if current is None and not self._at_last_loss:
            return False
        decoded = {seq for seq, row in rows if row.samples and row.num_known_tokens == 1}
        self._at_last_loss -= decoded
        self._at_last_loss -= {each for each in self._at_last_loss if _has_ended(each)}
        if current is None or current not in decoded:
            return False
        self._clear(current)
        return self.current is not None

    def _clear(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        self._at_last_loss.discard(seq)


def _has_ended(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.FINISHED
