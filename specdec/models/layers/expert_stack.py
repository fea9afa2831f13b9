"""The matrices of a mixture's experts side by side, as kernels of all experts read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.kernels.reference.experts import ExpertStack
from specdec.kernels.reference.packed_weight import PackedWeight, joined
from specdec.models.config.traits import Activation
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from specdec.models.layers.matrix import FullMatrix
from specdec.models.layers.mlp import MLP
from specdec.models.layers.quantized_matrix import QuantizedMatrix

_Linear = ColumnParallelLinear | RowParallelLinear


def stack_experts(experts: Sequence[nn.Module]) -> ExpertStack | None:
    """Move the matrices of experts side by side; those of the experts become views of them.

    Returns None for no expert, for experts without a gate that the kernels have, and where some
    matrices have another format than others, or inputs in another order than the rows.
    """
    layers = [each for each in experts if isinstance(each, MLP)]
    if not layers or len(layers) < len(experts) or not all(map(_has_gate, layers)):
        return None
    gate_up = _stacked([each.gate_up_proj for each in layers])
    down = _stacked([each.down_proj for each in layers])
    if gate_up is None or down is None or type(gate_up) is not type(down):
        return None
    return ExpertStack(
        gate_up,
        down,
        gate_up_bias=_biases([each.gate_up_proj.bias for each in layers]),
        down_bias=_biases([each.down_proj.bias for each in layers]),
        is_clamped=layers[0].activation is Activation.CLAMPED_SWIGLU,
    )


def _has_gate(expert: MLP) -> bool:
    return expert.has_gate and expert.activation in (Activation.SILU, Activation.CLAMPED_SWIGLU)


def _stacked(linears: Sequence[_Linear]) -> Tensor | PackedWeight | None:
    """Return the matrices of a linear layer of each expert, as in ExpertStack."""
    matrices = [each.matrix for each in linears]
    full = [each for each in matrices if isinstance(each, FullMatrix)]
    packed = [each for each in matrices if isinstance(each, QuantizedMatrix)]
    if len(full) == len(matrices):
        return _stacked_full(full)
    return _joined(packed) if len(packed) == len(matrices) else None


def _stacked_full(matrices: Sequence[FullMatrix]) -> Tensor:
    """Return [num_experts, out_features, in_features]; an expert's memory is free once copied."""
    rows = matrices[0].weight.t()
    stack = torch.empty(len(matrices), *rows.shape, dtype=rows.dtype, device=rows.device)
    for own, matrix in zip(stack, matrices, strict=True):
        own.copy_(matrix.weight.t())
        matrix.weight = own.t()
    return stack


def _joined(matrices: Sequence[QuantizedMatrix]) -> PackedWeight | None:
    """Return the rows of all experts, [num_experts * out_features, in_features]."""
    whole = joined([each.weight for each in matrices])
    if whole is None or whole.order is not None:
        return None
    size = whole.shape[0] // len(matrices)
    for index, matrix in enumerate(matrices):
        matrix.weight = whole.part(range(index * size, (index + 1) * size))
    return whole


def _biases(found: Sequence[Tensor | None]) -> Tensor | None:
    """Return the biases of all experts, [num_experts, out_features]; None where they have none."""
    return None if found[0] is None else torch.stack([each for each in found if each is not None])
