"""What a worker has been told of its sequences, so that a step carries only what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import Sequence
from specdec.types.messages import BlockTableDelta, SequenceAdmission


@dataclass(frozen=True)
class News:
    """The lifecycle part of a step message; see StepInput."""

    released: tuple[int, ...]
    admitted: tuple[SequenceAdmission, ...]
    block_table_deltas: tuple[BlockTableDelta, ...]


class WorkerLedger:
    """The books on one worker, which knows of sequences and blocks by steps alone."""

    def __init__(
        self,
        blocks: BlockManager,
        admission: Callable[[Sequence], SequenceAdmission] = attrgetter("admission"),
    ) -> None:
        """`admission` is what the worker is told of a sequence that it does not know."""
        self._blocks = blocks
        self._admission = admission
        self._num_known_blocks: dict[int, int] = {}
        self._released: list[int] = []

    def news(self, sequences: Iterable[Sequence]) -> News:
        """What the worker has to learn before it runs `sequences`; counts as told from now on."""
        sequences = list(sequences)
        unknown = [seq for seq in sequences if seq.seq_id not in self._num_known_blocks]
        self._num_known_blocks.update({seq.seq_id: 0 for seq in unknown})
        news = News(
            released=tuple(self._released),
            admitted=tuple(map(self._admission, unknown)),
            block_table_deltas=tuple(self._deltas(sequences)),
        )
        self._released.clear()
        return news

    def forget(self, seq_id: int) -> None:
        """Has the worker drop a sequence; one that it was never told of is no error."""
        if self._num_known_blocks.pop(seq_id, None) is not None:
            self._released.append(seq_id)

    def truncate(self, seq_id: int) -> None:
        """Takes note that a sequence's table has become shorter."""
        if seq_id in self._num_known_blocks:
            num_held = len(self._blocks.block_table(seq_id))
            self._num_known_blocks[seq_id] = min(self._num_known_blocks[seq_id], num_held)

    def _deltas(self, sequences: Iterable[Sequence]) -> Iterator[BlockTableDelta]:
        """The blocks that the worker does not know yet; tables change only at their end."""
        for seq in sequences:
            table, known = self._blocks.block_table(seq.seq_id), self._num_known_blocks[seq.seq_id]
            if len(table) > known:
                self._num_known_blocks[seq.seq_id] = len(table)
                yield BlockTableDelta(seq.seq_id, known, tuple(table[known:]))
