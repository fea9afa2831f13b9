"""Slices of quantized checkpoints as packed weights, without dequantizing them.

AWQ, GPTQ in 4 bits, packed 4-bit integers and plain int8 of compressed-tensors, and 8-bit floats of
FP8 checkpoints and compressed-tensors. Other layouts, and slices that do not begin at a group of
inputs, are dequantized by `WeightFormat.read`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference.packed_weight import (
    CODES_PER_WORD,
    SYMMETRIC_ZERO,
    CodeKind,
    PackedWeight,
    pack_int4,
    unpack_int4,
)
from specdec.models.weights.awq_gptq import Awq, Gptq
from specdec.models.weights.compressed_tensors import PACKED, CompressedTensors
from specdec.models.weights.dequantize import Float8, SeveralLayouts, WeightFormat
from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.tensor_headers import sibling
from specdec.models.weights.weight_slices import as_slice, resolved_group_size, units_of


def has_packed_kernels(layout: WeightFormat) -> bool:
    """Return whether all weights of a layout stay packed where Triton's kernels run."""
    match layout:
        case Awq() | Float8():
            return True
        case CompressedTensors(is_reordered=False):
            return layout.bits == 4 if layout.format == PACKED else layout.is_symmetric
        case Gptq(bits=bits):
            return bits == 4
        case SeveralLayouts(layouts):
            return all(map(has_packed_kernels, layouts))
    return False


def read_packed(
    layout: WeightFormat, tensors: TensorSource, name: str, rows: range, cols: range
) -> PackedWeight | None:
    """Return rows and columns of a weight that the layout holds; None where they cannot be packed.

    The tensors are on the CPU.
    """
    match layout:
        case Awq():
            return _awq(layout, tensors, name, rows, cols)
        case Gptq(bits=4):
            return _gptq(layout, tensors, name, rows, cols)
        case CompressedTensors():
            return _compressed(layout, tensors, name, rows, cols)
        case Float8():
            return _float8(layout, tensors, name, rows, cols)
        case SeveralLayouts():
            return read_packed(layout.layout_of(tensors, name), tensors, name, rows, cols)
    return None


def _awq(
    layout: Awq, tensors: TensorSource, name: str, rows: range, cols: range
) -> PackedWeight | None:
    inner = layout.shape(tensors, name)[1]
    group = resolved_group_size(layout.group_size, inner)
    if not _fits(cols, group):
        return None
    held = units_of(cols, group)
    codes = layout.unpacked(tensors, sibling(name, "qweight"), cols, rows)
    zeros = layout.unpacked(tensors, sibling(name, "qzeros"), held, rows)
    scales = tensors.slice(sibling(name, "scales"), as_slice(held), as_slice(rows))
    return PackedWeight(
        CodeKind.INT4,
        pack_int4(codes.t()),
        scales.t().contiguous(),
        min(group, len(cols)),
        zeros.t().to(torch.uint8).contiguous(),
    )


