"""Passes and whole drafts of a draft head with attention, and whole drafts of a draft model.

Python bindings of draft_head.cpp.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_int64
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.cpu.decoder import BatchArrays, DecoderStruct
from specdec.kernels.cpu.drafts import DraftArrays, DraftsStruct, HeadKernel
from specdec.kernels.cpu.matrix import MatrixStruct
from specdec.kernels.reference.forward_batch import ForwardBatch, PairInputs
from specdec.kernels.reference.sample_rows import SampleParams

_Address = ctypes.c_void_p


class DraftHeadStruct(ctypes.Structure):
    """`DraftHead` in draft_head.h. Its creator owns the memory that it points to."""

    _fields_ = (
        ("decoder", DecoderStruct),
        ("reads_features", c_int32),
        ("fusion", MatrixStruct),
        ("first_input", c_int64),
        ("embedding_norm", _Address),
        ("feature_norm", _Address),
        ("is_feature_first", c_int32),
        ("adds_to_normed", c_int32),
        ("returns_normed", c_int32),
        ("lm_head", MatrixStruct),
        ("target_tokens", _Address),
    )


class PairStates(NamedTuple):
    """States after some pairs.

    hidden: the input of the output head. features: those of the next pairs.
    """

    hidden: Tensor  # [num_states, hidden_size]
    features: Tensor  # [num_states, hidden_size]


class DraftHeadKernel(HeadKernel):
    """Passes of one rank of a head. A pair's result is the same bits in any batch."""

    kernels: ClassVar = {
        "draft_head_forward": (_Address, _Address, c_int64, _Address, _Address),
        "draft": (ctypes.POINTER(DraftsStruct), _Address),
    }

    def forward(
        self,
        pairs: ForwardBatch,
        features: Tensor,
        kv_cache: Tensor,
        states_of: Sequence[int] | None = None,
    ) -> PairStates:
        """Write the KV of T pairs of B sequences; return the states after some of them.

        features: [T, hidden_size]. states_of: indices of pairs; None for the last one of
        each sequence. Raises as `call` does.
        """
        batch = BatchArrays(pairs, self.max_positions, self.adapters)
        features = self.features_of(batch, features)
        wanted = array("i", pairs.last_tokens if states_of is None else states_of)
        hidden, next_features = torch.empty(2, len(wanted), features.shape[1], device="cpu")
        states = wanted.buffer_info()[0], len(wanted), hidden.data_ptr(), next_features.data_ptr()
        self.call("draft_head_forward", batch, kv_cache, features.data_ptr(), *states)
        return PairStates(hidden, next_features)

    def draft(
        self, inputs: PairInputs, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """Run T pairs of B sequences, and draft tokens after each sequence.

        counts: number of tokens, [B]; block tables have room for all but the last. params: of the
        first token of each sequence, [B]; token i has the noise of the position i further on.
        Returns the target's ids of each draft, which ends early where no token can be sampled.
        Raises as `call` does.
        """
        assert self.can_draft
        pairs, features, kv_cache = inputs
        assert len(counts) == pairs.num_sequences
        batch = BatchArrays(pairs, self.max_positions, self.adapters)
        drafts = DraftArrays(counts, params)
        assert (features is not None) == bool(self._struct.reads_features)
        read = None if features is None else self.features_of(batch, features)
        for chunk, count in zip(pairs.chunks, counts, strict=True):
            last = chunk.end + max(count, 1) - 1
            assert last <= min(self.max_positions, len(chunk.block_table) * pairs.block_size)
        self.call(
            "draft", batch, kv_cache, drafts.struct, None if read is None else read.data_ptr()
        )
        return drafts.token_ids
