"""The forward pass as one call of the native library: Python bindings of decoder.cpp."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int32, c_int64
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.cpu.build import declare
from specdec.kernels.cpu.large_memory import huge_page_allocator
from specdec.kernels.cpu.lora import AdapterRunStruct, LoraArrays, run_structs
from specdec.kernels.cpu.matrix import FORMATS, MatrixStruct
from specdec.kernels.cpu.recurrence import (
    PassStates,
    RecurrentShapeStruct,
    RecurrentWeightsStruct,
    StatePoolStruct,
)
from specdec.kernels.cpu.shared_memory import SharedMemory
from specdec.kernels.reference.forward_batch import ForwardBatch, HiddenStates, SlotMove
from specdec.types.drafts.draft_tree import ancestors

_DONE, _NEEDS_MEMORY = 0, 2
"""Values of `PassResult` in decoder.h; any other value means a lost peer."""

_Address = ctypes.c_void_p
_AllReduceCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(ctypes.c_float), c_int64)


class NormStruct(ctypes.Structure):
    """Weight and bias of a norm, float32; without a weight there is no norm."""

    _fields_ = (("weight", _Address), ("bias", _Address))


class TraitsStruct(ctypes.Structure):
    """`Traits` in decoder.h; the enums have the order of those in `models.config.traits`."""

    _fields_ = (
        *((name, c_int32) for name in ("norm", "qk_norm", "activation", "has_gate")),
        *((name, c_int32) for name in ("has_attention_gate", "is_parallel")),
        *((name, ctypes.c_float) for name in ("attention_scale", "attention_softcap")),
        *((name, ctypes.c_float) for name in ("embedding_scale", "residual_scale")),
        *((name, c_int32) for name in ("num_experts", "experts_per_token")),
        *((name, c_int32) for name in ("normalizes_experts", "scores_by_sigmoid")),
        *((name, c_int32) for name in ("num_expert_groups", "num_chosen_groups")),
        ("routing_scale", ctypes.c_float),
        *((name, c_int32) for name in ("adds_two_best", "rotates_before_norms")),
        ("scales_expert_inputs", c_int32),
    )


class LatentShapeStruct(ctypes.Structure):
    """`LatentShape` in decoder.h; rank is 0 without latent attention."""

    _fields_ = tuple((name, c_int64) for name in ("rank", "query_rank", "plain_dim", "value_dim"))


class LatentWeightsStruct(ctypes.Structure):
    """`LatentWeights` in decoder.h."""

    _fields_ = (
        ("query_up", MatrixStruct),
        *((name, _Address) for name in ("query_norm", "kv_norm")),
        *((name, MatrixStruct) for name in ("to_keys", "to_values")),
    )


class ExpertStruct(ctypes.Structure):
    """`Expert` in decoder.h."""

    _fields_ = (("gate_up", MatrixStruct), ("down", MatrixStruct))


class LayerStruct(ctypes.Structure):
    """Weights of a layer on one rank; norms are float32. window: 0 without a limit.

    cos, sin: [max_positions, rotary_dim / 2] float32; None without rotary embedding.
    sees_ahead: whether attention is not causal within a pass. activation: parameters of xIELU, [4]
    float32; query_scales: [max_positions] float32; None without.
    """

    _fields_ = (
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("router", MatrixStruct),
        *((name, ctypes.POINTER(ExpertStruct)) for name in ("experts", "shared")),
        *((name, _Address) for name in ("shared_gate", "choice_bias")),
        *((name, c_int64) for name in ("first_expert", "num_own_experts")),
        ("input_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("attention_output_norm", NormStruct),
        ("mlp_output_norm", NormStruct),
        ("latent", ctypes.POINTER(LatentWeightsStruct)),
        ("recurrent", ctypes.POINTER(RecurrentWeightsStruct)),
        ("query_norm", _Address),
        ("key_norm", _Address),
        ("sinks", _Address),
        ("cos", _Address),
        ("sin", _Address),
        ("window", c_int64),
        ("sees_ahead", c_int32),
        *((name, _Address) for name in ("activation", "query_scales")),
    )


class EmbeddingStruct(ctypes.Structure):
    """Embeddings of consecutive tokens: a table, or the packed matrix of a tied output head."""

    _fields_ = (
        ("packed", _Address),
        ("table", _Address),
        ("format", c_int32),
        ("first_token", c_int64),
        ("num_tokens", c_int64),
    )


class DecoderStruct(ctypes.Structure):
    """`Decoder` in decoder.h: one rank of a model."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden_size", "num_hidden_units", "num_expert_units")),
        *((name, c_int64) for name in ("num_shared_units", "num_heads")),
        *((name, c_int64) for name in ("num_kv_heads", "heads_per_kv", "first_in_group")),
        *((name, c_int64) for name in ("head_dim", "rotary_dim", "num_layers")),
        *((name, c_int64) for name in ("num_model_heads", "num_model_kv_heads")),
        *((name, c_int64) for name in ("first_counted_kv_head", "first_position")),
        ("norm_eps", ctypes.c_float),
        ("rank", c_int32),
        ("traits", TraitsStruct),
        ("latent", LatentShapeStruct),
        ("recurrent", RecurrentShapeStruct),
        ("embedding", EmbeddingStruct),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("final_norm", NormStruct),
        ("communicator", _Address),
        ("all_reduce", _AllReduceCallback),
    )


