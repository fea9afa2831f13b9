"""Mixtures of experts in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers.linear import ColumnParallelLinear, WeightPart
from specdec.models.traits import Experts
from specdec.models.weights.checkpoint import CheckpointReader


class SparseMLP(nn.Module):
    """A mixture of experts (Shazeer et al. 2017), each of which the ranks share.

    The results of a token's experts are added in the order of the experts. The router is not
    quantized: a small error of its logits would select another expert.
    """

    def __init__(
        self,
        config: Experts,
        hidden_size: int,
        reader: CheckpointReader,
        prefix: str,
        router: str,
        group: TensorParallelGroup,
        read_expert: Callable[[str], nn.Module],
    ) -> None:
        """prefix: of the tensors. router: name of its tensors.

        read_expert: reads the expert with a name, whose results are those of this rank.
        """
        super().__init__()
        self.config, self.group = config, group
        exact = replace(reader, quantization=None)
        name, count = f"{prefix}.{router}", config.count
        rows = WeightPart(name, count, range(count), has_bias=config.has_bias)
        self.router = ColumnParallelLinear(exact, hidden_size, [rows])
        reader.num_elements_read = exact.num_elements_read
        names = (f"{prefix}.experts.{index}" for index in range(config.count))
        self.experts = nn.ModuleList(map(read_expert, names))

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return [T, hidden_size], plus the residual if given; both inputs: [T, hidden_size]."""
        weights, chosen = self._route(x)
        mixed = torch.zeros_like(x)
        for index in chosen.unique().tolist():  # ascending
            rows, places = (chosen == index).nonzero(as_tuple=True)
            added: Tensor = self.experts[index](x[rows], None)
            mixed.index_add_(0, rows, added * weights[rows, places, None])
        mixed = self.group.all_reduce(mixed)
        return mixed if residual is None else residual + mixed

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights in the dtype of x and experts, [T, num_per_token] each."""
        probabilities = self.router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.config.num_per_token, dim=-1)
        if self.config.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen
