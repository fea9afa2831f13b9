"""Steps of decodes and chains of drafts that run on the device between two copies.

The host packs what it knows about a step into one buffer, which is copied to the device. From it
the device reads the tokens, positions and sampling rules; the block tables, and the last token and
length of each sequence, stay there. It runs the model, samples and verifies, and one copy returns
the tokens. No value is read by the host between, so that a step can be a graph, and can begin
before the one in front of it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.config.graph_sizes import most_padding_tokens
from specdec.kernels.device_batch import DeviceBatch
from specdec.kernels.forward_batch import HiddenStates
from specdec.sampling.device_sampler import (
    DeviceChains,
    SamplingKind,
    VerifiedChains,
    sample_on_device,
    verify_chains,
)
from specdec.sampling.verifiers.synthetic import num_kept_by_chance
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import BASE_MODEL, BlockTableDelta, StepRow
from specdec.worker.batch_state import SequenceState
from specdec.worker.device_buffers import HostBuffer, PendingTokens, recorded_event
from specdec.worker.device_head import DrafterParts, DraftRows, HeadDrafts
from specdec.worker.device_rules import PARAM_WORDS, kind_of, rules_of
from specdec.worker.device_state import DeviceState, DeviceStepLimits, slots_at
from specdec.worker.step_graphs import GraphReport, Launch, Stage, StepGraphs, StepShape

_DELTA_WORDS = 3  # sequence, entry, block
_DELTAS_PER_ROW = 2
MAX_IN_FLIGHT = 2

_STAGES = {
    SamplingKind.GREEDY: Stage.GREEDY,
    SamplingKind.SAMPLED: Stage.SAMPLED,
    SamplingKind.TRUNCATED: Stage.TRUNCATED,
}
_DRAFT_STAGES = {
    SamplingKind.GREEDY: Stage.DRAFT_GREEDY,
    SamplingKind.SAMPLED: Stage.DRAFT_SAMPLED,
    SamplingKind.TRUNCATED: Stage.DRAFT_TRUNCATED,
}


class _Word(IntEnum):
    """Columns of a row of the packed input, int64, behind the record of its sampling parameters.

    START: position of the first token, unless IS_PENDING: then that and the token are on the
    device, and so are the drafts of a head, of which there are at most NUM_DRAFTS, and MAX_END is
    that of the StepRow. NUM_KEPT: as in DeviceChains. NUM_NEXT: draft tokens that the head makes
    behind the row. The tokens follow the last column.
    """

    SLOT = PARAM_WORDS
    START = PARAM_WORDS + 1
    NUM_DRAFTS = PARAM_WORDS + 2
    IS_PENDING = PARAM_WORDS + 3
    NUM_PROMPT = PARAM_WORDS + 4
    NUM_KEPT = PARAM_WORDS + 5
    MAX_END = PARAM_WORDS + 6
    NUM_NEXT = PARAM_WORDS + 7
    TOKENS = PARAM_WORDS + 8


@runtime_checkable
class DeviceDecoder(Protocol):
    """A decoder that runs batches of fixed shape without the host."""

    @property
    def fits_graphs(self) -> bool:
        """Return whether a pass can be a graph, whose tables are as wide as the longest sequence.

        The host must read nothing, and the time must depend on the contexts alone.
        """
        ...

    def forward_on_device(self, batch: DeviceBatch, kv_cache: Tensor) -> Tensor:
        """Return hidden states [B * Q, hidden_size]; a collective call."""
        ...

    def tapped_on_device(
        self, batch: DeviceBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """Return these, and those that enter layers; taps: as in DraftHead."""
        ...

    @property
    def hidden_size(self) -> int: ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        ...


class _Packed(NamedTuple):
    """The input of a step on the device, by row.

    starts, first: position and id of the last known token. drafts: behind it, num_drafts of them.
    num_prompt: tokens of the prompt. num_kept: as in DeviceChains. params: records of
    SAMPLE_PARAMS. changes: of block tables.
    """

    params: Tensor  # [num_rows, PARAM_WORDS] int64
    places: Tensor  # [num_rows] int64, like the next five
    starts: Tensor
    first: Tensor
    num_drafts: Tensor
    num_prompt: Tensor
    num_kept: Tensor
    drafts: Tensor  # [num_rows, Q - 1] int64
    changes: Tensor  # [num_changes, 3] int64


class DeviceSteps:
    """Runs the steps of a rank on the device, with the state of their sequences there."""

    def __init__(
        self,
        model: DeviceDecoder,
        kv_cache: Tensor,
        shard: VocabShard,
        limits: DeviceStepLimits,
        graphs: StepGraphs,
        num_in_flight: int = MAX_IN_FLIGHT,
        drafter: DrafterParts | None = None,
    ) -> None:
        """kv_cache: with a block behind the `limits.num_blocks` of the pool.

        num_in_flight: most steps that are begun and not collected. drafter: drafts behind the
        steps.
        """
        device = kv_cache.device
        assert kv_cache.shape[1] == (limits.num_blocks + 1) * limits.block_size, "no padding block"
        self._model, self._kv_cache, self._shard = model, kv_cache, shard
        self._limits, self._graphs = limits, graphs
        self._state = DeviceState(limits, device)
        input_size = _num_words(limits.max_num_seqs, limits.max_query_len)
        # The drafts of all rows, if a head makes some, then the results of all rows.
        self._draft_width = 0 if drafter is None else 1 + limits.max_draft_tokens
        draft_size = limits.max_num_seqs * self._draft_width
        output_size = draft_size + limits.max_num_seqs * (1 + limits.max_query_len)
        self._input = torch.zeros(input_size, dtype=torch.int64, device=device)
        self._output = torch.zeros(output_size, dtype=torch.int64, device=device)
        self._offsets = torch.arange(limits.max_query_len, device=device)
        self._buffers = [HostBuffer(input_size, output_size, device) for _ in range(num_in_flight)]
        self._hidden = torch.zeros(
            limits.max_num_seqs * limits.max_query_len,
            model.hidden_size,
            dtype=kv_cache.dtype,
            device=device,
        )
        self._num_begun = 0
        self._most_padding = most_padding_tokens(model.hidden_size)
        self._drafts: HeadDrafts | None = None
        self._stages: dict[Stage, Launch] = {
            Stage.FORWARD: self._launch_forward,
            **{stage: partial(self._launch_sampling, kind) for kind, stage in _STAGES.items()},
        }
        if drafter is not None:
            drafts = self._output[:draft_size].view(limits.max_num_seqs, -1)
            self._drafts = HeadDrafts(drafter, self._state, limits, model.hidden_size, drafts)
            self._stages |= self._head_stages(self._drafts)

    def capture(self) -> GraphReport:
        """Capture the graphs, with rows of padding; call it before the first step."""
        return self._graphs.capture(self._stages, self._fill_with_padding)

    def close(self) -> None:
        """Destroy the graphs; no step may be in flight."""
        self._graphs.close()

    def replace_drafter(self, drafter: DrafterParts) -> None:
        """Draft with another head of the same sizes; the graphs of its passes are captured again.

        Steps may be in flight.
        """
        assert self._drafts is not None
        self._drafts.parts = drafter
        self._graphs.capture(self._head_stages(self._drafts), self._fill_with_padding)

    def update(self, released: Sequence[int], deltas: Sequence[BlockTableDelta]) -> None:
        """Apply the releases and block table deltas of a step; admissions need none."""
        self._state.update(released, deltas)

    def can_run(self, rows: Sequence[StepRow], states: Sequence[SequenceState]) -> bool:
        """Return whether the device can run a step of one row or more without the host."""
        return (
            len(rows) <= self._limits.max_num_seqs
            and all(map(_is_chain, rows))
            and all(state.runs_on_device for state in states)
            and max(map(_num_drafts, rows)) <= self._limits.max_draft_tokens
            and max(row.num_next_drafts for row in rows) <= max(0, self._draft_width - 1)
            and all(map(_knows_kept, rows, states))
            and self._num_padding(rows) <= self._most_padding
            and all(self._state.has_place(row.seq_id) for row in rows)
        )

    def _num_padding(self, rows: Sequence[StepRow]) -> int:
        """Return the tokens of a step's shape that are in no row, as where few rows have drafts."""
        counts = [1 + _num_drafts(row) for row in rows]
        shape = self._graphs.padded(StepShape(len(rows), max(counts), 0))
        return shape.num_rows * shape.query_len - sum(counts)

    def begin(
        self,
        rows: Sequence[StepRow],
        states: Sequence[SequenceState],
        num_kept: Sequence[int] | None = None,
    ) -> PendingTokens:
        """Begin a step that the device can run; does not wait for the device.

        A pending row continues the step before. num_kept: drafts of each row to accept whatever
        they are; None where the rules of the sequences decide. Raises torch.OutOfMemoryError, and
        then the step may be run again.
        """
        try:
            return self._begin(rows, states, num_kept)
        except torch.OutOfMemoryError:
            self._state.forget_tables(row.seq_id for row in rows)
            raise

    def _begin(
        self,
        rows: Sequence[StepRow],
        states: Sequence[SequenceState],
        num_kept: Sequence[int] | None,
    ) -> PendingTokens:
        query_len = 1 + max(map(_num_drafts, rows))
        kind = max(kind_of(state.admission.rules) for state in states)
        num_blocks = max(len(state.block_table) for state in states)
        shape = self._graphs.padded(StepShape(len(rows), query_len, num_blocks))
        num_kept = _num_kept(rows, states) if num_kept is None else num_kept
        host = self._buffers[self._num_begun % len(self._buffers)]
        self._num_begun += 1
        self._pack(host.words, rows, states, shape, num_kept)
        num_words = _num_words(shape.num_rows, shape.query_len)
        self._input[:num_words].copy_(host.input[:num_words], non_blocking=True)
        num_next = max(row.num_next_drafts for row in rows)
        self._launch(shape, kind, num_next)
        draft_size = shape.num_rows * self._draft_width
        output_size = draft_size + shape.num_rows * (1 + shape.query_len)
        host.output[:output_size].copy_(self._output[:output_size], non_blocking=True)
        drafts, results = host.output[:output_size].split((draft_size, output_size - draft_size))
        return PendingTokens(
            results.view(shape.num_rows, -1)[: len(rows)],
            drafts.view(shape.num_rows, -1)[: len(rows)] if num_next else None,
            recorded_event(self._input.device),
        )

    def _launch(self, shape: StepShape, kind: SamplingKind, num_next: int) -> None:
        """Launch a step, and behind it `num_next` draft tokens."""

        def run(stage: Stage, shape: StepShape) -> None:
            self._graphs.run(stage, shape, self._stages[stage])

        run(Stage.FORWARD, shape)
        if self._drafts is not None:
            run(Stage.FEATURES, shape)
        run(_STAGES[kind], shape)
        if num_next == 0:
            return
        run(Stage.PAIRS, shape)
        one = shape._replace(query_len=1)
        run(_DRAFT_STAGES[kind], one)
        for _ in range(num_next - 1):
            run(Stage.ADVANCE, one)
            run(_DRAFT_STAGES[kind], one)

    def _fill_with_padding(self, shape: StepShape) -> None:
        """Put a step of padding alone into the input buffer."""
        words = np.zeros(len(self._input), np.int64)
        self._pack(words, [], [], shape, [])
        self._input.copy_(torch.from_numpy(words))

    def _pack(
        self,
        words: NDArray[np.int64],
        rows: Sequence[StepRow],
        states: Sequence[SequenceState],
        shape: StepShape,
        num_kept: Sequence[int],
    ) -> None:
        """Write a step to the words of a host buffer, behind its rows those of padding."""
        num_rows, width = len(rows), _Word.TOKENS + shape.query_len
        table = words[: shape.num_rows * width].reshape(shape.num_rows, width)
        if num_rows:
            records = b"".join(state.sample_params for state in states)
            table[:num_rows, :PARAM_WORDS] = np.frombuffer(records, np.int64).reshape(num_rows, -1)
            table[:num_rows, PARAM_WORDS:] = [
                self._words(row, state, shape.query_len, kept)
                for row, state, kept in zip(rows, states, num_kept, strict=True)
            ]
        table[num_rows:] = 0
        table[num_rows:, _Word.SLOT] = self._state.padding_place
        changes = [
            change
            for row, state in zip(rows, states, strict=True)
            for change in self._state.table_changes(row.seq_id, state.block_table)
        ]
        most = _DELTAS_PER_ROW * shape.num_rows
        if len(changes) > most:  # behind a prompt, whose pass has the table from the host
            self._state.write_tables(torch.tensor(changes[most:]).to(self._input.device))
        deltas = words[table.size :][: most * _DELTA_WORDS].reshape(most, _DELTA_WORDS)
        deltas[:] = (self._state.padding_place, 0, self._limits.num_blocks)
        if changes:
            deltas[: len(changes)] = changes[:most]

    def _words(
        self, row: StepRow, state: SequenceState, query_len: int, num_kept: int
    ) -> tuple[int, ...]:
        """Return the words of a row behind its sampling parameters."""
        place = self._state.place(row.seq_id)
        tokens = (0,) if row.is_pending else row.token_ids
        padding = (0,) * (query_len - len(tokens))
        start, num_prompt = row.num_computed_tokens, state.admission.num_prompt_tokens
        head = (place, start, _num_drafts(row), int(row.is_pending), num_prompt, num_kept)
        return (*head, row.max_end, row.num_next_drafts, *tokens, *padding)

    @torch.inference_mode()
    def _launch_forward(self, shape: StepShape) -> None:
        """Launch the model on the step in the input buffer; its output is in the hidden buffer."""
        packed = self._unpack(shape)
        self._state.write_tables(packed.changes)
        batch = self._batch(packed, shape)
        if self._drafts is None:
            hidden = self._model.forward_on_device(batch, self._kv_cache)
        else:
            states = self._model.tapped_on_device(batch, self._kv_cache, self._drafts.taps)
            self._drafts.keep(states, batch)
            hidden = states.final
        self._hidden[: len(hidden)] = hidden

    @torch.inference_mode()
    def _launch_sampling(self, kind: SamplingKind, shape: StepShape) -> None:
        """Launch sampling and verification; the result is in the output buffer.

        It is [num_rows, 1 + Q]: the number of new tokens, then the tokens.
        """
        packed, state = self._unpack(shape), self._state
        num_tokens = shape.num_rows * shape.query_len
        logits = self._model.compute_logits(self._hidden[:num_tokens])
        rules = None
        if kind is not SamplingKind.GREEDY:
            positions = self._positions(packed, shape)
            rules = rules_of(packed.params, positions, packed.num_prompt)
        sample = sample_on_device(logits, rules, kind, self._shard)
        drafts = DeviceChains(packed.drafts, packed.num_drafts, packed.num_kept)
        tokens, counts = verify_chains(sample, drafts)
        last = tokens.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        state.num_tokens.index_copy_(0, packed.places, packed.starts + 1 + counts)
        last_tokens = torch.where(counts > 0, last, packed.first)
        state.last_tokens.index_copy_(0, packed.places, last_tokens)
        if self._drafts is not None:
            state.held_drafts[:, 0].index_fill_(0, packed.places, 0)
        torch.cat([counts[:, None], tokens], 1, out=self._results(shape))

    def _results(self, shape: StepShape) -> Tensor:
        """Return the part of the output buffer with the results of a step, [num_rows, 1 + Q]."""
        start = shape.num_rows * self._draft_width
        end = start + shape.num_rows * (1 + shape.query_len)
        return self._output[start:end].view(shape.num_rows, -1)

    def _head_stages(self, drafts: HeadDrafts) -> dict[Stage, Launch]:
        """Return the stages that a head runs."""
        return {
            Stage.FEATURES: self._launch_features,
            Stage.PAIRS: self._launch_pairs,
            Stage.ADVANCE: torch.inference_mode()(drafts.advance),
            **{
                stage: torch.inference_mode()(partial(drafts.select, kind))
                for kind, stage in _DRAFT_STAGES.items()
            },
        }

    @torch.inference_mode()
    def _launch_features(self, shape: StepShape) -> None:
        assert self._drafts is not None
        self._drafts.add_features(self._hidden[: shape.num_rows * shape.query_len])

    @torch.inference_mode()
    def _launch_pairs(self, shape: StepShape) -> None:
        """Launch the head's pass over the tokens that were verified."""
        assert self._drafts is not None
        table = self._rows(shape)
        results = self._results(shape)
        rows = DraftRows(
            table[:, :PARAM_WORDS],
            table[:, _Word.SLOT],
            table[:, _Word.NUM_PROMPT],
            table[:, _Word.NUM_NEXT],
        )
        self._drafts.run_pairs(rows, VerifiedChains(results[:, 1:], results[:, 0]), shape)

    def _rows(self, shape: StepShape) -> Tensor:
        """Return the rows in the input buffer, [num_rows, _Word.TOKENS + Q]."""
        width = _Word.TOKENS + shape.query_len
        return self._input[: shape.num_rows * width].view(shape.num_rows, width)

    def _unpack(self, shape: StepShape) -> _Packed:
        """Read the input buffer; for pending rows their token and position from the state."""
        table = self._rows(shape)
        changes = self._input[table.numel() : _num_words(shape.num_rows, shape.query_len)]
        places, is_pending = table[:, _Word.SLOT], table[:, _Word.IS_PENDING] > 0
        lengths, last_tokens = self._state.num_tokens[places], self._state.last_tokens[places]
        starts = torch.where(is_pending, lengths - 1, table[:, _Word.START])
        drafts, num_drafts = table[:, _Word.TOKENS + 1 :], table[:, _Word.NUM_DRAFTS]
        if self._drafts is not None:
            held = self._state.held_drafts[places]
            most = torch.minimum(held[:, 0], table[:, _Word.MAX_END] - starts - 1)
            num_held = torch.minimum(num_drafts, most).clamp_min(0)
            num_drafts = torch.where(is_pending, num_held, num_drafts)
            drafts = torch.where(is_pending[:, None], held[:, 1 : shape.query_len], drafts)
        return _Packed(
            params=table[:, :PARAM_WORDS],
            places=places,
            starts=starts,
            first=torch.where(is_pending, last_tokens, table[:, _Word.TOKENS]),
            drafts=drafts,
            num_drafts=num_drafts,
            num_prompt=table[:, _Word.NUM_PROMPT],
            num_kept=table[:, _Word.NUM_KEPT],
            changes=changes.view(-1, _DELTA_WORDS),
        )

    def _positions(self, packed: _Packed, shape: StepShape) -> Tensor:
        """Return the position of each token, [num_rows, Q]; padding repeats the last one."""
        offsets = self._offsets[: shape.query_len]
        return packed.starts[:, None] + torch.minimum(offsets, packed.num_drafts[:, None])

    def _batch(self, packed: _Packed, shape: StepShape) -> DeviceBatch:
        size, offsets = self._limits.block_size, self._offsets[: shape.query_len]
        positions = self._positions(packed, shape)
        tables = self._state.tables[packed.places, : shape.num_blocks]
        slots = slots_at(positions, tables, size)
        slots.masked_fill_(offsets > packed.num_drafts[:, None], self._limits.num_blocks * size)
        return DeviceBatch(
            input_ids=torch.cat([packed.first[:, None], packed.drafts], 1).flatten(),
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            block_tables=tables,
            context_lens=packed.starts + 1 + packed.num_drafts,
            query_len=shape.query_len,
        )


