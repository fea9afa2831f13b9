"""Mixtures of experts in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers.linear import ColumnParallelLinear, WeightPart
from specdec.models.traits import Experts, Routing
from specdec.models.weights.checkpoint import CheckpointReader


class SparseMLP(nn.Module):
    """A mixture of experts (Shazeer et al. 2017), divided over the ranks as `Experts` describes.

    The results of a token's experts are added in the order of the experts on each rank, then over
    the ranks. The router is not quantized: a small error of its logits would select another expert.
    """

    def __init__(
        self,
        config: Experts,
        hidden_size: int,
        reader: CheckpointReader,
        prefix: str,
        router: str,
        group: TensorParallelGroup,
        read_expert: Callable[[str, int, TensorParallelGroup], nn.Module],
    ) -> None:
        """prefix: of the tensors. router: name of its tensors.

        read_expert: reads the share of a rank of a group of the expert with a name and a number of
        hidden units; its results are those of this rank.
        """
        super().__init__()
        self.config, self.group = config, group
        exact = replace(reader, quantization=None)
        name, count = f"{prefix}.{router}", config.count
        rows = WeightPart(name, count, range(count), has_bias=config.has_bias)
        self.router = ColumnParallelLinear(exact, hidden_size, [rows])
        reader.num_elements_read = exact.num_elements_read
        routing, self.choice_bias = config.routing, None
        if routing is not None and routing.has_bias:
            bias = reader.read(f"{name}.e_score_correction_bias", (count,), dtype=torch.float32)
            self.choice_bias = bias
        self.shared: nn.Module | None = None
        if config.shared_size:
            self.shared = read_expert(f"{prefix}.shared_experts", config.shared_size, group)
        self.own = config.shard(group.rank, group.size).experts
        sharing = TensorParallelGroup() if config.is_divided_by_expert else group
        names = (f"{prefix}.experts.{index}" for index in self.own)
        size = config.intermediate_size
        self.experts = nn.ModuleList(read_expert(each, size, sharing) for each in names)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return [T, hidden_size], plus the residual if given; both inputs: [T, hidden_size]."""
        weights, chosen = self._route(x)
        mixed = torch.zeros_like(x) if self.shared is None else self.shared(x, None)
        for index in chosen.unique().tolist():  # ascending
            if index not in self.own:
                continue
            rows, places = (chosen == index).nonzero(as_tuple=True)
            added: Tensor = self.experts[index - self.own.start](x[rows], None)
            mixed.index_add_(0, rows, added * weights[rows, places, None])
        mixed = self.group.all_reduce(mixed)
        return mixed if residual is None else residual + mixed

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights in the dtype of x and experts, [T, num_per_token] each."""
        routing = self.config.routing
        logits = self.router(x).float()
        scores = logits.sigmoid() if routing and routing.is_sigmoid else logits.softmax(-1)
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        if routing is not None and routing.num_groups > 1:
            choice = in_best_groups(choice, routing)
        chosen = choice.topk(self.config.num_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.config.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        if routing is not None:
            weights = weights * routing.scale
        return weights.to(x.dtype), chosen


def in_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Return scores [T, num_experts] with -inf for experts of groups that are not chosen."""
    groups = scores.unflatten(-1, (routing.num_groups, -1))  # [T, groups, experts of one]
    best = groups.topk(2, -1).values.sum(-1) if routing.is_sigmoid else groups.amax(-1)
    kept = best.topk(routing.num_chosen_groups, dim=-1).indices
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    masked: Tensor = groups.masked_fill(~is_chosen.unsqueeze(-1), float("-inf"))
    return masked.flatten(1)
