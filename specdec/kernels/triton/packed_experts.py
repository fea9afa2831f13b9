"""Launches of the products of experts in few bits; `triton.experts` plans their tiles."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import triton
from torch import Tensor

from specdec.kernels.reference.packed_weight import PackedWeight
from specdec.kernels.triton.device import packed_experts as kernels
from specdec.kernels.triton.packed import BLOCK_K, KINDS, integers_of, is_coarse


class PackedTiles(NamedTuple):
    """The pairs of each expert, and their tiles, as `triton.experts.Plan`. rows: of a tile."""

    order: Tensor
    tiles: Tensor
    rows: int


UNITS, RESULTS = 32, 64
"""Columns of a tile of the first and the second product."""


class _Constants(TypedDict):
    KIND: int
    HAS_ZEROS: bool
    IS_COARSE: bool
    BLOCK_K: int


def hidden_units(
    x: Tensor,  # [T, hidden_size], rows contiguous
    weight: PackedWeight,  # [num_experts * 2 * units, hidden_size]
    bias: Tensor | None,  # [num_experts, 2 * units]
    plan: PackedTiles,
    units: Tensor,  # [num_pairs, units], is written
    per_token: int,
    *,
    is_clamped: bool,
) -> None:
    """Write the hidden units of pairs, in the order of the plan."""
    size = units.shape[1]
    kernels.packed_hidden_units[(len(plan.tiles), triton.cdiv(size, UNITS))](
        x,
        integers_of(weight),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        plan.order,
        plan.tiles,
        units,
        size,
        x.shape[1],
        weight.group_size,
        weight.scales.shape[1],
        x.stride(0),
        PER_TOKEN=per_token,
        IS_CLAMPED=is_clamped,
        HAS_BIAS=bias is not None,
        **_constants(weight),
        BLOCK_M=plan.rows,
        BLOCK_N=UNITS,
        num_warps=4,
        num_stages=3,
    )


def results(
    units: Tensor,  # [num_pairs, units], in the order of the plan
    weight: PackedWeight,  # [num_experts * hidden_size, units]
    bias: Tensor | None,  # [num_experts, hidden_size]
    plan: PackedTiles,
    output: Tensor,  # [num_pairs, hidden_size], is written
) -> None:
    """Write the results of pairs, in their order."""
    size = output.shape[1]
    kernels.packed_expert_results[(len(plan.tiles), triton.cdiv(size, RESULTS))](
        units,
        integers_of(weight),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        plan.order,
        plan.tiles,
        output,
        size,
        units.shape[1],
        weight.group_size,
        weight.scales.shape[1],
        HAS_BIAS=bias is not None,
        **_constants(weight),
        BLOCK_M=plan.rows,
        BLOCK_N=RESULTS,
        num_warps=4,
        num_stages=3,
    )


def _constants(weight: PackedWeight) -> _Constants:
    inputs = BLOCK_K[weight.kind]
    return _Constants(
        KIND=KINDS[weight.kind],
        HAS_ZEROS=weight.zeros is not None,
        IS_COARSE=is_coarse(weight, inputs),
        BLOCK_K=inputs,
    )