class BatchStruct(ctypes.Structure):
    """`Batch` in batch.h."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "block_size")),
        *((name, _Address) for name in ("input_ids", "query_starts")),
        *((name, _Address) for name in ("context_lens", "block_tables")),
        *((name, _Address) for name in ("num_nodes", "ancestors")),
        ("adapter_runs", ctypes.POINTER(AdapterRunStruct)),
        ("num_adapter_runs", c_int64),
        ("states", ctypes.POINTER(StatePoolStruct)),
    )


class KvCacheStruct(ctypes.Structure):
    """A KV cache as returned by `ModelKernel.new_kv_cache`."""

    _fields_ = (("data", _Address), ("format", c_int32), ("num_blocks", c_int64))

    @classmethod
    def of(cls, kv_cache: Tensor) -> KvCacheStruct:
        """Return the struct of a cache, which must outlive it."""
        return cls(kv_cache.data_ptr(), FORMATS[kv_cache.dtype], kv_cache.shape[2])


class _TapsStruct(ctypes.Structure):
    _fields_ = (("layers", _Address), ("count", c_int64), ("output", _Address))


AllReduce = SharedMemory | Callable[[Tensor], object]
"""All-reduce over the ranks, in place: inside the kernels, or by a Python function."""


class _WorkspaceStruct(ctypes.Structure):
    _fields_ = (("memory", _Address), ("size", c_int64), ("needed", c_int64))


class ModelKernel:
    """Calls with the weights of one rank. Not thread-safe: they share a workspace.

    kernels: names without `specdec_`, and the types of their own arguments (`call`).
    adapters: those that are loaded, by id, which may change between passes; None where none can be.
    """

    kernels: ClassVar[Mapping[str, tuple[type, ...]]]

    def __init__(
        self,
        library: ctypes.CDLL,
        struct: ctypes.Structure,
        max_positions: int,
        all_reduce: AllReduce | None = None,
    ) -> None:
        """struct: a decoder, or a head with one; its creator owns the memory that it points to.

        max_positions: limit of each context length. all_reduce: sums over the ranks; None for a
        single rank.
        """
        self.library, self._struct = library, cast(Any, struct)
        self.model: DecoderStruct = getattr(self._struct, "decoder", self._struct)
        self.max_positions = max_positions
        self.all_reduce = all_reduce
        self.adapters: dict[int, LoraArrays] | None = None
        self._failure: BaseException | None = None
        if isinstance(all_reduce, SharedMemory):
            self.model.communicator = all_reduce.communicator
        elif all_reduce is not None:
            self.model.all_reduce = _AllReduceCallback(self._all_reduce_in_python)
        self._workspace = _WorkspaceStruct()
        structs = (_WorkspaceStruct, type(struct), BatchStruct, KvCacheStruct)
        shared = (c_int32, *(ctypes.POINTER(each) for each in structs))
        signatures = {name: (*shared, *own, c_int32) for name, own in self.kernels.items()}
        declare(library, **signatures)

    def new_kv_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [KV layers, num_kv_heads, num_blocks, 2, block_size * head_dim].

        A block holds keys as [head_dim, block_size] and values as [block_size, head_dim]. With
        latent attention it holds keys as [block_size, head_dim], of which the values are a part,
        and the fourth dimension is 1. Pages that were never written take no memory.
        """
        model = self.model
        block = (1 if model.latent.rank else 2, block_size * model.head_dim)
        num_layers = model.num_layers - model.recurrent.num_layers
        shape = (num_layers, model.num_kv_heads, num_blocks, *block)
        num_bytes = math.prod(shape) * dtype.itemsize
        return huge_page_allocator().allocate(num_bytes).view(dtype).view(shape)

    def call(self, name: str, batch: BatchArrays, kv_cache: Tensor, *arguments: Any) -> None:
        """Run a pass over a batch by a kernel, in a workspace that grows as it needs.

        Raises RuntimeError when a peer is lost, or the exception that `all_reduce` raised.
        """
        function = getattr(self.library, f"specdec_{name}")
        shared = self._struct, batch.struct, KvCacheStruct.of(kv_cache)
        arguments = *shared, *arguments, torch.get_num_threads()
        result = function(self._workspace, *arguments)
        if result == _NEEDS_MEMORY:
            size = self._workspace.needed
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._workspace = _WorkspaceStruct(self._memory.data_ptr(), size)
            result = function(self._workspace, *arguments)
            assert result != _NEEDS_MEMORY
        if result != _DONE:
            failure, self._failure = self._failure, None
            raise failure or RuntimeError("a rank has ended, or did not respond in time")

    def _all_reduce_in_python(self, data: ctypes._Pointer[ctypes.c_float], count: int) -> bool:
        """Run the Python all-reduce; called from C++, so an exception is stored, not raised.

        data: [count].
        """
        assert callable(self.all_reduce)
        try:
            self.all_reduce(torch.from_numpy(np.ctypeslib.as_array(data, (count,))))
        except BaseException as error:
            self._failure = error
            return False
        return True


