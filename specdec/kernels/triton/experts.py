"""Mixtures of experts on a GPU; see `specdec.kernels.reference.experts` for their definition.

Five launches, whatever experts the tokens have. Tiles have 16 rows where few tokens reach an
expert, as in a step of decodes, and 64 otherwise; Hopper multiplies the latter by another
instruction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.kernels.reference.experts import ExpertStack, Routes, RoutingRule
from specdec.kernels.reference.packed_weight import PackedWeight
from specdec.kernels.triton.device import experts as kernels
from specdec.kernels.triton.device.packed import NUMBERS
from specdec.kernels.triton.packed import BLOCK_K, KINDS, integers_of, is_coarse

FEW_ROWS, PACKED_ROWS, MANY_ROWS = 16, 32, 64
"""Rows of a tile."""

_MOST_PAIRS_OF_FEW = 16
_PAIRS_AT_ONCE = 1024
_SUM_BLOCK = 1024
_TILE_WORDS = 3


class TileSizes(NamedTuple):
    """Rows of a tile, columns of the two products, and inputs that a program loads at once."""

    rows: int
    units: int
    results: int
    inputs: int

    @classmethod
    def of(
        cls,
        num_pairs: int,
        num_experts: int,
        element_size: int,
        *,
        invariant: bool,
        is_packed: bool = False,
    ) -> TileSizes:
        """Return the sizes for pairs of tokens and experts; element_size: of the weights.

        invariant: whether a row is multiplied by the same instruction in any batch. is_packed:
        whether the experts are in few bits, for which BLOCK_K is that of `packed`; 16 and 32 rows
        have the same instruction.
        """
        is_few = invariant or num_pairs <= _MOST_PAIRS_OF_FEW * num_experts
        inputs = 64 if element_size == 2 else 32  # so that stages fit into shared memory
        if is_packed:
            return cls(FEW_ROWS if is_few else PACKED_ROWS, 32, 64, inputs)
        return cls(FEW_ROWS, 32, 64, inputs) if is_few else cls(MANY_ROWS, 64, 128, inputs)


def num_tiles_of(num_pairs: int, num_experts: int, num_rows: int) -> int:
    """Return the tiles of `num_rows` that hold any division of pairs among experts."""
    return min(num_pairs, num_pairs // num_rows + num_experts)


def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> Routes:
    """Return the routes as `kernels.reference.experts.route`; of equal experts the first."""
    assert logits.is_contiguous()
    num_rows, num_experts = logits.shape
    group_size = num_experts // rule.num_groups
    size = (num_rows, rule.num_per_token)
    weights = torch.empty(size, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(size, dtype=torch.int32, device=logits.device)
    kernels.route[(num_rows,)](
        logits,
        logits if bias is None else bias,
        weights,
        chosen,
        rule.scale,
        PER_TOKEN=rule.num_per_token,
        GROUPS=rule.num_groups,
        GROUP_SIZE=group_size,
        CHOSEN_GROUPS=rule.num_chosen_groups,
        IS_SIGMOID=rule.is_sigmoid,
        ADDS_TWO_BEST=rule.adds_two_best,
        HAS_BIAS=bias is not None,
        NORMALIZES=rule.normalizes,
        BLOCK_G=triton.next_power_of_2(rule.num_groups),
        BLOCK_E=triton.next_power_of_2(group_size),
        BLOCK_T=triton.next_power_of_2(rule.num_per_token),
        num_warps=1 if num_experts <= 128 else 2,
    )
    return Routes(weights, chosen)


class Plan(NamedTuple):
    """The pairs of each expert, and their tiles."""

    order: Tensor  # [num_pairs] int32; after the pairs of this rank's experts any
    tiles: Tensor  # [num_tiles, 3] int32: expert, or -1; first place in `order`, and their end


def plan_tiles(chosen: Tensor, first: int, num_experts: int, num_rows: int) -> Plan:
    """Divide pairs among tiles. chosen: [T, K] int32. first, num_experts: of this rank."""
    num_pairs = chosen.numel()
    num_tiles = num_tiles_of(num_pairs, num_experts, num_rows)
    order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(num_tiles, _TILE_WORDS, dtype=torch.int32, device=chosen.device)
    kernels.plan_tiles[(num_experts,)](
        chosen,
        order,
        tiles,
        num_pairs,
        first,
        num_tiles,
        IS_SPARSE=num_tiles == num_pairs,
        BLOCK_M=num_rows,
        BLOCK_P=min(_PAIRS_AT_ONCE, max(16, triton.next_power_of_2(num_pairs))),
        num_warps=4,
    )
    return Plan(order, tiles)


def run_experts(
    x: Tensor,
    routes: Routes,
    stack: ExpertStack,
    first: int,
    base: Tensor | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """Return base plus the results of experts as `kernels.reference.experts.run_experts`.

    invariant: whether the bits of a row do not depend on how many others there are.
    """
    (num_rows, size), per_token = x.shape, routes.chosen.shape[1]
    if not stack.num_experts or not stack.units or not num_rows:
        return torch.zeros_like(x) if base is None else base.clone()
    num_pairs, element_size = routes.chosen.numel(), x.element_size()
    is_packed = isinstance(stack.down, PackedWeight)
    sizes = TileSizes.of(
        num_pairs, stack.num_experts, element_size, invariant=invariant, is_packed=is_packed
    )
    plan = plan_tiles(routes.chosen, first, stack.num_experts, sizes.rows)
    results = _results(_hidden_units(x, stack, plan, per_token, sizes), stack, plan, sizes)
    assert base is None or base.is_contiguous()
    output = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    kernels.add_results[(num_rows, triton.cdiv(size, _SUM_BLOCK))](
        results,
        routes.weights,
        routes.chosen,
        x if base is None else base,
        output,
        size,
        first,
        stack.num_experts,
        PER_TOKEN=per_token,
        HAS_BASE=base is not None,
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )
    return output


class _Matrices(NamedTuple):
    """The matrices of all experts as arguments of a kernel: numbers, or codes in few bits.

    tensors: values, scales and zero points. groups: their size and number. constants: with
    BLOCK_K, the inputs that a program loads at once.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    groups: tuple[int, int]
    constants: dict[str, int]

    @classmethod
    def of(cls, matrices: Tensor | PackedWeight, inputs: int) -> _Matrices:
        """Return the arguments; inputs: BLOCK_K of numbers."""
        if isinstance(matrices, Tensor):
            assert matrices.is_contiguous()
            has = {"HAS_ZEROS": False, "IS_COARSE": False}
            constants = {"KIND": NUMBERS.value, **has, "BLOCK_K": inputs}
            return cls((matrices, matrices, matrices), (1, 1), constants)
        scales, zeros, inputs = matrices.scales, matrices.zeros, BLOCK_K[matrices.kind]
        has = {"HAS_ZEROS": zeros is not None, "IS_COARSE": is_coarse(matrices, inputs)}
        return cls(
            (integers_of(matrices), scales, scales if zeros is None else zeros),
            (matrices.group_size, scales.shape[1]),
            {"KIND": KINDS[matrices.kind], **has, "BLOCK_K": inputs},
        )


