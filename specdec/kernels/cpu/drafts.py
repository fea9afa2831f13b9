"""Whole drafts of heads: what their kernels share."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64
from functools import cached_property

import torch
from torch import Tensor

from specdec.kernels.cpu.decoder import BatchArrays, ModelKernel
from specdec.kernels.cpu.shared_memory import SharedMemory
from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS, SampleParams
from specdec.types.drafts.draft_tree import TokenTree, TreeSize

_Address = ctypes.c_void_p


class DraftsStruct(ctypes.Structure):
    """`Drafts` in drafts.h."""

    _fields_ = (
        *((name, _Address) for name in ("counts", "params", "tokens")),
        ("max_count", c_int64),
    )


class DraftTreesStruct(ctypes.Structure):
    """`DraftTrees` in drafts.h."""

    _fields_ = (
        ("drafts", DraftsStruct),
        ("depths", _Address),
        ("parents", _Address),
        ("max_depth", c_int64),
    )


class DraftArrays:
    """Drafts of B sequences in the memory layout of drafts.h.

    Few Python objects and no operators of numpy: cold, they cost as much as a tenth of the draft.
    """

    def __init__(self, counts: Sequence[int], params: SampleParams) -> None:
        """Lay out the drafts.

        counts: number of tokens, [B]. params: of the first token of each sequence, [B].
        """
        assert params.dtype == SAMPLE_PARAMS
        assert len(params) == len(counts)
        self._shape = len(counts), max(counts)
        self._counts, self._params = array("i", counts), ctypes.c_char.from_buffer(params.data)
        self._tokens = array("i", [-1]) * (len(counts) * self._shape[1])
        self.struct = DraftsStruct(
            self._counts.buffer_info()[0],
            ctypes.addressof(self._params),
            self._tokens.buffer_info()[0],
            self._shape[1],
        )

    @property
    def token_ids(self) -> list[list[int]]:
        """The target's ids of each draft, [B]."""
        num_drafts, size = self._shape
        rows = (self._tokens[row * size : (row + 1) * size] for row in range(num_drafts))
        return [[token for token in row if token >= 0] for row in rows]


class TreeArrays(DraftArrays):
    """Trees of B sequences in the memory layout of drafts.h."""

    def __init__(self, sizes: Sequence[TreeSize], params: SampleParams) -> None:
        """Lay out the trees; params: as for DraftArrays."""
        super().__init__([each.num_nodes for each in sizes], params)
        depths = [each.depth for each in sizes]
        self._depths, self._parents = array("i", depths), array("i", self._tokens)
        self.tree_struct = DraftTreesStruct(
            self.struct, self._depths.buffer_info()[0], self._parents.buffer_info()[0], max(depths)
        )

    @property
    def trees(self) -> list[TokenTree]:
        """The trees, [B]."""
        starts = range(0, len(self._parents), self._shape[1])
        rows = zip(starts, self.token_ids, strict=True)
        return [TokenTree(row, self._parents[at : at + len(row)].tolist()) for at, row in rows]


class HeadKernel(ModelKernel):
    """Calls with the weights of one rank of a draft head."""

    @cached_property
    def can_draft(self) -> bool:
        """Return whether whole drafts run: kernels call no Python for the samples of ranks."""
        return self.all_reduce is None or isinstance(self.all_reduce, SharedMemory)

    def features_of(self, batch: BatchArrays, features: Tensor) -> Tensor:
        """Return the features [T, hidden_size] of a batch in float32, contiguous."""
        assert features.shape == (batch.num_tokens, self.model.hidden_size)
        floats = features if features.dtype == torch.float32 else features.float()
        return floats.contiguous()
