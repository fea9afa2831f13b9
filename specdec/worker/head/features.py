"""The target's output that a draft head reads, by KV slot: features, or the states after them.

A feature is a function of a token's hidden states, for some heads a projection of several layers.
While nothing is drafted, a pass only leaves its output here: the states of several passes are
written to their slots at once, and on a CPU projected when a head needs them (docs/adr/0036).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.reference.forward_batch import (
    AdapterRun,
    ForwardBatch,
    Indices,
    SlotMove,
    on_device,
    slots_of,
)
from specdec.models.heads.networks.base import DraftHead

MAX_WAITING_TOKENS = 128
"""Tokens of passes from which on their states are written to their slots."""


class _Pass(NamedTuple):
    """The hidden states that a head reads of a pass over `batch`, as in `DraftHead.features`."""

    batch: ForwardBatch
    states: Tensor


class HeadFeatures:
    """Features of the tokens in all slots of a pool, on one rank.

    All calls but `add` of a few tokens are collective, and ranks call them in the same order.
    """

    def __init__(
        self, head: DraftHead, num_slots: int, dtype: torch.dtype, *, stores_features: bool
    ) -> None:
        """Start with no pass. dtype: of what is stored.

        stores_features: whether slots have features, and not hidden states, which are larger for a
        head with several taps.
        """
        self._head = head
        self._num_slots, self._dtype = num_slots, dtype
        self._stores_features = stores_features or not head.feature_size
        self._slots: Tensor | None = None  # [num_slots, *shape of a token's states or feature]
        self._waiting: list[_Pass] = []
        self._num_waiting = 0

    def use(self, head: DraftHead) -> None:
        """Compute features with `head` from now on."""
        self.write()
        self._head = head

    @property
    def page(self) -> Tensor:
        """The features [num_slots, feature_size] of all slots, where these are stored.

        They are those of the passes up to the last `write`. Its memory stays the same.
        """
        assert self._stores_features, "slots have hidden states"
        if self._slots is None:
            size = (self._num_slots, self._head.feature_size)
            self._slots = torch.zeros(size, dtype=self._dtype, device=self._head.device)
        return self._slots

    def add(self, batch: ForwardBatch, states: Tensor) -> None:
        """Add what the head reads of a pass, as in `DraftHead.features`.

        Neither the states nor the block tables of the batch may change any more.
        """
        if not self._head.feature_size:
            return
        self._waiting.append(_Pass(batch, states))
        self._num_waiting += states.shape[0]
        if self._num_waiting >= MAX_WAITING_TOKENS:
            self.write()

    @torch.inference_mode()
    def read(self, slots: Sequence[int], runs: Sequence[AdapterRun] = ()) -> Tensor:
        """Return the features [len(slots), feature_size] of the tokens in slots.

        runs: the adapters of these tokens, which stored features do not have.
        """
        if not self._head.feature_size:
            return torch.empty(len(slots), 0)
        if not self._stores_features and (states := self._newest_states(slots)) is not None:
            return self._head.features(states.to(self._dtype), runs)
        self.write()
        assert self._slots is not None, "no pass has run"
        rows = self._slots[torch.tensor(slots, device=self._slots.device)]
        return rows if self._stores_features else self._head.features(rows, runs)

    @torch.inference_mode()
    def move(self, moves: Sequence[SlotMove]) -> None:
        """Move tokens along with the KV of the target."""
        if not self._head.feature_size:
            return
        self.write()
        assert self._slots is not None, "no pass has run"
        sources, targets = torch.tensor(moves, device=self._slots.device).unbind(1)
        self._slots.index_copy_(0, targets, self._slots[sources])

    @torch.inference_mode()
    def write(self) -> None:
        """Write the tokens of all waiting passes to their slots."""
        if not self._waiting:
            return
        states = torch.cat([each.states for each in self._waiting])
        chunks = [chunk for each in self._waiting for chunk in each.batch.chunks]
        slots = ForwardBatch(chunks, self._waiting[0].batch.block_size).slot_mapping
        if (last := _last_writes(slots)) is not None:
            slots, states = slots[last], states[torch.from_numpy(last).to(states.device)]
        rows = self._head.features(states) if self._stores_features else states
        rows = rows.to(self._dtype)
        if self._slots is None:
            self._slots = rows.new_zeros(self._num_slots, *rows.shape[1:])
        self._slots.index_copy_(0, on_device(slots, rows.device), rows)
        self._waiting.clear()
        self._num_waiting = 0

    def _newest_states(self, slots: Sequence[int]) -> Tensor | None:
        """Return the states of the tokens in slots, if the newest pass waits and has run them all.

        So it is in most steps: a draft continues the tokens that were just verified.
        """
        if not self._waiting:
            return None
        batch, states = self._waiting[-1]
        own = chain.from_iterable(
            slots_of(chunk.block_table, range(chunk.start, chunk.end), batch.block_size)
            for chunk in batch.chunks
        )
        places = {slot: place for place, slot in enumerate(own)}
        rows = [places.get(slot, -1) for slot in slots]
        if -1 in rows:
            return None
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        return states[rows[0] : rows[-1] + 1] if is_run else states[rows]


def _last_writes(slots: Indices) -> NDArray[np.intp] | None:
    """Return the index of the last write to each slot; None if none is written again.

    The slot of a rejected draft is, by the token in its place.
    """
    unique, from_the_end = np.unique(slots[::-1], return_index=True)
    if len(unique) == len(slots):
        return None
    return np.subtract(len(slots) - 1, from_the_end)
