"""Admission of sequences by their adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from specdec.config.engine import EngineConfig
from specdec.engine.loaded.adapters import Adapters
from specdec.sequences.sequence import Sequence
from specdec.types.messages import BASE_MODEL


class AdapterSeats:
    """At most `max_loras` different adapters run in a batch; sequences of others wait.

    Later sequences whose adapter runs already, or that need none, overtake a waiting one. So that
    it is not starved, sequences with an adapter do so at most `most_overtaking` times; then the
    running ones complete, and their seats become free.
    """

    def __init__(
        self, max_loras: int, most_overtaking: int, is_ready: Callable[[int], bool]
    ) -> None:
        """is_ready: whether steps may name an adapter id now."""
        self._max_loras = max_loras
        self._most_overtaking = most_overtaking
        self._is_ready = is_ready
        self._blocked: Sequence | None = None  # the first that lacks a seat
        self._num_overtaking = 0

    def first(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Sequence | None:
        """Return the first waiting sequence that may join the running ones; None without any."""
        return next(self.that_may_join(waiting, running), None)

    def that_may_join(
        self, waiting: Iterable[Sequence], running: Iterable[Sequence]
    ) -> Iterator[Sequence]:
        """Yield the waiting sequences of which each may join the running ones.

        The first one before them that lacks a seat is recorded: it must not be starved.
        """
        seated = {seq.request.adapter_id for seq in running} - {BASE_MODEL}
        blocked: Sequence | None = None
        for seq in waiting:
            adapter_id = seq.request.adapter_id
            if adapter_id == BASE_MODEL:
                yield seq
            elif not self._is_ready(adapter_id):
                continue
            elif adapter_id not in seated and len(seated) >= self._max_loras:
                if blocked is None:
                    self._block(seq)
                blocked = blocked or seq
            elif blocked is None or self._num_overtaking < self._most_overtaking:
                yield seq

    def admitted(self, seq: Sequence) -> None:
        """Record that a sequence has joined the batch."""
        if seq is self._blocked:
            self._blocked, self._num_overtaking = None, 0
        elif self._blocked is not None and seq.request.adapter_id != BASE_MODEL:
            self._num_overtaking += seq.rank > self._blocked.rank

    def _block(self, seq: Sequence) -> None:
        if seq is not self._blocked:
            self._blocked, self._num_overtaking = seq, 0


def seats_of(config: EngineConfig, adapters: Adapters | None) -> AdapterSeats | None:
    """Return the limit of adapters in a batch; None without adapters."""
    limits = config.adapters
    if limits is None or adapters is None:
        return None
    return AdapterSeats(limits.max_loras, config.max_num_seqs, adapters.is_ready)
