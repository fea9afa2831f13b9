"""Steps of decodes and chains of drafts that run on the device between two copies.

The host packs what it knows about a step into one buffer, which is copied to the device. From it
the device reads the tokens, positions and sampling rules; the block tables, and the last token and
length of each sequence, stay there. It runs the model, samples and verifies, and one copy returns
the tokens. No value is read by the host between, so that a step can be a graph, and can begin
before the one in front of it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.config.graph_sizes import most_padding_tokens
from specdec.kernels.device_batch import DeviceBatch
from specdec.kernels.sample import SAMPLE_PARAMS
from specdec.sampling.device_sampler import (
    DeviceChains,
    DeviceRules,
    SamplingKind,
    sample_on_device,
    verify_chains,
)
from specdec.sampling.device_truncation import DeviceLimits
from specdec.sampling.gumbel import NoiseKeys
from specdec.sampling.verifiers.synthetic import num_kept_by_chance
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import BASE_MODEL, BlockTableDelta, StepRow
from specdec.types.sampling_spec import SamplingRules
from specdec.worker.batch_state import SequenceState
from specdec.worker.step_graphs import GraphReport, Launch, Stage, StepGraphs, StepShape

_PARAM_WORDS = SAMPLE_PARAMS.itemsize // 8
_DELTA_WORDS = 3  # sequence, entry, block
_DELTAS_PER_ROW = 2
MAX_IN_FLIGHT = 2

_STAGES = {
    SamplingKind.GREEDY: Stage.GREEDY,
    SamplingKind.SAMPLED: Stage.SAMPLED,
    SamplingKind.TRUNCATED: Stage.TRUNCATED,
}


class _Word(IntEnum):
    """Columns of a row of the packed input, int64, behind the record of its sampling parameters.

    START: position of the first token, unless IS_PENDING: then that and the token are on the
    device. NUM_KEPT: as in DeviceChains. The tokens follow the last column.
    """

    SLOT = _PARAM_WORDS
    START = _PARAM_WORDS + 1
    NUM_DRAFTS = _PARAM_WORDS + 2
    IS_PENDING = _PARAM_WORDS + 3
    NUM_PROMPT = _PARAM_WORDS + 4
    NUM_KEPT = _PARAM_WORDS + 5
    TOKENS = _PARAM_WORDS + 6


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

    @property
    def hidden_size(self) -> int: ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        ...


@dataclass(frozen=True)
class DeviceStepLimits:
    """Sizes of the buffers of a rank's steps on the device.

    num_blocks: of the pool; the block behind them is for padding.
    """

    max_num_seqs: int
    max_draft_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int

    @property
    def max_query_len(self) -> int:
        """Most tokens of a sequence in a step: the last known one, then drafts."""
        return 1 + self.max_draft_tokens

    @property
    def blocks_of_longest(self) -> int:
        """Blocks of a sequence of max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)


