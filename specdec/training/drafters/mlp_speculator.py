"""MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): a state that tokens are mixed into.

The state of draft token i is GELU(LN(W state + c e(token before it))), and begins with the target's
last hidden state. In the layout of IBM's accelerators, with weights that all draft tokens share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.target import Target
from specdec.training.drafters.base import Drafter

_EPS = 1e-6


class MlpSpeculatorDrafter(Drafter):
    """A speculator whose state has the target's hidden size.

    Its embedding and output head have a row for each token of the target, and begin as the
    target's; the embedding's rows are scaled to length 1, which the constant c assumes.
    """

    has_reduced_vocabulary = False

    def __init__(self, target: Target, token_ids: Tensor, config: TrainingConfig) -> None:
        """See Drafter."""
        super().__init__(target, token_ids, config)
        size, vocab_size = target.config.hidden_size, target.config.vocab_size
        assert len(token_ids) == vocab_size, "the layout has no draft vocabulary"
        self.taps = ()
        state_weight = 0.5 ** (0.5 / self.depth)
        self._token_scale = math.sqrt((1 - state_weight**2) * size / 2) / state_weight
        num_projections = min(2, self.depth)  # of the hidden state, and of all other states
        self.projections = nn.ModuleList(
            nn.Linear(size, size, bias=False) for _ in range(num_projections)
        )
        self.embedding = nn.Embedding(vocab_size, size)
        self.norm_weight = nn.Parameter(torch.ones(size))
        self.norm_bias = nn.Parameter(torch.zeros(size))
        self.lm_head = nn.Linear(size, vocab_size, bias=False)
        with torch.no_grad():
            self.embedding.weight.copy_(F.normalize(target.embedding))
            self.lm_head.weight.copy_(target.lm_head)

    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """See Drafter."""
        state = _scaled(target.final[batch.bases - 1]) / math.sqrt(2)
        states = []
        for index in range(self.depth):
            projected = self.projections[min(index, 1)](state)
            embedded = self.embedding(batch.token_ids[batch.after(index)])
            mixed = _scaled(projected + self._token_scale * embedded)
            state = F.gelu(mixed * self.norm_weight + self.norm_bias)
            states.append(state)
        return torch.stack(states)

    def config(self) -> Mapping[str, Any]:
        """See Drafter."""
        size = self.lm_head.in_features
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": len(self.token_ids),
            "emb_dim": size,
            "inner_dim": size,
            "n_predict": self.depth,
            "n_candidates": 1,
            "top_k_tokens_per_head": [1] * self.depth,
            "tie_weights": True,
            "scale_input": True,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """See Drafter."""
        tensors = {
            "emb.0.weight": self.embedding.weight,
            "head.0.weight": self.lm_head.weight,
            "ln.0.weight": self.norm_weight,
            "ln.0.bias": self.norm_bias,
        }
        for index, projection in enumerate(self.projections):
            tensors[f"proj.{index}.weight"] = cast(nn.Linear, projection).weight
        return {f"speculator.{name}": each.detach() for name, each in tensors.items()}


def _scaled(x: Tensor) -> Tensor:
    """Return x [..., size] divided by its root mean square, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)