def _hidden_units(
    x: Tensor, stack: ExpertStack, plan: Plan, per_token: int, sizes: TileSizes
) -> Tensor:
    """Return the hidden units of pairs, [num_pairs, units], in the order of the plan."""
    assert x.stride(1) == 1
    units, bias = x.new_empty(len(plan.order), stack.units), stack.gate_up_bias
    weight = _Matrices.of(stack.gate_up, sizes.inputs)
    kernels.hidden_units[(len(plan.tiles), triton.cdiv(stack.units, sizes.units))](
        x,
        *weight.tensors,
        weight.tensors[0] if bias is None else bias,
        plan.order,
        plan.tiles,
        units,
        stack.units,
        x.shape[1],
        *weight.groups,
        x.stride(0),
        PER_TOKEN=per_token,
        IS_CLAMPED=stack.is_clamped,
        HAS_BIAS=bias is not None,
        **weight.constants,
        BLOCK_M=sizes.rows,
        BLOCK_N=sizes.units,
        num_warps=4,
        num_stages=3,
    )
    return units


def _results(units: Tensor, stack: ExpertStack, plan: Plan, sizes: TileSizes) -> Tensor:
    """Return the results of pairs, [num_pairs, hidden_size]; those of other ranks are any."""
    size, bias = stack.gate_up.shape[-1], stack.down_bias
    weight, results = _Matrices.of(stack.down, sizes.inputs), units.new_empty(len(units), size)
    kernels.expert_results[(len(plan.tiles), triton.cdiv(size, sizes.results))](
        units,
        *weight.tensors,
        weight.tensors[0] if bias is None else bias,
        plan.order,
        plan.tiles,
        results,
        size,
        stack.units,
        *weight.groups,
        HAS_BIAS=bias is not None,
        **weight.constants,
        BLOCK_M=sizes.rows,
        BLOCK_N=sizes.results,
        num_warps=4,
        num_stages=3,
    )
    return results
