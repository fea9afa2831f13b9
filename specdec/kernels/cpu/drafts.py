"""Whole drafts of heads: what their kernels share."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.cpu.decoder import AllReduce, BatchArrays, DecoderStruct, ModelKernel
from specdec.kernels.cpu.shared_memory import SharedMemory
from specdec.kernels.sample import SAMPLE_PARAMS, SampleParams

_Address = ctypes.c_void_p


class DraftsStruct(ctypes.Structure):
    """`Drafts` in drafts.h."""

    _fields_ = (
        *((name, _Address) for name in ("counts", "params", "tokens")),
        ("max_count", c_int64),
    )


class DraftArrays:
    """Drafts of B sequences in the memory layout of drafts.h.

    tokens: [B, max(counts)] int32, to be written: the target's ids, and -1 behind the end of a
    draft.
    """

    def __init__(self, counts: Sequence[int], params: SampleParams) -> None:
        """Lay out the drafts.

        counts: number of tokens, [B]. params: of the first token of each sequence, [B].
        """
        assert params.dtype == SAMPLE_PARAMS
        assert len(params) == len(counts)
        self.tokens = np.full((len(counts), max(counts)), -1, dtype=np.int32)
        self._counts, self._params = array("i", counts), np.ascontiguousarray(params)
        self.struct = DraftsStruct(
            self._counts.buffer_info()[0],
            self._params.ctypes.data,
            self.tokens.ctypes.data,
            self.tokens.shape[1],
        )


class HeadKernel(ModelKernel):
    """Calls with the weights of one rank of a draft head.

    can_draft: whether whole drafts run: the kernels do not call Python for the samples of other
    ranks.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: DecoderStruct,
        max_positions: int,
        all_reduce: AllReduce | None = None,
    ) -> None:
        """See ModelKernel."""
        super().__init__(library, model, max_positions, all_reduce)
        self.can_draft = all_reduce is None or isinstance(all_reduce, SharedMemory)

    def checked_features(self, features: Tensor, batch: BatchArrays) -> Tensor:
        """Return the features [T, hidden_size] of a batch, contiguous."""
        assert features.dtype == torch.float32
        assert features.shape == (batch.num_tokens, self.model.hidden_size)
        return features.contiguous()
