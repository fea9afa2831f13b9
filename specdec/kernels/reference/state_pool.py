"""States of the recurrent layers of a rank's sequences, with exact rollback of guesses.

A state is *committed* at a position of its sequence, up to which every token is known. Beside it
are the inputs of the guesses after this position, the *tail*. Rollback writes nothing: a row that
begins r tokens after the position first replays the first r inputs of the tail, which were
accepted, and the others are dropped. Replay costs no projection of hidden states, and the tail a
vector of each guess. Where hidden states are smaller than inputs (Mamba), the tail has these, which
replay projects again. A draft model runs guesses one by one: each row counts those before it too,
and commits nothing.

The guesses of a target's row may be a tree (`types.drafts.draft_tree`): each begins with the state
of its parent. `keep_path` puts the inputs of the accepted nodes first in the tail.

Snapshots are copies of committed states, with which other sequences begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.reference.forward_batch import AdapterRun, Chunk, ForwardBatch
from specdec.kernels.reference.state_levels import StateLevels, SteppedRow
from specdec.types.drafts.draft_tree import Parents
from specdec.types.messages import BASE_MODEL

_MAX_RECURRENT_TOKENS = 16
"""Most known tokens of a row that the recurrence runs one by one; it runs guesses in any case."""


class StateSpan(NamedTuple):
    """The tokens that a pass runs through the recurrent layers for one row.

    first: place of the first input in the extended ones, which are `window` earlier inputs, then
    the replayed and the new ones. num_replayed: of the tail. num_known: new tokens that are no
    guesses; below 0 where replayed ones are guesses too. num_kept: guesses whose inputs are the
    tail after the pass. parents: of guesses that are a tree; none for a chain.
    """

    slot: int
    first: int
    num_replayed: int
    num_tokens: int
    num_known: int
    num_kept: int
    parents: Parents = ()

    @property
    def num_run(self) -> int:
        """Inputs that the recurrence runs."""
        return self.num_replayed + self.num_tokens

    @property
    def num_committed(self) -> int:
        """Inputs after which the state is committed."""
        return self.num_replayed + self.num_known

    @property
    def num_chunked(self) -> int:
        """Inputs that the recurrence runs in chunks; it runs the others one by one."""
        return self.num_committed if self.num_known > _MAX_RECURRENT_TOKENS else 0

    @property
    def stepped(self) -> SteppedRow:
        """The others. Their first place is one of the recurrence's: without the window."""
        num_chunked = self.num_chunked
        return SteppedRow(
            self.slot,
            self.first + num_chunked,
            self.num_run - num_chunked - len(self.parents),
            self.num_committed - num_chunked,
            self.parents,
        )


