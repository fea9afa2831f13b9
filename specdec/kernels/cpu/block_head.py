"""Passes and whole drafts of block drafters: Python bindings of block_head.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64
from typing import ClassVar

import torch
from torch import Tensor

from specdec.kernels.cpu.decoder import BatchArrays, DecoderStruct, EmbeddingStruct
from specdec.kernels.cpu.drafts import (
    DraftArrays,
    DraftsStruct,
    DraftTreesStruct,
    HeadKernel,
    TreeArrays,
)
from specdec.kernels.cpu.matrix import MatrixStruct
from specdec.kernels.reference.forward_batch import ForwardBatch, PairInputs
from specdec.kernels.reference.sample_rows import SampleParams
from specdec.types.drafts.draft_tree import TokenTree, TreeSize

_Address = ctypes.c_void_p

MARKOV_KINDS = {"vanilla": 1, "gated": 2, "rnn": 3}
"""Values of `MarkovKind` in block_head.h; 0 without a Markov head."""


class MarkovStruct(ctypes.Structure):
    """`Markov` in block_head.h."""

    _fields_ = (
        ("kind", c_int32),
        ("size", c_int64),
        ("embedding", EmbeddingStruct),
        ("output", MatrixStruct),
        ("projection", MatrixStruct),
        ("first_input", c_int64),
    )


class BlockHeadStruct(ctypes.Structure):
    """`BlockHead` in block_head.h. Its creator owns the memory that it points to."""

    _fields_ = (
        ("decoder", DecoderStruct),
        ("draft_block_size", c_int64),
        ("first_output", c_int64),
        ("mask_token", c_int32),
        ("lm_head", MatrixStruct),
        ("target_tokens", _Address),
        ("markov", MarkovStruct),
    )


class BlockHeadKernel(HeadKernel):
    """Passes of one rank of a block drafter. A block's result is the same bits in any batch."""

    kernels: ClassVar = {
        "block_head_forward": (_Address, c_int64, _Address),
        "block_draft": (ctypes.POINTER(DraftsStruct), _Address),
        "block_trees": (ctypes.POINTER(DraftTreesStruct), _Address),
    }

    def forward(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor, num_outputs: int
    ) -> Tensor:
        """Write the KV of T pairs of B sequences, and run a draft block after each sequence.

        features: [T, hidden_size]. Returns the outputs of the first slots that predict,
        [num_outputs, B, hidden_size]; no block runs if `num_outputs` is 0. Raises as `call` does.
        """
        batch = self._arrays(pairs)
        features = self.features_of(batch, features)
        shape = (num_outputs, pairs.num_sequences, self.model.hidden_size)
        outputs = torch.empty(shape, device="cpu")
        results = features.data_ptr(), num_outputs, outputs.data_ptr()
        self.call("block_head_forward", batch, kv_cache, *results)
        return outputs

    def draft(
        self, inputs: PairInputs, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """Write the KV of T pairs of B sequences, and draft tokens after each sequence.

        counts: number of tokens, [B], some above 0. params: of the first token of each sequence,
        [B]; token i has the noise of the position i further on. Returns the target's ids of each
        draft, which ends early where no token can be sampled. Raises as `call` does.
        """
        assert self.can_draft
        assert len(counts) == inputs.pairs.num_sequences
        drafts = DraftArrays(counts, params)
        self._draft("block_draft", drafts.struct, max(counts), inputs)
        return drafts.token_ids

    def draft_trees(
        self, inputs: PairInputs, sizes: Sequence[TreeSize], params: SampleParams
    ) -> list[TokenTree]:
        """Write the KV of T pairs of B sequences, and draft a tree after each sequence.

        The head has a Markov head and one rank. Arguments as for `draft`.
        """
        assert len(sizes) == inputs.pairs.num_sequences
        drafts = TreeArrays(sizes, params)
        depth = max(each.depth for each in sizes)
        self._draft("block_trees", drafts.tree_struct, depth, inputs)
        return drafts.trees

    def _draft(self, name: str, drafts: ctypes.Structure, depth: int, inputs: PairInputs) -> None:
        """Call the kernel `name`. depth: the most draft tokens that follow each other."""
        assert 0 < depth <= self._struct.draft_block_size - self._struct.first_output
        assert inputs.features is not None, "blocks read features"
        batch = self._arrays(inputs.pairs)
        features = self.features_of(batch, inputs.features)
        self.call(name, batch, inputs.kv_cache, drafts, features.data_ptr())

    def _arrays(self, pairs: ForwardBatch) -> BatchArrays:
        """Return a batch whose draft blocks have rotary positions."""
        return BatchArrays(pairs, self.max_positions - self._struct.draft_block_size, self.adapters)