def _gptq(
    layout: Gptq, tensors: TensorSource, name: str, rows: range, cols: range
) -> PackedWeight | None:
    inner = layout.shape(tensors, name)[1]
    group = layout.group_size_of(tensors, name, inner)
    index = layout.group_index(tensors, name, cols)
    order = _order_of(index, group)
    is_whole = len(cols) == inner
    if not _fits(cols, group) or (order is not None and not is_whole):
        return None
    held = units_of(cols, group)
    words = tensors.slice(
        sibling(name, "qweight"), as_slice(units_of(cols, CODES_PER_WORD)), as_slice(rows)
    ).t()
    if order is not None:
        if not torch.equal(index[order], torch.arange(inner) // group):
            return None  # groups of several sizes
        words = pack_int4(unpack_int4(words)[:, order])
    scales = tensors.slice(sibling(name, "scales"), as_slice(held), as_slice(rows)).t()
    zeros = layout.zeros(tensors, name, rows)[held.start : held.stop].t()
    return PackedWeight(
        CodeKind.INT4,
        words.contiguous(),
        scales.contiguous(),
        min(group, len(cols)),
        zeros.to(torch.uint8).contiguous(),
        order,
    )


def _order_of(index: Tensor, group: int) -> Tensor | None:
    """Return the inputs sorted by their group; None where they are in order already."""
    if torch.equal(index - index[0], torch.arange(len(index)) // group):
        return None
    return index.argsort(stable=True)


def _compressed(
    layout: CompressedTensors, tensors: TensorSource, name: str, rows: range, cols: range
) -> PackedWeight | None:
    size, inner = layout.shape(tensors, name)
    if sibling(name, "weight_g_idx") in tensors:
        return None
    stored = sibling(name, "weight_scale")
    group = layout.group_size or inner
    if name in tensors:
        if sibling(name, "weight_zero_point") in tensors:
            return None
        return _bytes(tensors, name, rows, cols, stored, layout.block, layout.group_size)
    shape = tensors.shape(stored)
    is_by_group = shape == (size, -(-inner // group)) or (shape == (size,) and group == inner)
    if layout.bits != 4 or not is_by_group or not _fits(cols, group):
        return None
    held, words = units_of(cols, group), units_of(cols, CODES_PER_WORD)
    window = as_slice(rows), as_slice(held)
    zeros = layout.zero_points(tensors, name, rows, cols)  # of signed values, by input
    return PackedWeight(
        CodeKind.INT4,
        tensors.slice(sibling(name, "weight_packed"), as_slice(rows), as_slice(words)).contiguous(),
        tensors.slice(stored, *window[: len(shape)]).reshape(len(rows), -1).contiguous(),
        min(group, len(cols)),
        None if zeros is None else (zeros[:, ::group] + SYMMETRIC_ZERO).to(torch.uint8),
    )


def _float8(
    layout: Float8, tensors: TensorSource, name: str, rows: range, cols: range
) -> PackedWeight | None:
    inverse = sibling(name, "weight_scale_inv")
    stored = inverse if inverse in tensors else sibling(name, "weight_scale")
    return _bytes(tensors, name, rows, cols, stored, layout.block, None)


def _bytes(
    tensors: TensorSource,
    name: str,
    rows: range,
    cols: range,
    stored: str,
    block: tuple[int, int] | None,
    group_size: int | None,
) -> PackedWeight | None:
    """Return int8 or float8 codes with scales for the matrix, each output, a group or a block."""
    shape, (size, inner) = tensors.shape(stored), tensors.shape(name)
    if shape in ((), (1,), (1, 1)):
        whole = tensors.slice(stored, *[slice(None)] * len(shape)).float().reshape(1, 1)
        scales, group = whole.expand(len(rows), 1), inner
    elif shape in ((size, 1), (size,)):
        others = [slice(None)] * (len(shape) - 1)
        scales = tensors.slice(stored, as_slice(rows), *others).float().reshape(-1, 1)
        group = inner
    else:
        down, group = (1, group_size or inner) if block is None else block
        if shape != (-(-size // down), -(-inner // group)) or not _fits(cols, group):
            return None
        held, across = units_of(rows, down), units_of(cols, group)
        found = tensors.slice(stored, as_slice(held), as_slice(across)).float()
        scales = found[torch.arange(rows.start, rows.stop) // down - held.start]
    codes = tensors.slice(name, as_slice(rows), as_slice(cols)).contiguous()
    kinds = {torch.int8: CodeKind.INT8, torch.float8_e4m3fn: CodeKind.FLOAT8}
    if codes.dtype not in kinds:
        return None
    return PackedWeight(kinds[codes.dtype], codes, scales.contiguous(), min(group, len(cols)))


def _fits(cols: range, group: int) -> bool:
    """Return whether columns begin at a group or are in one, and are whole words of 4-bit codes."""
    is_aligned = cols.start % group == 0 or len(units_of(cols, group)) == 1
    return is_aligned and cols.start % CODES_PER_WORD == 0 and len(cols) % CODES_PER_WORD == 0
