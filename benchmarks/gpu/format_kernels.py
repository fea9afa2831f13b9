"""Kernels of number formats with few bits on the device against their references on the CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.attention_shapes import SHAPES, Shape
from benchmarks.gpu.device_kernels import (
    WRONG_CACHE,
    attention_of,
    batch_of,
    compared,
    name_of,
    reference_of,
    require_triton,
)
from benchmarks.gpu.parts import Case, Context, Result, run_cases
from specdec.kernels.reference.kv_scales import KVScales, as_bytes, stored_values
from specdec.kernels.reference.packed_weight import (
    CodeKind,
    PackedWeight,
    pack_int4,
    quantize_weight,
)
from specdec.kernels.reference.rows import quantize_rows
from specdec.kernels.reference.triton_availability import kv_dtype_fault

_LAYERS = {"4096 to 6144": (6144, 4096), "14336 to 4096": (4096, 14336), "odd": (1000, 424)}
_GROUPS = (
    (CodeKind.INT4, 128),
    (CodeKind.INT4, 32),
    (CodeKind.INT8, None),
    (CodeKind.FLOAT8, None),
)
_ROWS = (1, 17, 64, 300)


def check_format_kernels(context: Context) -> Result:
    """Compare an 8-bit KV cache, and products by weights in few bits."""
    require_triton(context)
    device = context.device
    cases: list[Case] = [
        (f"{name}, KV in {name_of(kind)}", partial(_stored_in_8_bits, SHAPES[name], kind, device))
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2)
        if kv_dtype_fault(device, kind) is None
        for name in ("decode", "prefill", "tree of drafts")
    ]
    cases += [
        (
            f"{kind.value} by {group or 'output'}, {name}",
            partial(_product, kind, group, *size, device),
        )
        for kind, group in (*_GROUPS, (CodeKind.FLOAT8, 128))
        for name, size in list(_LAYERS.items())[: 1 if context.is_small else None]
    ]
    if kv_dtype_fault(device, torch.float8_e4m3fn) is None:  # both from sm_89 on
        cases += [
            (f"8-bit products by {group or 'output'}", partial(_float8, group, device))
            for group in (None, 128)
        ]
    return run_cases(cases, context)


def _stored_in_8_bits(shape: Shape, kind: torch.dtype, device: torch.device) -> Result:
    """Store and attend in an 8-bit cache on both kernels; the bytes must be equal."""
    batch, slots = batch_of(shape)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch.num_tokens, shape.heads, shape.head_dim, generator=generator)
    sizes = (2, shape.kv_heads, shape.head_dim)
    kv = torch.randn(batch.num_tokens, *sizes, generator=generator).bfloat16()
    scales = KVScales(0.25, 2.0)
    cache = stored_values(torch.randn(slots, *sizes, generator=generator), kind, scales)
    stored, query = cache.to(device, copy=True), query.bfloat16()
    plain, attention = reference_of(shape), attention_of(shape, device)
    plan = plain.plan(batch, torch.float32)
    expected = plain.run(query.float(), kv.float(), cache, plan, scales=scales)
    plan_of_device = attention.plan(batch, torch.bfloat16)
    found = attention.run(query.to(device), kv.to(device), stored, plan_of_device, scales=scales)
    is_stored = torch.equal(as_bytes(stored).cpu(), as_bytes(cache))
    return compared(found, expected, torch.bfloat16) | ({} if is_stored else WRONG_CACHE)


def _weight(kind: CodeKind, group: int | None, size: int, inner: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    if kind is CodeKind.FLOAT8:
        values = 100 * torch.randn(size, inner, generator=generator)
        codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)  # larger ones become NaN
        groups = -(-inner // (group or inner))
        scales = torch.rand(size, groups, generator=generator) / 1000
        return PackedWeight(kind, codes, scales, group or inner)
    if kind is CodeKind.INT8:
        return quantize_weight(torch.randn(size, inner, generator=generator), kind, group)
    codes = torch.randint(0, 16, (size, inner), generator=generator)
    count = group or inner
    scales = torch.rand(size, -(-inner // count), generator=generator).half() / 100
    zeros = torch.randint(0, 17, scales.shape, generator=generator, dtype=torch.uint8)
    return PackedWeight(kind, pack_int4(codes), scales, count, zeros)


def _rows_of(count: int, inner: int) -> Tensor:
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(1)).bfloat16()


def _product(
    kind: CodeKind, group: int | None, size: int, inner: int, device: torch.device
) -> Result:
    """Multiply by codes and dequantized; a row must have the same bits alone."""
    from specdec.kernels.triton import packed  # imports Triton

    weight, x = _weight(kind, group, size, inner), _rows_of(max(_ROWS), inner)
    own, rows = weight.to(device), x.to(device)
    values = weight.values()
    dense = packed.dequantize(own, torch.float32)
    if not torch.allclose(dense.cpu(), values, rtol=1e-6, atol=0):
        return {"passed": False, "error": "the dequantized values are others"}
    expected = x.float() @ values.t()
    alone = packed.multiply(rows[5:6], own)
    found: list[Result] = []
    for count in _ROWS:
        product = packed.multiply(rows[:count], own)
        found.append(compared(product, expected[:count], torch.bfloat16))
        if count > 5 and not torch.equal(product[5], alone[0]):
            return {"passed": False, "error": f"a row has other bits beside {count} rows"}
    return max(found, key=lambda each: float(each["error_of_norm"]))


def _float8(group: int | None, device: torch.device) -> Result:
    """Multiply 8-bit floats by 8-bit floats."""
    from specdec.kernels.triton import packed  # imports Triton

    inner = 4096
    weight, x = _weight(CodeKind.FLOAT8, group, 1000, inner), _rows_of(40, inner)
    quantized, scales = quantize_rows(x.view(-1, group or inner), torch.float8_e4m3fn)
    values = (quantized.float() * scales[:, None]).view(40, inner)
    expected = values @ weight.values().t()
    found = packed.multiply_float8(x.to(device), weight.to(device))
    return compared(found, expected, torch.bfloat16)
