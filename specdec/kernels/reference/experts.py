"""Mixtures of experts in fixed shapes: the routes of tokens, and the experts that they have.

No value is read by the host, so that a graph can hold a layer whose routes differ between steps.
`specdec.kernels.triton.experts` computes both on a GPU; the functions here are its definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.reference.packed_weight import PackedWeight


@dataclass(frozen=True)
class RoutingRule:
    """How the experts of a token follow from the logits of a router.

    num_per_token: experts of a token. normalizes: whether their scores are divided by their sum.
    is_sigmoid: whether scores are sigmoids of the logits; else their softmax. num_groups: of
    experts; only those of num_chosen_groups are chosen, by the sum of their two best scores where
    adds_two_best, else by the best one. scale: factor of the weights.
    """

    num_per_token: int
    normalizes: bool
    is_sigmoid: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    adds_two_best: bool = True


class Routes(NamedTuple):
    """The experts of T tokens, the best first, and the weights of their results."""

    weights: Tensor  # [T, num_per_token] float32
    chosen: Tensor  # [T, num_per_token] integers


def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> Routes:
    """Return the routes of tokens by logits [T, num_experts].

    bias: [num_experts] float32, joins the scores in the choice alone.
    """
    logits = logits.float()
    scores = logits.sigmoid() if rule.is_sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        choice = in_best_groups(choice, rule)
    chosen = choice.topk(rule.num_per_token, dim=-1).indices
    weights = scores.gather(1, chosen)
    if rule.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(weights * rule.scale if rule.scale != 1.0 else weights, chosen)


def in_best_groups(scores: Tensor, rule: RoutingRule) -> Tensor:
    """Return scores [T, num_experts] with -inf for experts of groups that are not chosen."""
    groups = scores.unflatten(-1, (rule.num_groups, -1))  # [T, groups, experts of one]
    best = groups.topk(2, -1).values.sum(-1) if rule.adds_two_best else groups.amax(-1)
    kept = best.topk(rule.num_chosen_groups, dim=-1).indices
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    masked: Tensor = groups.masked_fill(~is_chosen.unsqueeze(-1), float("-inf"))
    return masked.flatten(1)


@dataclass(frozen=True)
class ExpertStack:
    """Gated experts of a rank, side by side in memory.

    gate_up: [num_experts, 2 * units, hidden_size]: rows of the gates, then of the others. down:
    [num_experts, hidden_size, units]. In few bits both have the rows of all experts in one
    dimension, and no order of their inputs.
    is_clamped: whether their gates are those of GPT-OSS (`clamped_swiglu`); else SiLU.
    """

    gate_up: Tensor | PackedWeight
    down: Tensor | PackedWeight
    gate_up_bias: Tensor | None  # [num_experts, 2 * units]
    down_bias: Tensor | None  # [num_experts, hidden_size]
    is_clamped: bool = False

    @property
    def num_experts(self) -> int:
        if isinstance(self.down, PackedWeight):
            return self.down.shape[0] // self.gate_up.shape[-1]
        return len(self.down)

    @property
    def units(self) -> int:
        """Hidden units of each expert."""
        return self.down.shape[-1]


def run_experts(
    x: Tensor, routes: Routes, stack: ExpertStack, first: int, base: Tensor | None = None
) -> Tensor:
    """Return base plus the weighted results of the experts of a rank, [T, hidden_size].

    x, base: [T, hidden_size]. first: the first expert of the stack; routes to those of other ranks
    add nothing. Each expert runs on all tokens.
    """
    total = torch.zeros_like(x, dtype=torch.float32) if base is None else base.float()
    for index in range(stack.num_experts):
        is_own = routes.chosen == first + index
        gate_up, down = (_of(each, index, stack) for each in (stack.gate_up, stack.down))
        units = F.linear(x, gate_up.to(x.dtype), _bias(stack.gate_up_bias, index, x.dtype))
        gate, up = units.chunk(2, -1)
        activated = clamped_swiglu(gate, up) if stack.is_clamped else F.silu(gate) * up
        result = F.linear(activated, down.to(x.dtype), _bias(stack.down_bias, index, x.dtype))
        weight = (routes.weights * is_own).sum(1, keepdim=True)
        total = total + torch.where(is_own.any(1, keepdim=True), result.float() * weight, 0)
    return total.to(x.dtype)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return (u + 1) g sigmoid(1.702 g), of gates g up to 7 and others u from -7 to 7 (GPT-OSS)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _of(matrices: Tensor | PackedWeight, index: int, stack: ExpertStack) -> Tensor:
    """Return the matrix of an expert, [outputs, inputs]."""
    if isinstance(matrices, PackedWeight):
        first = index * (size := matrices.shape[0] // stack.num_experts)
        return matrices.part(range(first, first + size)).values()
    return matrices[index]


def _bias(biases: Tensor | None, index: int, dtype: torch.dtype) -> Tensor | None:
    return None if biases is None else biases[index].to(dtype)
