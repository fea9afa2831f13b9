"""Comparison of what the ranks of a group yield, for debugging: they compute it independently.

Ranks that differ in one token go on with different texts, and their output is wrong without an
error. The hosts exchange a digest for each step, and their tokens where digests differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.draft_messages import AheadOutput, DraftOutput, DraftStep
from specdec.types.messages import StepInput, VerifyOutput


class RankMismatchError(RuntimeError):
    """Ranks of a group that have computed different tokens in a step."""


class _Kind(IntEnum):
    TOKEN = 0
    DRAFT = 1


_NAMES = {_Kind.TOKEN: "token", _Kind.DRAFT: "draft token"}
_NOTHING = -1


class _Entry(NamedTuple):
    """A token that a rank has computed. position: its index in the sequence."""

    kind: int
    seq_id: int
    position: int
    token_id: int


class RankComparison:
    """Compares the results of all ranks, step by step. Its calls are collective."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self._steps: deque[StepInput] = deque()  # of a target, whose outputs were not compared
        self._ends: dict[int, int] = {}  # lengths of its sequences after the last of the others

    @classmethod
    def of(cls, group: TensorParallelGroup, *, is_wanted: bool) -> RankComparison | None:
        """Return a comparison where it is wanted, and there are several ranks."""
        return cls(group) if is_wanted and group.size > 1 else None

    def note(self, step: StepInput) -> None:
        """Record a step of a target; `check` follows for each, in order."""
        self._steps.append(step)

    def check(self, output: VerifyOutput) -> None:
        """Compare the new tokens of a step, and the drafts of a head after them.

        Raises RankMismatchError on every rank.
        """
        step = self._steps.popleft()
        for seq_id in step.released:
            self._ends.pop(seq_id, None)
        for row in step.rows:
            if not row.is_pending:
                self._ends[row.seq_id] = row.known_end
        entries = list[_Entry]()
        for verified in output.rows:
            end = self._ends[verified.seq_id]
            entries += _entries(_Kind.TOKEN, verified.seq_id, end, verified.token_ids)
            end = self._ends[verified.seq_id] = end + len(verified.token_ids)
            entries += _entries(_Kind.DRAFT, verified.seq_id, end, verified.next_draft_token_ids)
        self._compare(entries)

    def check_drafts(self, step: DraftStep, output: DraftOutput) -> None:
        """Compare the drafts of a draft model. Raises as `check`."""
        entries = list[_Entry]()
        for row, drafted in zip(step.drafts, output.rows, strict=True):
            entries += _entries(_Kind.DRAFT, row.seq_id, row.first_index, drafted.token_ids)
        self._compare(entries)

    def check_ahead(self, step: DraftStep, output: AheadOutput) -> None:
        """Compare drafts ahead, by outcome. Raises as `check`."""
        entries = list[_Entry]()
        for row, drafted in zip(step.ahead, output.rows, strict=True):
            for each in drafted.continuations:
                start = row.first_index + each.num_accepted
                tokens = (each.token_id, *each.draft_token_ids)
                entries += _entries(_Kind.DRAFT, row.seq_id, start, tokens)
        self._compare(entries)

    def _compare(self, entries: Sequence[_Entry]) -> None:
        own = np.array(entries, np.int64).reshape(-1, len(_Entry._fields))
        digest = torch.tensor([len(own), _digest(own)])
        digests = self._group.all_gather(digest)
        if bool((digests == digests[0]).all()):
            return
        longest = int(digests[:, 0].max())
        padded = np.full((longest, own.shape[1]), _NOTHING, np.int64)
        padded[: len(own)] = own
        of_ranks = self._group.all_gather(torch.from_numpy(padded)).numpy()
        raise RankMismatchError(_difference(of_ranks))


def _entries(kind: _Kind, seq_id: int, start: int, token_ids: Sequence[int]) -> list[_Entry]:
    places = enumerate(token_ids, start)
    return [_Entry(kind, seq_id, position, token_id) for position, token_id in places]


def _digest(entries: NDArray[np.int64]) -> int:
    """Return a hash of entries, equal in all processes."""
    return hash(tuple(entries.ravel().tolist()))  # of integers it has no random part


def _difference(of_ranks: NDArray[np.int64]) -> str:
    """Describe the first difference; of_ranks: [size, num_entries, 4]."""
    place = int((of_ranks != of_ranks[0]).any((0, 2)).argmax())
    found = [_Entry(*entry) for entry in of_ranks[:, place].tolist()]
    rank = next(rank for rank, entry in enumerate(found) if entry != found[0])
    return f"rank {rank} has computed {_words(found[rank])}, and rank 0 {_words(found[0])}"


def _words(entry: _Entry) -> str:
    if entry.kind == _NOTHING:
        return "no further token"
    place = f"at position {entry.position} of sequence {entry.seq_id}"
    return f"{_NAMES[_Kind(entry.kind)]} {entry.token_id} {place}"
