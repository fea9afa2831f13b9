"""Mixtures of experts on the device: against their reference, and bits alone and in a batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.device_kernels import compared, name_of, require_triton
from benchmarks.gpu.parts import Case, Context, Result, run_cases
from specdec.kernels.reference import experts as reference
from specdec.kernels.reference.experts import ExpertStack, Routes, RoutingRule
from specdec.kernels.reference.packed_weight import CodeKind, PackedWeight, quantize_weight

_SHAPES = {
    "Mixtral": (4096, 7168, 8, RoutingRule(2, normalizes=True), False),
    "Qwen3-30B-A3B": (2048, 768, 128, RoutingRule(8, normalizes=True), False),
    "GPT-OSS": (2880, 2880, 32, RoutingRule(4, normalizes=True), True),
    "DeepSeek-V3 on 8 ranks": (7168, 2048, 32, RoutingRule(8, True, True, 8, 4, 2.5), False),
    "small": (64, 48, 5, RoutingRule(2, normalizes=True), True),
}
"""Hidden size, hidden units, experts of a rank, their choice, and whether gates are GPT-OSS's."""
_NUM_ROWS = (1, 40, 300)
_GROUP = 128
_FORMATS: tuple[tuple[torch.dtype, CodeKind | None], ...] = (
    *((dtype, None) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *((torch.bfloat16, kind) for kind in (CodeKind.INT4, CodeKind.INT8)),
)
"""Types of activations, and the codes of the experts; None for the type of activations."""


def check_expert_kernels(context: Context) -> Result:
    """Compare the results of tokens with random routes, for steps of decodes and of prompts."""
    require_triton(context)
    names = ("small",) if context.is_small else tuple(_SHAPES)
    cases: list[Case] = [
        (
            f"{name}, {num_rows} rows, {'' if kind is None else f'{kind.value}, '}{name_of(dtype)}",
            partial(_mixture, name, num_rows, dtype, context.device, kind),
        )
        for dtype, kind in _FORMATS
        for name in names
        for num_rows in _NUM_ROWS
        if (dtype == torch.bfloat16 and kind is None) or num_rows <= _NUM_ROWS[1]
    ]
    return run_cases(cases, context)


def _mixture(
    name: str,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: CodeKind | None = None,
) -> Result:
    """Compare experts in full precision, or in codes of a kind."""
    from specdec.kernels.triton import experts  # imports Triton

    size, _, num_experts, rule, _ = _SHAPES[name]
    stack, generator = _stack(name, dtype, device, kind), torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, size, generator=generator).to(device, dtype)
    logits = torch.randn(num_rows, num_experts, generator=generator).to(device)
    routes, expected = (kind.route(logits, None, rule) for kind in (experts, reference))
    has_routes = routes.chosen.tolist() == expected.chosen.tolist()
    found = experts.run_experts(x, routes, stack, 0)
    result = compared(found, reference.run_experts(x.float(), routes, stack, 0), dtype)
    last = slice(num_rows - 1, num_rows)
    alone = experts.run_experts(x[last], Routes(*(each[last] for each in routes)), stack, 0)
    is_same = torch.equal(alone[0], found[-1])
    num_pairs, is_packed = routes.chosen.numel(), kind is not None
    sizes = experts.TileSizes.of(
        num_pairs, num_experts, dtype.itemsize, invariant=False, is_packed=is_packed
    )
    # Tiles of 64 rows may have another instruction than those of 16 and 32.
    must_be_same = sizes.rows != experts.MANY_ROWS
    passed = has_routes and result["passed"] and (is_same or not must_be_same)
    return result | {"passed": passed, "same_bits_alone": is_same}


def _stack(
    name: str, dtype: torch.dtype, device: torch.device, kind: CodeKind | None
) -> ExpertStack:
    """Return random experts."""
    size, units, num_experts, _, is_gpt_oss = _SHAPES[name]

    def make(*shape: int) -> Tensor:
        values = torch.empty(shape, dtype=dtype, device=device)
        return values.normal_(std=shape[-1] ** -0.5)

    def matrices(outputs: int, inputs: int) -> Tensor | PackedWeight:
        found = make(num_experts, outputs, inputs)
        if kind is None:
            return found
        return quantize_weight(found.flatten(0, 1), kind, _GROUP if inputs % _GROUP == 0 else None)

    return ExpertStack(
        matrices(2 * units, size),
        matrices(size, units),
        make(num_experts, 2 * units) if is_gpt_oss else None,
        make(num_experts, size) if is_gpt_oss else None,
        is_gpt_oss,
    )
