"""Grouped LoRA updates on the device: against their reference, and bits alone and in a batch."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.device_kernels import compared, name_of, require_triton
from benchmarks.gpu.parts import Case, Context, Result, run_cases
from specdec.kernels.reference.lora import LoraStack, add_updates

_NUM_PLACES = 8
_SHAPES = {
    "queries, keys and values": (4096, (4096, 1024, 1024)),
    "gate and up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
    "SmolLM2's output": (576, (576,)),
}
"""Inner size and outputs of layers: Llama-3.1-8B's, and one of SmolLM2."""


def check_lora_kernels(context: Context) -> Result:
    """Compare updates of rows with eight adapters, for steps of decodes and of prompts."""
    require_triton(context)
    shapes = ("SmolLM2's output",) if context.is_small else tuple(_SHAPES)
    cases: list[Case] = [
        (
            f"{name}, rank {rank}, {num_rows} rows, {name_of(dtype)}",
            partial(_updates, name, rank, num_rows, dtype, context.device),
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for name in shapes
        for rank, num_rows in ((16, 1), (16, 40), (64, 300))
        if not context.is_small or num_rows <= 40
    ]
    return run_cases(cases, context)


def _updates(
    name: str, rank: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Result:
    from specdec.kernels.triton.lora import TritonLora  # imports Triton

    inner, sizes = _SHAPES[name]
    stack, add = _stack(rank, inner, sizes, dtype, device), TritonLora(device)
    add.prepare(stack)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, inner, generator=generator).to(device, dtype)
    places = (1 + torch.arange(num_rows) * 5 % (_NUM_PLACES + 1)).to(device, torch.int32)
    places[places > _NUM_PLACES] = 0
    found = torch.zeros(num_rows, sum(sizes), device=device)
    add(found, x, places, stack)
    exact = LoraStack(stack.downs.float(), stack.ups.float(), stack.columns)
    expected = torch.zeros_like(found)
    add_updates(expected, x.float(), places, exact)
    last = slice(num_rows - 1, num_rows)
    alone = torch.zeros_like(found[last])
    add(alone, x[last], places[last], stack)
    is_same = torch.equal(alone[0], found[-1])
    result = compared(found, expected, dtype)
    return result | {"passed": result["passed"] and is_same, "same_bits_alone": is_same}


def _stack(
    rank: int, inner: int, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> LoraStack:
    """Return random updates in all places."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    columns = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    stack = LoraStack.empty(_NUM_PLACES, rank, inner, columns, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for tensor, scale in ((stack.downs, inner**-0.5), (stack.ups, rank**-0.5)):
        for place in tensor:
            place.copy_(torch.randn(place.shape, generator=generator) * scale)
    return stack
