"""Weights of a model in the layouts of AWQ, GPTQ and FP8 checkpoints.

Each function packs one matrix by the definition of the layout, and returns the tensors to store and
the dequantized weight.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def _quantize(weight: np.ndarray, groups: np.ndarray, bits: int, sym: bool) -> Any:
    """Quantize weight [in, out] with groups [in].

    Returns values [in, out], zeros and scales [groups, out].
    """
    top, count = 2**bits - 1, groups.max() + 1
    zeros = np.empty((count, weight.shape[1]), dtype=np.int64)
    scales = np.empty((count, weight.shape[1]), dtype=np.float16)
    values = np.empty(weight.shape, dtype=np.int64)
    for group in range(count):
        part = weight[groups == group]
        low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scales[group] = (high - low) / top
        step = scales[group].astype(np.float32)
        zeros[group] = 2 ** (bits - 1) if sym else np.clip(np.round(-low / step), 0, top)
        values[groups == group] = np.clip(np.round(part / step) + zeros[group], 0, top)
    return values, zeros, scales


def _dequantized(values: np.ndarray, zeros: Any, scales: Any, groups: np.ndarray) -> Tensor:
    weight = (values - zeros[groups]) * scales.astype(np.float32)[groups]
    return torch.from_numpy(weight.T.astype(np.float32).copy())


def _pack(values: np.ndarray, bits: int, order: Any = None) -> Tensor:
    """Pack integers of `bits` bits along the last dimension, lowest bits first."""
    per_integer = 32 // bits
    packed = np.zeros((values.shape[0], values.shape[1] // per_integer), dtype=np.uint32)
    for position, column in enumerate(order or range(per_integer)):
        packed |= values[:, column::per_integer].astype(np.uint32) << np.uint32(bits * position)
    return torch.from_numpy(packed.view(np.int32).copy())


def awq(weight: Tensor, *, group_size: int = 8) -> Packed:
    matrix = weight.numpy().T
    groups = np.arange(len(matrix)) // group_size
    values, zeros, scales = _quantize(matrix, groups, 4, sym=False)
    tensors = {
        "qweight": _pack(values, 4, AWQ_COLUMNS),
        "qzeros": _pack(zeros, 4, AWQ_COLUMNS),
        "scales": torch.from_numpy(scales),
    }
    return tensors, _dequantized(values, zeros, scales, groups)


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 8,
    sym: bool = False,
    desc_act: bool = False,
    version: int = 1,
    with_index: bool = True,
) -> Packed:
    matrix = weight.numpy().T
    size = len(matrix) if group_size == -1 else group_size
    groups = np.arange(len(matrix)) // size
    if desc_act:
        groups = np.random.default_rng(0).permutation(groups)
    values, zeros, scales = _quantize(matrix, groups, bits, sym)
    ones = sum(1 << at for at in range(0, 32, bits))
    tensors = {
        "qweight": _pack(values.T, bits).t().contiguous(),
        "qzeros": _pack(zeros, bits) - (ones if version == 1 else 0),
        "scales": torch.from_numpy(scales),
    }
    if with_index:
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, _dequantized(values, zeros, scales, groups)


def float8(weight: Tensor, *, per: str, block: int = 48) -> Packed:
    """per: "tensor", "scalar", "channel" or "block"."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    if per == "block":
        return _float8_blocks(weight, block, largest)
    scale = weight.abs().amax(1, keepdim=True) if per == "channel" else weight.abs().max()
    scale = scale / largest
    stored = (weight / scale).to(torch.float8_e4m3fn)
    shaped = scale.reshape(1) if per == "tensor" else scale
    return {"weight": stored, "weight_scale": shaped}, stored.float() * scale


def _float8_blocks(weight: Tensor, block: int, largest: float) -> Packed:
    rows, cols = (-(-size // block) for size in weight.shape)
    scales, stored = torch.empty(rows, cols), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    dequantized = torch.empty(weight.shape)
    for row in range(rows):
        for col in range(cols):
            window = np.s_[block * row : block * (row + 1), block * col : block * (col + 1)]
            scales[row, col] = weight[window].abs().max() / largest
            stored[window] = (weight[window] / scales[row, col]).to(torch.float8_e4m3fn)
            dequantized[window] = stored[window].float() * scales[row, col]
    return {"weight": stored, "weight_scale_inv": scales}, dequantized


def write_packed(
    source: Path, packed_dir: Path, plain_dir: Path, config: Any, pack: Callable[[Tensor], Packed]
) -> None:
    """Copies the model in `source` twice: its linear layers packed, and as what they stand for.

    config: the `quantization_config` of the packed copy.
    """
    for directory in (packed_dir, plain_dir):
        shutil.copytree(source, directory)
    packed, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        packed[name] = plain[name] = tensor
        if name.endswith("_proj.weight"):
            del packed[name]
            tensors, plain[name] = pack(tensor)
            prefix = name.removesuffix("weight")
            packed |= {prefix + suffix: stored for suffix, stored in tensors.items()}
    save_file(packed, packed_dir / "model.safetensors", {"format": "pt"})
    save_file(plain, plain_dir / "model.safetensors", {"format": "pt"})
    path = packed_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
