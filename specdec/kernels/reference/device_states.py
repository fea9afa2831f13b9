"""States of recurrent layers for passes of fixed shape, which the device plans.

How many drafts of a row were accepted is known on the device alone, and so is how many inputs of
its tail the next row replays: `committed` has there, by slot, the position of the state. A pass
that the host plans reads it too, so that both kinds can follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.forward_batch import ForwardBatch, on_device
from specdec.kernels.reference.state_pool import StatePool


class StateRows(NamedTuple):
    """The rows of a pass, [B] int64 each.

    slots: of the pool, and the one after the last for padding. firsts: place of a row's first token
    in the batch. num_tokens: without padding; 0 for a row of padding. starts: position of the first
    token. num_guesses: last tokens that may be rejected after the pass.
    """

    slots: Tensor
    firsts: Tensor
    num_tokens: Tensor
    starts: Tensor
    num_guesses: Tensor

    def first(self, num_rows: int) -> StateRows:
        """Return the first rows, in the same memory."""
        return StateRows(*(part[:num_rows] for part in self))


@dataclass(frozen=True)
class RowPlan:
    """The part of a pass that is the same for all recurrent layers.

    spans: [B, 6] int64: slot, place of the first token, inputs that are replayed, tokens, inputs
    after which the state is committed, and guesses whose inputs are kept.

    Its mixed inputs are [B * max_guesses + T, num_inputs]: the replayed ones of each row, then
    those of the tokens of the pass.
    """

    spans: Tensor
    num_tokens: int
    max_guesses: int

    @property
    def num_rows(self) -> int:
        return len(self.spans)

    @property
    def num_mixed(self) -> int:
        return self.num_rows * self.max_guesses + self.num_tokens

    def of_hidden(self, values: Tensor) -> Tensor:
        """Return the values, as no hidden states are replayed."""
        return values

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return those of the tokens of the pass, of a value for each mixed input."""
        return values[self.num_rows * self.max_guesses :]


class DeviceStatePool(StatePool):
    """The states of sequences whose committed positions are on the device.

    committed: [num_slots + 1] int64; the last one is of padding.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """See StatePool."""
        super().__init__(*arguments, **options)
        device = self.memory.device
        self.committed = torch.zeros(self.num_slots + 1, dtype=torch.int64, device=device)

    def reset(self, slot: int, *, is_checked: bool = True) -> None:
        """See StatePool; a row may begin anywhere, since the host does not know the tail."""
        del is_checked
        super().reset(slot, is_checked=False)
        self.committed[slot] = 0

    def resume(self, slot: int, snapshot: int, position: int) -> None:
        """See StatePool."""
        super().resume(slot, snapshot, position)
        self.spoil(slot)
        self.committed[slot] = position

    def plan_batch(self, batch: ForwardBatch) -> RowPlan:
        """Plan a pass of a ragged batch, which commits states; call it once for each pass."""
        assert all(chunk.parents is None for chunk in batch.chunks), "a tree on recurrent layers"
        firsts = batch.cu_seqlens_q[:-1]
        columns = [
            (chunk.state_slot, first, len(chunk.token_ids), chunk.start, chunk.num_guesses)
            for chunk, first in zip(batch.chunks, firsts, strict=True)
        ]
        rows = on_device(np.array(columns, np.int32).T.copy(), self.memory.device)
        return self.plan_rows(StateRows(*rows.unbind()), batch.num_tokens)

    def plan_rows(self, rows: StateRows, num_tokens: int) -> RowPlan:
        """Plan a pass of T tokens without the host. See `StatePool.plan`.

        Rows that begin outside of the accepted tokens replay what there is: nothing uses their
        results.
        """
        num_replayed = (rows.starts - self.committed[rows.slots]).clamp(0, self.max_guesses)
        num_committed = (num_replayed + rows.num_tokens - rows.num_guesses).clamp_min(0)
        self.committed.index_put_((rows.slots,), rows.starts + num_committed - num_replayed)
        kept = rows.num_guesses.clamp_max(self.max_guesses)
        parts = (rows.slots, rows.firsts, num_replayed, rows.num_tokens, num_committed, kept)
        return RowPlan(torch.stack(parts, 1), num_tokens, self.max_guesses)
