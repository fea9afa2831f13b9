"""The forward pass as one call of the native library: Python bindings of decoder.cpp."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.cpu.large_memory import huge_page_allocator
from specdec.kernels.cpu.matrix import MatrixStruct
from specdec.kernels.cpu.shared_memory import SharedMemory
from specdec.kernels.forward_batch import ModelInput
from specdec.types.sharding import HeadShard

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Data types of embeddings and KV; the values of `Format` in matrix.h."""

_DONE, _NEEDS_MEMORY = 0, 2
"""Values of `PassResult` in decoder.h; any other value means a lost peer."""

_Address = ctypes.c_void_p
_AllReduceCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(ctypes.c_float), ctypes.c_int64)


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("input_norm", _Address),
        ("mlp_norm", _Address),
        ("query_norm", _Address),
        ("key_norm", _Address),
        ("window", ctypes.c_int64),
    )


class _EmbeddingStruct(ctypes.Structure):
    _fields_ = (
        ("packed", _Address),
        ("table", _Address),
        ("format", ctypes.c_int32),
        ("first_token", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
    )


class _DecoderStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden_size", "num_hidden_units", "num_heads")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "heads_per_kv", "first_in_group")),
        *((name, ctypes.c_int64) for name in ("head_dim", "num_layers")),
        ("norm_eps", ctypes.c_float),
        ("rank", ctypes.c_int32),
        ("embedding", _EmbeddingStruct),
        ("layers", ctypes.POINTER(_LayerStruct)),
        ("final_norm", _Address),
        ("cos", _Address),
        ("sin", _Address),
        ("communicator", _Address),
        ("all_reduce", _AllReduceCallback),
    )


class _BatchStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sequences", "block_size")),
        *((name, _Address) for name in ("input_ids", "query_starts")),
        *((name, _Address) for name in ("context_lens", "block_tables")),
    )


class _KvCacheStruct(ctypes.Structure):
    _fields_ = (("data", _Address), ("format", ctypes.c_int32), ("num_blocks", ctypes.c_int64))


@dataclass(frozen=True)
class PackedLinear:
    """A packed weight matrix, and its bias."""

    matrix: MatrixStruct  # does not own its memory
    bias: Tensor | None  # [out_features] float32


@dataclass(frozen=True)
class LayerWeights:
    """One rank's weights of a layer; norms are float32."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: Tensor  # [hidden_size]
    mlp_norm: Tensor  # [hidden_size]
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    window: int | None


@dataclass(frozen=True)
class EmbeddingWeights:
    """Embeddings of `tokens`: a table, or the packed matrix of a tied output head."""

    tokens: range
    rows: Tensor | MatrixStruct  # [len(tokens), hidden_size]


@dataclass(frozen=True)
class DecoderWeights:
    """Weights of one rank of a model."""

    embedding: EmbeddingWeights
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size] float32
    norm_eps: float
    cos: Tensor  # [max_positions, head_dim / 2] float32
    sin: Tensor  # [max_positions, head_dim / 2] float32
    heads: HeadShard
    head_dim: int
    rank: int


AllReduce = SharedMemory | Callable[[Tensor], object]
"""All-reduce over the ranks, in place: inside the kernels, or by a Python function."""


class DecoderKernel:
    """Forward pass of one rank. Not thread-safe: calls share one workspace."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: DecoderWeights,
        all_reduce: AllReduce | None = None,
    ) -> None:
        """all_reduce: sums over the ranks; None for a single rank."""
        self._forward, self._memory_bytes = _declare(library)
        self._weights = weights
        self._all_reduce = all_reduce
        self._failure: BaseException | None = None
        is_python = not (all_reduce is None or isinstance(all_reduce, SharedMemory))
        self._callback = (
            _AllReduceCallback(self._all_reduce_in_python) if is_python else _AllReduceCallback()
        )
        self._layers = (_LayerStruct * len(weights.layers))(*map(_layer_struct, weights.layers))
        self._model = self._decoder_struct()
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")

    def new_kv_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [num_layers, num_kv_heads, num_blocks, 2, block_size * head_dim].

        A block holds keys as [head_dim, block_size] and values as [block_size, head_dim]. Pages
        that were never written take no memory.
        """
        weights = self._weights
        block = (2, block_size * weights.head_dim)
        shape = (len(weights.layers), len(weights.heads.kv), num_blocks, *block)
        num_bytes = math.prod(shape) * dtype.itemsize
        return huge_page_allocator().allocate(num_bytes).view(dtype).view(shape)

    def forward(self, batch: ModelInput, kv_cache: Tensor) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size] in float32.

        kv_cache: as returned by `new_kv_cache`. Raises RuntimeError when a peer is lost, or the
        exception that `all_reduce` raised.
        """
        arrays = _BatchArrays(batch, max_positions=len(self._weights.cos))
        kv = _KvCacheStruct(kv_cache.data_ptr(), FORMATS[kv_cache.dtype], kv_cache.shape[2])
        hidden = torch.empty(arrays.num_tokens, len(self._weights.final_norm), device="cpu")
        num_threads = torch.get_num_threads()

        def run() -> int:
            workspace = self._workspace.data_ptr(), len(self._workspace)
            batch = arrays.struct
            return self._forward(self._model, batch, kv, *workspace, hidden.data_ptr(), num_threads)

        result = run()
        if result == _NEEDS_MEMORY:
            num_bytes = self._memory_bytes(self._model, arrays.struct, num_threads)
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            result = run()
            assert result != _NEEDS_MEMORY
        if result != _DONE:
            failure, self._failure = self._failure, None
            raise failure or RuntimeError("a rank has ended, or did not respond in time")
        return hidden

    def _all_reduce_in_python(self, data: ctypes._Pointer[ctypes.c_float], count: int) -> bool:
        """Run the Python all-reduce; called from C++, so an exception is stored, not raised.

        data: [count].
        """
        assert callable(self._all_reduce)
        try:
            self._all_reduce(torch.from_numpy(np.ctypeslib.as_array(data, (count,))))
        except BaseException as error:
            self._failure = error
            return False
        return True

    def _decoder_struct(self) -> _DecoderStruct:
        weights, all_reduce = self._weights, self._all_reduce
        return _DecoderStruct(
            hidden_size=len(weights.final_norm),
            num_hidden_units=weights.layers[0].down.matrix.in_features,
            num_heads=len(weights.heads.query),
            num_kv_heads=len(weights.heads.kv),
            heads_per_kv=weights.heads.heads_per_kv,
            first_in_group=weights.heads.first_in_group,
            head_dim=weights.head_dim,
            num_layers=len(weights.layers),
            norm_eps=weights.norm_eps,
            rank=weights.rank,
            embedding=_embedding_struct(weights.embedding),
            layers=self._layers,
            final_norm=_address(weights.final_norm),
            cos=_address(weights.cos),
            sin=_address(weights.sin),
            communicator=all_reduce.communicator if isinstance(all_reduce, SharedMemory) else None,
            all_reduce=self._callback,
        )


