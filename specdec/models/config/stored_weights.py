"""The size of quantized weights that stay as the files have them, from config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SCALE_BITS, _ZERO_BITS = 32, 8
_FP8_GROUP = 128
_NOT_OF_LAYERS = ("lm_head", "embed", "router", "visual", "vision", "image", "norm", "mtp")
"""Parts of the names of modules that are no quantized matrices of decoder layers in any case."""


@dataclass(frozen=True)
class StoredWeights:
    """Quantized weights in the files of a model, for which GPUs have kernels.

    bits: of a weight of a linear layer, with its share of scales and zero points; an upper bound.
    is_reordered: whether the inputs of a layer are permuted, so that ranks cannot divide them.
    """

    bits: float
    is_reordered: bool = False


def stored_weights(config: Mapping[str, Any] | None) -> StoredWeights | None:
    """Return the weights that a `quantization_config` describes.

    None without one, where they are dequantized by loading, and where some layers are left out of
    the quantization: then all are counted as if they were.
    """
    if config is None or _has_other_layers(config):
        return None
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size", 128))
    if method in ("awq", "gptq") and bits == 4:
        return StoredWeights(_with_scales(4, group), bool(config.get("desc_act")))
    if method == "fp8":
        return StoredWeights(_with_scales(8, _FP8_GROUP))
    if method == "compressed-tensors":
        return _compressed(config)
    return None


def quantization_names(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names of the method of a `quantization_config`; none without one."""
    if config is None:
        return ()
    method = str(config.get("quant_method"))
    is_modelopt_fp8 = method == "fp8" and "quant_algo" in config
    return (method, "modelopt") if is_modelopt_fp8 else (method,)


def _compressed(config: Mapping[str, Any]) -> StoredWeights | None:
    """Count the largest bits of the groups of layers; None where one of them is not kept."""
    found = [
        _bits_of_group(str(each.get("format") or config.get("format")), each["weights"])
        for each in (config.get("config_groups") or {}).values()
        if each.get("weights")
    ]
    kept = [each for each in found if each is not None]
    return StoredWeights(max(kept)) if kept and len(kept) == len(found) else None


def _bits_of_group(layout: str, weights: Mapping[str, Any]) -> float | None:
    bits, group = weights.get("num_bits", 8), weights.get("group_size")
    if layout == "pack-quantized":
        is_ordered = weights.get("actorder") in (None, "weight", "static")
        return _with_scales(4, group) if bits == 4 and is_ordered else None
    if layout not in ("float-quantized", "int-quantized", "naive-quantized") or bits != 8:
        return None
    return _with_scales(8, group or _FP8_GROUP) if weights.get("symmetric", True) else None


def _with_scales(bits: int, group: object) -> float:
    size = group if isinstance(group, int) and group > 0 else 128
    return bits + (_SCALE_BITS + _ZERO_BITS) / size


def _has_other_layers(config: Mapping[str, Any]) -> bool:
    """Return whether matrices of decoder layers are not quantized."""
    names: Sequence[str] = [
        name
        for key in ("ignore", "modules_to_not_convert", "ignored_layers")
        for name in config.get(key) or ()
    ]
    return not all(_is_not_of_layers(str(name)) for name in names)


def _is_not_of_layers(name: str) -> bool:
    """Return whether a module, or a pattern for some, is none of a layer's quantized matrices.

    The gate of a mixture is its router, unlike `gate_proj`, which is a matrix of an MLP.
    """
    is_router = name.rstrip("$*").endswith(("gate", "e_score_correction_bias"))
    return is_router or any(part in name for part in _NOT_OF_LAYERS)