def _num_drafts(row: StepRow) -> int:
    """Return the draft tokens of a row, at most of one whose drafts the device holds."""
    return row.num_held_drafts if row.is_pending else row.num_draft_tokens


def _num_words(num_rows: int, query_len: int) -> int:
    """Return the size of the packed input of a step."""
    return num_rows * (_Word.TOKENS + query_len + _DELTAS_PER_ROW * _DELTA_WORDS)


def _num_kept(rows: Sequence[StepRow], states: Sequence[SequenceState]) -> list[int]:
    """Return the number of drafts of each row that are accepted by chance; -1 where none are."""
    num_kept = [-1] * len(rows)
    chosen = [
        (index, state.admission.rules, row.known_end - state.admission.num_prompt_tokens)
        for index, (row, state) in enumerate(zip(rows, states, strict=True))
        if state.admission.rules.acting_verifier == "synthetic"
    ]
    counts = num_kept_by_chance(
        [
            (rules, range(first, first + rows[index].num_draft_tokens))
            for index, rules, first in chosen
        ]
    )
    for (index, _, _), count in zip(chosen, counts, strict=True):
        num_kept[index] = count
    return num_kept


def _knows_kept(row: StepRow, state: SequenceState) -> bool:
    """Return whether the host knows which drafts of a row are accepted by chance, if some are."""
    is_by_chance = state.admission.rules.acting_verifier == "synthetic"
    return not (is_by_chance and row.is_pending and row.num_held_drafts)


def _is_chain(row: StepRow) -> bool:
    """Return whether a row is one known token and a chain of drafts.

    Rows with a grammar or an adapter need the host.
    """
    return (
        row.samples
        and row.adapter_id == BASE_MODEL
        and row.num_known_tokens == 1
        and row.parents is None
        and row.grammar_mask is None
        and not row.num_lookahead_tokens
        and not row.next_draft_depth
    )
