"""Weights of a model in the layouts of compressed-tensors and bitsandbytes, as in `packing`."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from tests.specdec.packing import Packed

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The levels of NormalFloat (Dettmers et al. 2023, appendix E)."""


def _pack(values: Tensor, bits: int) -> Tensor:
    """Pack signed integers along the last dimension, padded, as `pack_to_int32` is documented."""
    per_integer = 32 // bits
    unsigned = values.long() + 2 ** (bits - 1)
    padding = -values.shape[1] % per_integer
    unsigned = torch.nn.functional.pad(unsigned, (0, padding)).unflatten(1, (-1, per_integer))
    packed = (unsigned << bits * torch.arange(per_integer)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _pack_dense(values: Tensor, bits: int) -> Tensor:
    """Pack signed integers along the last dimension as one row of bits, the lowest ones first."""
    unsigned = values.long() + 2 ** (bits - 1)
    stream = (unsigned[..., None] >> torch.arange(bits) & 1).flatten(1)
    padding = -stream.shape[1] % 32
    words = torch.nn.functional.pad(stream, (0, padding)).unflatten(1, (-1, 32))
    packed = (words << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def compressed(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 8,
    sym: bool = True,
    is_packed: bool = True,
    packs_zeros: bool = True,
    permuted: bool = False,
    is_dense: bool = False,
) -> Packed:
    """group_size: -1 for a scale for each output. is_dense: whether values have no gaps."""
    pack = _pack_dense if is_dense else _pack
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    groups = torch.arange(in_features) // size
    if permuted:
        groups = groups[torch.randperm(in_features, generator=torch.Generator().manual_seed(0))]
    top, count = 2 ** (bits - 1) - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(out_features, count), torch.zeros(out_features, count)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            scales[:, group] = torch.maximum(-low, high) / top
        else:
            scales[:, group] = (high - low) / (2**bits - 1)
            zeros[:, group] = (-(top + 1) - low / scales[:, group]).round().clamp(-top - 1, top)
    values = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(-top - 1, top)
    tensors = {"weight_scale": scales}
    if is_packed:
        tensors["weight_packed"] = pack(values, bits)
        tensors["weight_shape"] = torch.tensor(weight.shape)
    else:
        tensors["weight"] = values.to(torch.int8)
    if not sym:
        tensors["weight_zero_point"] = (
            pack(zeros.t(), bits).t().contiguous() if packs_zeros else zeros.to(torch.int8)
        )
    if permuted:
        tensors["weight_g_idx"] = groups.int()
    return tensors, (values - zeros[:, groups]) * scales[:, groups]


def float8_blocks(weight: Tensor, *, rows: int = 48, cols: int = 32) -> Packed:
    largest = torch.finfo(torch.float8_e4m3fn).max
    down, across = torch.arange(weight.shape[0]) // rows, torch.arange(weight.shape[1]) // cols
    scales = torch.empty(int(down.max()) + 1, int(across.max()) + 1)
    for row in range(scales.shape[0]):
        for col in range(scales.shape[1]):
            scales[row, col] = weight[down == row][:, across == col].abs().max() / largest
    spread = scales[down][:, across]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales}, stored.float() * spread


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floats with two bits of exponent and one of mantissa."""


def float4(weight: Tensor, *, is_nvfp4: bool, is_modelopt: bool = False) -> Packed:
    """is_modelopt: whether NVFP4 is stored as ModelOpt does."""
    groups = weight.unflatten(1, (-1, 16 if is_nvfp4 else 32))
    wanted = groups.abs().amax(-1) / E2M1[-1]
    tensors = {}
    if is_nvfp4:
        divisor = torch.finfo(torch.float8_e4m3fn).max / wanted.max()
        tensors["weight_scale"] = (wanted * divisor).to(torch.float8_e4m3fn)
        if is_modelopt:
            tensors["weight_scale_2"] = 1 / divisor
            scales = tensors["weight_scale"].float() * tensors["weight_scale_2"]
        else:
            tensors["weight_global_scale"] = divisor.reshape(1)
            scales = tensors["weight_scale"].float() / divisor
    else:
        exponents = wanted.log2().ceil()
        tensors["weight_scale"] = (exponents + 127).to(torch.uint8)
        scales = 2.0**exponents
    scaled = groups / scales[..., None]
    places = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    codes = (places + 8 * (scaled < 0)).flatten(1)
    name = "weight" if is_modelopt else "weight_packed"
    tensors[name] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    rounded = torch.tensor(E2M1)[places] * torch.where(scaled < 0, -1.0, 1.0)
    return tensors, (rounded * scales[..., None]).flatten(1)


def four_bits(weight: Tensor, *, kind: str = "nf4", nested: bool = False) -> Packed:
    """Quantize blocks of 64 values, and with double quantization blocks of 16 factors."""
    block_size, outer_size = 64, 16
    levels = torch.tensor(NF4) if kind == "nf4" else torch.linspace(-1, 1, 16)
    flat = weight.flatten()
    assert len(flat) % block_size == 0
    absmax = flat.view(-1, block_size).abs().amax(1)
    state = {
        "quant_type": kind,
        "blocksize": block_size,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    tensors = {"weight.quant_map": levels}
    if nested:
        absmax = _nest(absmax, outer_size, tensors, state)
    else:
        tensors["weight.absmax"] = absmax
    factors = absmax.repeat_interleave(block_size)
    values = ((flat / factors)[:, None] - levels).abs().argmin(1)
    tensors["weight"] = (values[::2] << 4 | values[1::2]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    name = f"weight.quant_state.bitsandbytes__{kind}"
    tensors[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors, (levels[values] * factors).view(weight.shape)


def _nest(
    absmax: Tensor, size: int, tensors: dict[str, Tensor], state: dict[str, object]
) -> Tensor:
    """Quantize factors to 8 bits; return those that are stored."""
    levels = torch.linspace(-1, 1, 256)
    offset = float(absmax.mean())
    padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % size)).view(-1, size)
    outer = padded.abs().amax(1)
    spread = outer.repeat_interleave(size)[: len(absmax)]
    codes = (((absmax - offset) / spread)[:, None] - levels).abs().argmin(1)
    state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
    tensors |= {
        "weight.absmax": codes.to(torch.uint8),
        "weight.nested_absmax": outer,
        "weight.nested_quant_map": levels,
    }
    return levels[codes] * spread + offset


def int8_rows(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round()
    tensors = {"weight": values.to(torch.int8), "SCB": largest}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, values * (largest / 127)[:, None]
