"""The parts of the target's rank that its head uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.backend import KernelBackend
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.taps import Taps
from specdec.models.layers.linear import VocabEmbedding, VocabHead
from specdec.models.llama import CausalDecoder


@dataclass(frozen=True)
class TargetRank:
    """One rank of the target, as its head needs it.

    max_positions: number of rotary positions, the longest draft included.
    """

    config: ModelConfig
    group: TensorParallelGroup
    embed_tokens: VocabEmbedding
    lm_head: VocabHead
    vocab_slice: range
    block_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    backend: KernelBackend

    @classmethod
    def of(cls, config: ModelConfig, decoder: CausalDecoder, max_draft_tokens: int) -> TargetRank:
        """Take the parts of a rank's torch layers."""
        return cls(
            config=config,
            group=decoder.embed_tokens.group,
            embed_tokens=decoder.embed_tokens,
            lm_head=decoder.lm_head,
            vocab_slice=decoder.vocab_slice,
            block_size=decoder.attention.block_size,
            max_positions=decoder.rotary.max_positions + max_draft_tokens,
            dtype=decoder.dtype,
            device=decoder.device,
            backend=decoder.backend,
        )

    def token_ids(self, tokens: list[int]) -> Tensor:
        """Return token ids as an index, [T] int64."""
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)


def concatenated(states: Tensor, taps: Taps) -> Tensor:
    """Return the states of the layers that a head reads side by side, [T, num_parts * size].

    states: of `taps.ascending`, [T, num_layers, size]. Without an index, which would be copied to a
    device, as a CUDA graph forbids.
    """
    if taps.order == tuple(range(states.shape[1])):
        return states.flatten(1)
    return torch.cat([states[:, place] for place in taps.order], dim=1)