@dataclass(frozen=True)
class StatePlan:
    """The part of a pass that is the same for all recurrent layers.

    Its extended inputs, [N, num_inputs], are those of all rows, one after the other; see StateSpan.
    """

    spans: Sequence[StateSpan]
    window: int
    max_guesses: int  # of a tail
    has_hidden: bool  # whether tails are hidden states
    device: torch.device

    @property
    def slot_size(self) -> int:
        """Inputs of a slot: the window, and the longest tail where it is of inputs."""
        return self.window + (0 if self.has_hidden else self.max_guesses)

    @cached_property
    def num_inputs(self) -> int:
        """N."""
        return sum(self.window + span.num_run for span in self.spans)

    @cached_property
    def levels(self) -> StateLevels:
        """The order of the inputs that the recurrence runs one by one."""
        return StateLevels.of((span.stepped for span in self.spans), self.device)

    @cached_property
    def taps(self) -> Tensor | None:
        """Places of the inputs that a convolution reads for each input, [window + 1, N - window].

        None without trees: then they are the places up to its own.
        """
        if not any(span.parents for span in self.spans):
            return None
        places = [0, *range(self.num_inputs - 1)]  # no row reads before the first one
        for span in self.spans:
            first = self.begin(span) + span.num_run - len(span.parents)  # of the nodes
            # the base is at first - 1
            places[first : first + len(span.parents)] = (first + each for each in span.parents)
        before = torch.tensor(places, device=self.device)
        places = [torch.arange(self.window, self.num_inputs, device=self.device)]
        for _ in range(self.window):
            places.insert(0, before[places[0]])
        return torch.stack(places)

    @cached_property
    def stored(self) -> Tensor:
        """Index in the pool of the inputs that it has of the rows."""
        return self._indices(
            range(span.slot * self.slot_size, span.slot * self.slot_size + count)
            for span, count in self._num_stored()
        )

    @cached_property
    def stored_places(self) -> Tensor:
        """Their places in the extended inputs."""
        return self._indices(range(span.first, span.first + n) for span, n in self._num_stored())

    @cached_property
    def new_places(self) -> Tensor:
        """The places of the tokens of the pass, [T]."""
        return self._indices(
            range(self.begin(span) + span.num_replayed, self.begin(span) + span.num_run)
            for span in self.spans
        )

    @cached_property
    def run_places(self) -> Tensor:
        """The places of the inputs that recurrences run, [R + T] with R replayed ones."""
        return self._indices(
            range(self.begin(span), self.begin(span) + span.num_run) for span in self.spans
        )

    @cached_property
    def new_rows(self) -> Tensor:
        """Which of the inputs that recurrences run are those of the tokens of the pass, [T]."""
        return torch.searchsorted(self.run_places, self.new_places)

    @cached_property
    def replayed(self) -> Tensor:
        """Index in the tails of the hidden states that are replayed, [R]."""
        return self._indices(self._tail(span, span.num_replayed) for span in self.spans)

    @cached_property
    def kept_tails(self) -> Tensor:
        """Index in the tails of the hidden states that they have after the pass."""
        return self._indices(self._tail(span, span.num_kept) for span in self.spans)

    @cached_property
    def kept_rows(self) -> Tensor:
        """Which of the inputs that recurrences run those are."""
        places = self._indices(
            range(start, start + span.num_kept)
            for span in self.spans
            for start in (self.begin(span) + span.num_committed,)
        )
        return torch.searchsorted(self.run_places, places)

    def _tail(self, span: StateSpan, count: int) -> range:
        first = span.slot * self.max_guesses
        return range(first, first + count)

    @cached_property
    def kept(self) -> Tensor:
        """Index in the pool of the inputs that it has after the pass."""
        return self._indices(
            range(span.slot * self.slot_size, span.slot * self.slot_size + count)
            for span, count in self._num_kept()
        )

    @cached_property
    def kept_places(self) -> Tensor:
        """Their places in the extended inputs."""
        starts = ((span.first + span.num_committed, count) for span, count in self._num_kept())
        return self._indices(range(start, start + count) for start, count in starts)

    def input_runs(self, batch: ForwardBatch) -> list[AdapterRun]:
        """Return the runs of inputs that the recurrence runs with an adapter.

        They are counted as the outputs of the convolution: from `window` on.
        """
        return self._runs(batch, (span.first for span in self.spans))

    def hidden_runs(self, batch: ForwardBatch) -> list[AdapterRun]:
        """Return the runs of rows of `StatePool.replay` with an adapter."""
        if not self.has_hidden:
            return batch.adapter_runs
        return self._runs(batch, accumulate((span.num_run for span in self.spans), initial=0))

    def _runs(self, batch: ForwardBatch, firsts: Iterable[int]) -> list[AdapterRun]:
        return [
            AdapterRun(chunk.adapter_id, first, first + span.num_run)
            for chunk, span, first in zip(batch.chunks, self.spans, firsts, strict=False)
            if chunk.adapter_id != BASE_MODEL
        ]

    def of_hidden(self, values: Tensor) -> Tensor:
        """Return those of the tokens of the pass, of a value for each row of `StatePool.replay`."""
        return values if len(values) == len(self.new_places) else values[self.new_rows]

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return those of the tokens of the pass, of a value for each input but the first ones.

        values: [N - window, ...].
        """
        return values[self.new_places - self.window]

    def begin(self, span: StateSpan) -> int:
        """Return the place of the first input that the recurrence runs for a row."""
        return span.first + self.window

    def _num_stored(self) -> Iterator[tuple[StateSpan, int]]:
        is_apart = self.has_hidden
        return ((span, self.window + span.num_replayed * (not is_apart)) for span in self.spans)

    def _num_kept(self) -> Iterator[tuple[StateSpan, int]]:
        return ((span, self.window + span.num_kept * (not self.has_hidden)) for span in self.spans)

    def _indices(self, ranges: Iterator[range]) -> Tensor:
        indices = [index for each in ranges for index in each]
        return torch.tensor(indices, dtype=torch.int64, device=self.device)


@dataclass
class _Slot:
    """num_committed: position of the state. num_tail: inputs of guesses after it.

    is_checked: whether each row must begin at an accepted token.
    """

    num_committed: int = 0
    num_tail: int = 0
    is_checked: bool = True


class StatePool:
    """The states of at most `num_slots` sequences, which `BatchState` gives slots.

    inputs: [layers, num_slots, window + max_guesses, num_inputs], in the dtype of the model; where
    tails are hidden states, inputs have the window alone, and tails are [layers, num_slots,
    max_guesses, num_hidden].
    memory: [layers, num_slots, *memory], float32. saved_inputs, saved_memory: of snapshots,
    likewise, but without guesses.
    """

    def __init__(
        self,
        num_layers: int,
        window: int,
        num_inputs: int,
        memory: Sequence[int],
        *,
        num_slots: int,
        max_guesses: int,
        num_snapshots: int = 0,
        num_hidden: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the pool. max_guesses: of a row, of which the tail has room.

        num_hidden: of the hidden state of a guess; None where tails are inputs.
        """
        self.window, self.max_guesses = window, max_guesses
        self._has_hidden = num_hidden is not None
        size = window if self._has_hidden else window + max_guesses
        shape = (num_layers, num_slots, size, num_inputs)
        self.inputs = torch.zeros(shape, dtype=dtype, device=device)
        self.tails = self.inputs.new_zeros(num_layers, num_slots, max_guesses, num_hidden or 0)
        self.memory = torch.zeros((num_layers, num_slots, *memory), device=device)
        self.saved_inputs = self.inputs.new_zeros(num_layers, num_snapshots, window, num_inputs)
        self.saved_memory = self.memory.new_zeros(num_layers, num_snapshots, *memory)
        self._slots = [_Slot() for _ in range(num_slots)]

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def reset(self, slot: int, *, is_checked: bool = True) -> None:
        """Begin a sequence in a slot, at position 0.

        is_checked: False where rows may begin anywhere, as those of profiles do.
        """
        self._slots[slot] = _Slot(is_checked=is_checked)
        self.inputs[:, slot].zero_()
        self.tails[:, slot].zero_()
        self.memory[:, slot].zero_()

    def save(self, slot: int, snapshot: int, position: int) -> None:
        """Copy the state that a sequence has at a position."""
        own = self._slots[slot]
        assert own.num_committed == position or not own.is_checked, "a snapshot of another position"
        self.saved_inputs[:, snapshot] = self.inputs[:, slot, : self.window]
        self.saved_memory[:, snapshot] = self.memory[:, slot]

    def resume(self, slot: int, snapshot: int, position: int) -> None:
        """Begin a sequence in a slot with the state of a snapshot, taken at a position."""
        self._slots[slot] = _Slot(position)
        self.inputs[:, slot, : self.window] = self.saved_inputs[:, snapshot]
        self.memory[:, slot] = self.saved_memory[:, snapshot]

    def spoil(self, slot: int) -> None:
        """Record that the last row of a sequence has invalid logits: its state may be invalid.

        The result of a row after it is never used.
        """
        self._slots[slot].is_checked = False

    def keep_path(self, slot: int, nodes: Sequence[int]) -> None:
        """Keep the inputs of the accepted nodes of a tree, in order, as those that are replayed.

        Rows of profiles may have more nodes than the tail has room for.
        """
        kept = [node for node in nodes if node < self.max_guesses]
        if kept != list(range(len(kept))):
            tail = self.tails[:, slot] if self._has_hidden else self.inputs[:, slot, self.window :]
            tail[:, : len(kept)] = tail[:, kept]
        self._slots[slot].num_tail = len(kept)

    def plan(self, batch: ForwardBatch) -> StatePlan:
        """Plan a pass, which commits states; call it once for each pass."""
        spans, first = list[StateSpan](), 0
        for chunk in batch.chunks:
            spans.append(self._advance(chunk, first))
            first += self.window + spans[-1].num_run
        return StatePlan(spans, self.window, self.max_guesses, self._has_hidden, self.inputs.device)

    def _advance(self, chunk: Chunk, first: int) -> StateSpan:
        """Return the span of a row, after which its slot is committed."""
        parents = chunk.parents or ()
        assert len(parents) in (0, chunk.num_guesses), "guesses beside a tree"
        slot, num_tokens = self._slots[chunk.state_slot], len(chunk.token_ids)
        num_replayed = chunk.start - slot.num_committed
        if not slot.is_checked:
            num_replayed = max(0, min(num_replayed, slot.num_tail))
        assert 0 <= num_replayed <= slot.num_tail, "a row begins outside the accepted tokens"
        assert chunk.num_guesses <= self.max_guesses or not slot.is_checked, "too many guesses"
        num_known = num_tokens - chunk.num_guesses
        assert num_replayed + num_known >= 0 or not slot.is_checked, "guesses that are committed"
        num_known = max(num_known, -num_replayed)
        slot.num_committed = chunk.start + num_known
        slot.num_tail = min(chunk.num_guesses, self.max_guesses)
        return StateSpan(
            chunk.state_slot, first, num_replayed, num_tokens, num_known, slot.num_tail, parents
        )

    def replay(self, layer: int, x: Tensor, plan: StatePlan) -> Tensor:
        """Return the hidden states whose inputs a layer needs, and store those of guesses.

        x: [T, num_hidden], of the pass's tokens; the result is [R + T, num_hidden], or x where
        tails are inputs.
        """
        if not plan.has_hidden:
            return x
        rows, tails = x, self.tails[layer].flatten(0, 1)
        if len(plan.replayed):
            rows = x.new_empty(len(plan.run_places), x.shape[1])
            is_new = torch.zeros(len(rows), dtype=torch.bool, device=x.device)
            is_new[plan.new_rows] = True
            rows[is_new], rows[~is_new] = x, tails[plan.replayed]
        tails[plan.kept_tails] = rows[plan.kept_rows]
        return rows

    def extend(self, layer: int, inputs: Tensor, plan: StatePlan) -> Tensor:
        """Return the extended inputs of a layer, [N, num_inputs], and store what later rows need.

        inputs: of the pass's tokens, or of what `replay` returns.
        """
        extended = inputs.new_empty(plan.num_inputs, inputs.shape[1])
        stored = self.inputs[layer].flatten(0, 1)
        extended[plan.stored_places] = stored[plan.stored]
        extended[plan.run_places if plan.has_hidden else plan.new_places] = inputs
        stored[plan.kept] = extended[plan.kept_places]
        return extended
