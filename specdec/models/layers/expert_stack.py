"""The matrices of a mixture's experts side by side, as kernels of all experts read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from specdec.kernels.experts import ExpertStack
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from specdec.models.layers.matrix import FullMatrix
from specdec.models.layers.mlp import MLP
from specdec.models.traits import Activation

_Linear = ColumnParallelLinear | RowParallelLinear


def stack_experts(experts: Sequence[nn.Module]) -> ExpertStack | None:
    """Move the matrices of experts side by side; those of the experts become views of them.

    Returns None for no expert, and for experts that are not in full precision, or without a gate
    that the kernels have.
    """
    layers = [each for each in experts if isinstance(each, MLP) and _is_supported(each)]
    if not layers or len(layers) < len(experts):
        return None
    first = layers[0]
    return ExpertStack(
        gate_up=_stacked(layers, lambda each: each.gate_up_proj),
        down=_stacked(layers, lambda each: each.down_proj),
        gate_up_bias=_biases([each.gate_up_proj.bias for each in layers]),
        down_bias=_biases([each.down_proj.bias for each in layers]),
        is_clamped=first.activation is Activation.CLAMPED_SWIGLU,
    )


def _is_supported(expert: MLP) -> bool:
    matrices = (expert.gate_up_proj.matrix, expert.down_proj.matrix)
    is_gated = expert.has_gate and expert.activation is not Activation.GELU_TANH
    return is_gated and all(isinstance(each, FullMatrix) for each in matrices)


def _stacked(layers: Sequence[MLP], linear_of: Callable[[MLP], _Linear]) -> Tensor:
    """Return [num_experts, out_features, in_features] of a linear layer of each expert.

    The memory of an expert is free as soon as it is copied.
    """
    matrices = [linear_of(each).matrix for each in layers]
    stack: Tensor | None = None
    for index, matrix in enumerate(matrices):
        assert isinstance(matrix, FullMatrix)
        rows = matrix.weight.t()
        if stack is None:
            stack = torch.empty(len(matrices), *rows.shape, dtype=rows.dtype, device=rows.device)
        stack[index] = rows
        matrix.weight = stack[index].t()
    assert stack is not None, "no experts"
    return stack


def _biases(found: Sequence[Tensor | None]) -> Tensor | None:
    """Return the biases of all experts, [num_experts, out_features]; None where they have none."""
    return None if found[0] is None else torch.stack([each for each in found if each is not None])