class DecoderKernel(ModelKernel):
    """Forward pass of one rank of a decoder."""

    kernels: ClassVar = {"decoder_forward": (ctypes.POINTER(_TapsStruct), _Address)}

    def forward(
        self, batch: ForwardBatch, kv_cache: Tensor, states: PassStates | None = None
    ) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size] in float32.

        kv_cache: as returned by `new_kv_cache`. states: those of recurrent layers, which are
        committed. Raises as `call` does.
        """
        return self._forward(self._arrays(batch, states), kv_cache, None)

    def forward_with_taps(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        taps: Sequence[int],
        states: PassStates | None = None,
    ) -> HiddenStates:
        """Run the same pass; also return the residual streams that enter the layers `taps`."""
        assert all(0 <= layer <= self.model.num_layers for layer in taps)
        arrays = self._arrays(batch, states)
        tapped = torch.empty(arrays.num_tokens, len(taps), self.model.hidden_size, device="cpu")
        layers = array("q", taps)
        struct = _TapsStruct(layers.buffer_info()[0], len(layers), tapped.data_ptr())
        return HiddenStates(self._forward(arrays, kv_cache, struct), tapped)

    def move_kv(self, kv_cache: Tensor, block_size: int, moves: Sequence[SlotMove]) -> None:
        """Copy the KV of tokens between slots in all layers, one move after the other."""
        slots = array("i", [slot for move in moves for slot in move])
        structs = ctypes.POINTER(DecoderStruct), ctypes.POINTER(KvCacheStruct)
        declare(self.library, move_kv=(None, *structs, c_int64, _Address, c_int64))
        kv, address = KvCacheStruct.of(kv_cache), slots.buffer_info()[0]
        self.library.specdec_move_kv(self.model, kv, block_size, address, len(moves))

    def _arrays(self, batch: ForwardBatch, states: PassStates | None) -> BatchArrays:
        arrays = BatchArrays(batch, self.max_positions, self.adapters)
        if states is not None:
            arrays.struct.states = ctypes.pointer(states.struct)
        return arrays

    def _forward(self, batch: BatchArrays, kv_cache: Tensor, taps: _TapsStruct | None) -> Tensor:
        hidden = torch.empty(batch.num_tokens, self.model.hidden_size, device="cpu")
        self.call("decoder_forward", batch, kv_cache, taps, hidden.data_ptr())
        return hidden


class BatchArrays:
    """A batch in the memory layout of batch.h, in few Python objects (docs/adr/0013)."""

    def __init__(
        self,
        batch: ForwardBatch,
        max_positions: int,
        adapters: Mapping[int, LoraArrays] | None = None,
    ) -> None:
        """max_positions: limit of each context length. adapters: those that are loaded, by id."""
        integers, starts, context_lens = array("i"), [0], []
        assert integers.itemsize == ctypes.sizeof(c_int32)
        self._tables = []
        for chunk in batch.chunks:
            table, end = _int32_array(chunk.block_table), chunk.end
            assert end <= min(max_positions, len(table) * batch.block_size)
            integers.extend(chunk.token_ids)
            starts.append(len(integers))
            context_lens.append(end)
            self._tables.append(table)
        self.num_tokens = starts[-1]
        integers.extend(starts)
        integers.extend(context_lens)
        addresses = array("q", [table.buffer_info()[0] for table in self._tables])
        self._integers, self._addresses = integers, addresses
        self._trees = _TreeArrays(batch, self.num_tokens) if batch.has_trees else None
        first = integers.buffer_info()[0]
        context_lens_at = self.num_tokens + len(starts)
        trees = self._trees.addresses if self._trees else (None, None)
        self.struct = BatchStruct(
            self.num_tokens,
            len(context_lens),
            batch.block_size,
            first,
            first + self.num_tokens * integers.itemsize,
            first + context_lens_at * integers.itemsize,
            addresses.buffer_info()[0],
            *trees,
        )
        if adapters is not None and (runs := batch.adapter_runs):
            self._add_adapters(run_structs(runs, adapters))

    def _add_adapters(self, runs: ctypes.Array[AdapterRunStruct]) -> None:
        self._runs = runs
        self.struct.adapter_runs = ctypes.cast(runs, ctypes.POINTER(AdapterRunStruct))
        self.struct.num_adapter_runs = len(runs)


def _int32_array(numbers: Sequence[int]) -> array[int]:
    return (
        numbers if isinstance(numbers, array) and numbers.typecode == "i" else array("i", numbers)
    )


class _TreeArrays:
    """The trees of drafts in a batch, in the memory layout of batch.h."""

    def __init__(self, batch: ForwardBatch, num_tokens: int) -> None:
        words, self._num_nodes = array("Q"), array("i")
        for chunk in batch.chunks:
            count = len(chunk.token_ids)
            self._num_nodes.append(chunk.num_nodes)
            words.extend([0] * (count - chunk.num_nodes))
            words.extend(ancestors(chunk.parents or ())[-count:])
        assert len(words) == num_tokens
        self._ancestors = words

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of num_nodes and ancestors."""
        return self._num_nodes.buffer_info()[0], self._ancestors.buffer_info()[0]