_Function = Callable[..., int]


def _declare(library: ctypes.CDLL) -> tuple[_Function, _Function]:
    """Set the argument and result types; return forward and memory_bytes."""
    model, batch = ctypes.POINTER(_DecoderStruct), ctypes.POINTER(_BatchStruct)
    forward = library.specdec_decoder_forward
    kv, count = ctypes.POINTER(_KvCacheStruct), ctypes.c_int64
    forward.argtypes = (model, batch, kv, _Address, count, _Address, ctypes.c_int32)
    forward.restype = ctypes.c_int32
    memory_bytes = library.specdec_decoder_memory_bytes
    memory_bytes.argtypes = (model, batch, ctypes.c_int32)
    memory_bytes.restype = count
    return forward, memory_bytes


def _layer_struct(layer: LayerWeights) -> _LayerStruct:
    return _LayerStruct(
        qkv=_matrix_struct(layer.qkv),
        output=_matrix_struct(layer.output),
        gate_up=_matrix_struct(layer.gate_up),
        down=_matrix_struct(layer.down),
        input_norm=_address(layer.input_norm),
        mlp_norm=_address(layer.mlp_norm),
        query_norm=_address(layer.query_norm),
        key_norm=_address(layer.key_norm),
        window=layer.window or 0,
    )


def _matrix_struct(linear: PackedLinear) -> MatrixStruct:
    struct = MatrixStruct.from_buffer_copy(linear.matrix)
    struct.bias = _address(linear.bias)
    return struct


def _embedding_struct(embedding: EmbeddingWeights) -> _EmbeddingStruct:
    rows, tokens = embedding.rows, embedding.tokens
    struct = _EmbeddingStruct(first_token=tokens.start, num_tokens=len(tokens))
    if isinstance(rows, Tensor):
        struct.table, struct.format = _address(rows), FORMATS[rows.dtype]
    else:
        struct.packed, struct.format = rows.packed, rows.format
    return struct


class _BatchArrays:
    """A batch in the memory layout of batch.h, in few Python objects (docs/adr/0013)."""

    def __init__(self, batch: ModelInput, max_positions: int) -> None:
        """max_positions: limit of each context length."""
        integers, starts, context_lens = array("i"), [0], []
        assert integers.itemsize == ctypes.sizeof(ctypes.c_int32)
        self._tables = []
        for chunk in batch.chunks:
            assert chunk.positions is None, "the native decoder runs chains of tokens"
            table, end = chunk.block_table, chunk.end
            if not (isinstance(table, array) and table.typecode == "i"):
                table = array("i", table)
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
        first = integers.buffer_info()[0]
        context_lens_at = self.num_tokens + len(starts)
        self.struct = _BatchStruct(
            self.num_tokens,
            len(context_lens),
            batch.block_size,
            first,
            first + self.num_tokens * integers.itemsize,
            first + context_lens_at * integers.itemsize,
            addresses.buffer_info()[0],
        )


def _address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