class DeviceState:
    """State of the sequences of a rank that is on the device, by a place for each.

    The place behind the last is for rows of padding.
    """

    def __init__(self, limits: DeviceStepLimits, device: torch.device) -> None:
        num_places = limits.max_num_seqs + 1
        size = (num_places, limits.blocks_of_longest)
        self.tables = torch.full(size, limits.num_blocks, dtype=torch.int64, device=device)
        self.num_tokens = torch.ones(num_places, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(num_places, dtype=torch.int64, device=device)
        self.padding_place = limits.max_num_seqs
        self._free = list(reversed(range(limits.max_num_seqs)))
        self._places: dict[int, int] = {}
        self._num_valid: dict[int, int] = {}  # entries of a table that are on the device

    def update(self, released: Sequence[int], deltas: Sequence[BlockTableDelta]) -> None:
        """Drop released sequences, and the ends of tables that have changed."""
        for seq_id in released:
            if seq_id in self._places:
                self._free.append(self._places.pop(seq_id))
                del self._num_valid[seq_id]
        for delta in deltas:
            if delta.seq_id in self._num_valid:
                num_valid = self._num_valid[delta.seq_id]
                self._num_valid[delta.seq_id] = min(num_valid, delta.start)

    def has_place(self, seq_id: int) -> bool:
        """Return whether there is a place for a sequence; takes a free one if it has none."""
        if seq_id in self._places:
            return True
        if not self._free:
            return False
        self._places[seq_id] = self._free.pop()
        self._num_valid[seq_id] = 0
        return True

    def place(self, seq_id: int) -> int:
        """Return the place of a sequence, which has one."""
        return self._places[seq_id]

    def table_changes(self, seq_id: int, table: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the entries of a table that the device lacks: place, index and block of each."""
        place, start = self._places[seq_id], self._num_valid[seq_id]
        if start == len(table):
            return []
        self._num_valid[seq_id] = len(table)
        return [(place, index, table[index]) for index in range(start, len(table))]

    def forget_tables(self, seq_ids: Iterable[int]) -> None:
        """Write the tables of sequences again with their next step."""
        for seq_id in seq_ids:
            self._num_valid[seq_id] = 0

    def write_tables(self, changes: Tensor) -> None:
        """Write entries of tables; changes: [N, 3] int64, as from `table_changes`."""
        self.tables.index_put_((changes[:, 0], changes[:, 1]), changes[:, 2])


@dataclass(frozen=True)
class PendingTokens:
    """The new tokens of a step that the device runs."""

    _result: Tensor  # [num_rows, 1 + Q] int64 on the host: number of new tokens, sampled tokens
    _done: torch.cuda.Event | None  # None where the device is the host

    def collect(self) -> list[tuple[int, ...]]:
        """Wait for the step; return the new tokens of each row, none for invalid logits."""
        if self._done is not None:
            self._done.synchronize()
        return [tuple(tokens[:count]) for count, *tokens in self._result.tolist()]


class _Packed(NamedTuple):
    """The input of a step on the device, by row.

    starts, first: position and id of the last known token. drafts: behind it, num_drafts of them.
    num_prompt: tokens of the prompt. num_kept: as in DeviceChains. params: records of
    SAMPLE_PARAMS. changes: of block tables.
    """

    params: Tensor  # [num_rows, _PARAM_WORDS] int64
    places: Tensor  # [num_rows] int64, like the next five
    starts: Tensor
    first: Tensor
    num_drafts: Tensor
    num_prompt: Tensor
    num_kept: Tensor
    drafts: Tensor  # [num_rows, Q - 1] int64
    changes: Tensor  # [num_changes, 3] int64


class _HostBuffer:
    """Input and output of one step on the host, in memory that a device copies from and to."""

    def __init__(self, input_size: int, output_size: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.input = torch.zeros(input_size, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        self.output = torch.zeros(
            output_size, dtype=torch.int64, device="cpu", pin_memory=is_pinned
        )
        self.words: NDArray[np.int64] = self.input.numpy()


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
    ) -> None:
        """kv_cache: with a block behind the `limits.num_blocks` of the pool.

        num_in_flight: most steps that are begun and not collected.
        """
        device = kv_cache.device
        assert kv_cache.shape[1] == (limits.num_blocks + 1) * limits.block_size, "no padding block"
        self._model, self._kv_cache, self._shard = model, kv_cache, shard
        self._limits, self._graphs = limits, graphs
        self._state = DeviceState(limits, device)
        input_size = _num_words(limits.max_num_seqs, limits.max_query_len)
        output_size = limits.max_num_seqs * (1 + limits.max_query_len)
        self._input = torch.zeros(input_size, dtype=torch.int64, device=device)
        self._output = torch.zeros(output_size, dtype=torch.int64, device=device)
        self._offsets = torch.arange(limits.max_query_len, device=device)
        self._buffers = [_HostBuffer(input_size, output_size, device) for _ in range(num_in_flight)]
        self._hidden = torch.zeros(
            limits.max_num_seqs * limits.max_query_len,
            model.hidden_size,
            dtype=kv_cache.dtype,
            device=device,
        )
        self._num_begun = 0
        self._most_padding = most_padding_tokens(model.hidden_size)
        self._stages: Mapping[Stage, Launch] = {
            Stage.FORWARD: self._launch_forward,
            **{stage: partial(self._launch_sampling, kind) for kind, stage in _STAGES.items()},
        }

    def capture(self) -> GraphReport:
        """Capture the graphs, with rows of padding; call it before the first step."""
        return self._graphs.capture(self._stages, self._fill_with_padding)

    def close(self) -> None:
        """Destroy the graphs; no step may be in flight."""
        self._graphs.close()

    def update(self, released: Sequence[int], deltas: Sequence[BlockTableDelta]) -> None:
        """Apply the releases and block table deltas of a step; admissions need none."""
        self._state.update(released, deltas)

    def can_run(self, rows: Sequence[StepRow], states: Sequence[SequenceState]) -> bool:
        """Return whether the device can run a step of one row or more without the host."""
        return (
            len(rows) <= self._limits.max_num_seqs
            and all(map(_is_chain, rows))
            and all(state.runs_on_device for state in states)
            and max(row.num_draft_tokens for row in rows) <= self._limits.max_draft_tokens
            and self._num_padding(rows) <= self._most_padding
            and all(self._state.has_place(row.seq_id) for row in rows)
        )

    def _num_padding(self, rows: Sequence[StepRow]) -> int:
        """Return the tokens of a step's shape that are in no row, as where few rows have drafts."""
        counts = [1 + row.num_draft_tokens for row in rows]
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
        query_len = 1 + max(row.num_draft_tokens for row in rows)
        kind = max(_kind(state.admission.rules) for state in states)
        num_blocks = max(len(state.block_table) for state in states)
        shape = self._graphs.padded(StepShape(len(rows), query_len, num_blocks))
        num_kept = _num_kept(rows, states) if num_kept is None else num_kept
        host = self._pack(rows, states, shape, num_kept)
        num_words = _num_words(shape.num_rows, shape.query_len)
        self._input[:num_words].copy_(host.input[:num_words], non_blocking=True)
        for stage in (Stage.FORWARD, _STAGES[kind]):
            self._graphs.run(stage, shape, self._stages[stage])
        size = (shape.num_rows, 1 + shape.query_len)
        num_results = size[0] * size[1]
        host.output[:num_results].copy_(self._output[:num_results], non_blocking=True)
        return PendingTokens(
            host.output[:num_results].view(size)[: len(rows)], _recorded(self._input.device)
        )

    def _fill_with_padding(self, shape: StepShape) -> None:
        """Put a step of padding alone into the input buffer."""
        self._input.copy_(self._pack([], [], shape, []).input)

    def _pack(
        self,
        rows: Sequence[StepRow],
        states: Sequence[SequenceState],
        shape: StepShape,
        num_kept: Sequence[int],
    ) -> _HostBuffer:
        """Write a step to the next host buffer, behind its rows those of padding."""
        host = self._buffers[self._num_begun % len(self._buffers)]
        self._num_begun += 1
        num_rows, width = len(rows), _Word.TOKENS + shape.query_len
        table = host.words[: shape.num_rows * width].reshape(shape.num_rows, width)
        if num_rows:
            records = b"".join(state.sample_params for state in states)
            table[:num_rows, :_PARAM_WORDS] = np.frombuffer(records, np.int64).reshape(num_rows, -1)
            table[:num_rows, _PARAM_WORDS:] = [
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
        deltas = host.words[table.size :][: most * _DELTA_WORDS].reshape(most, _DELTA_WORDS)
        deltas[:] = (self._state.padding_place, 0, self._limits.num_blocks)
        if changes:
            deltas[: len(changes)] = changes[:most]
        return host

    def _words(
        self, row: StepRow, state: SequenceState, query_len: int, num_kept: int
    ) -> tuple[int, ...]:
        """Return the words of a row behind its sampling parameters."""
        place = self._state.place(row.seq_id)
        tokens = (0,) if row.is_pending else row.token_ids
        padding = (0,) * (query_len - len(tokens))
        start, num_prompt = row.num_computed_tokens, state.admission.num_prompt_tokens
        head = (place, start, row.num_draft_tokens, int(row.is_pending), num_prompt, num_kept)
        return (*head, *tokens, *padding)

    @torch.inference_mode()
    def _launch_forward(self, shape: StepShape) -> None:
        """Launch the model on the step in the input buffer; its output is in the hidden buffer."""
        packed = self._unpack(shape)
        self._state.write_tables(packed.changes)
        batch = self._batch(packed, shape)
        self._hidden[: len(batch.input_ids)] = self._model.forward_on_device(batch, self._kv_cache)

    @torch.inference_mode()
    def _launch_sampling(self, kind: SamplingKind, shape: StepShape) -> None:
        """Launch sampling and verification; the result is in the output buffer.

        It is [num_rows, 1 + Q]: the number of new tokens, then the tokens.
        """
        packed, state = self._unpack(shape), self._state
        num_tokens = shape.num_rows * shape.query_len
        logits = self._model.compute_logits(self._hidden[:num_tokens])
        rules = (
            None if kind is SamplingKind.GREEDY else _rules(packed, self._positions(packed, shape))
        )
        sample = sample_on_device(logits, rules, kind, self._shard)
        drafts = DeviceChains(packed.drafts, packed.num_drafts, packed.num_kept)
        tokens, counts = verify_chains(sample, drafts)
        last = tokens.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        state.num_tokens.index_copy_(0, packed.places, packed.starts + 1 + counts)
        last_tokens = torch.where(counts > 0, last, packed.first)
        state.last_tokens.index_copy_(0, packed.places, last_tokens)
        results = self._output[: shape.num_rows * (1 + shape.query_len)]
        torch.cat([counts[:, None], tokens], 1, out=results.view(shape.num_rows, -1))

    def _unpack(self, shape: StepShape) -> _Packed:
        """Read the input buffer; for pending rows their token and position from the state."""
        width = _Word.TOKENS + shape.query_len
        num_words = shape.num_rows * width
        changes = self._input[num_words : _num_words(shape.num_rows, shape.query_len)]
        table = self._input[:num_words].view(shape.num_rows, width)
        places, is_pending = table[:, _Word.SLOT], table[:, _Word.IS_PENDING] > 0
        lengths, last_tokens = self._state.num_tokens[places], self._state.last_tokens[places]
        return _Packed(
            params=table[:, :_PARAM_WORDS],
            places=places,
            starts=torch.where(is_pending, lengths - 1, table[:, _Word.START]),
            first=torch.where(is_pending, last_tokens, table[:, _Word.TOKENS]),
            drafts=table[:, _Word.TOKENS + 1 :],
            num_drafts=table[:, _Word.NUM_DRAFTS],
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
        slots = tables.gather(1, positions // size) * size + positions % size
        slots.masked_fill_(offsets > packed.num_drafts[:, None], self._limits.num_blocks * size)
        return DeviceBatch(
            input_ids=torch.cat([packed.first[:, None], packed.drafts], 1).flatten(),
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            block_tables=tables,
            context_lens=packed.starts + 1 + packed.num_drafts,
            query_len=shape.query_len,
        )


def _rules(packed: _Packed, positions: Tensor) -> DeviceRules:
    """Return the sampling parameters of all rows of logits.

    positions: [num_rows, Q] int64, of the tokens that run; each samples the token behind it.
    """
    words = packed.params.contiguous()
    halves = words.view(torch.float32)

    def spread(values: Tensor) -> Tensor:
        return values[:, None].expand_as(positions).flatten()

    return DeviceRules(
        temperatures=spread(halves[:, _half("temperature")]),
        limits=DeviceLimits(
            top_k=spread(words[:, _word("top_k")]),
            top_p=spread(words.view(torch.float64)[:, _word("top_p")]),
            min_scores=spread(halves[:, _half("min_score")]),
        ),
        keys=NoiseKeys(
            seeds=spread(words[:, _word("seed")]),
            choices=spread(words.view(torch.int32)[:, _half("choice")].long() & _UINT32),
            positions=(positions + 1 - packed.num_prompt[:, None]).flatten(),
        ),
    )


_UINT32 = 2**32 - 1


def _word(name: str) -> int:
    """Return the index of a field of SAMPLE_PARAMS in 8-byte words."""
    fields = SAMPLE_PARAMS.fields
    assert fields is not None, "SAMPLE_PARAMS has fields"
    return int(fields[name][1]) // 8


def _half(name: str) -> int:
    """Return the index of a field of SAMPLE_PARAMS in 4-byte words."""
    fields = SAMPLE_PARAMS.fields
    assert fields is not None, "SAMPLE_PARAMS has fields"
    return int(fields[name][1]) // 4


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
    )


def _kind(rules: SamplingRules) -> SamplingKind:
    if rules.temperature == 0:
        return SamplingKind.GREEDY
    is_truncated = rules.top_k > 0 or rules.top_p < 1 or rules.min_p > 0
    return SamplingKind.TRUNCATED if is_truncated else SamplingKind.SAMPLED


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind what the device was given so far; None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
