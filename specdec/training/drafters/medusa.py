"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): a residual block for each draft token.

All heads share one output head over the draft tokens, in vLLM's layout. They read the target's last
hidden state alone: draft tokens do not depend on each other, nor on the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.target import Target
from specdec.training.drafters.base import Drafter


class MedusaDrafter(Drafter):
    """One block of one layer for each draft token. At first it passes the hidden state on."""

    def __init__(self, target: Target, token_ids: Tensor, config: TrainingConfig) -> None:
        """See Drafter."""
        super().__init__(target, token_ids, config)
        size = target.config.hidden_size
        self.taps = ()
        self._vocab_size = target.config.vocab_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(self.depth))
        self.lm_head = nn.Linear(size, len(token_ids), bias=False)
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.zero_()
            self.lm_head.weight.copy_(target.lm_head[token_ids])

    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """See Drafter."""
        x = target.final[batch.bases - 1]  # what the target drew the base from
        return torch.stack([x + F.silu(block(x)) for block in self.blocks])

    def config(self) -> Mapping[str, Any]:
        """See Drafter."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.lm_head.in_features,
            "vocab_size": self._vocab_size,
            "truncated_vocab_size": len(self.token_ids),
            "num_heads": self.depth,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """See Drafter."""
        tensors = {"lm_head.weight": self.lm_head.weight.detach(), "token_map": self.token_ids}
        for index, block in enumerate(self.blocks):
            for name in ("weight", "bias"):
                tensors[f"blocks.{index}.layers.0.{name}"] = getattr(block, name).detach()
        return tensors
