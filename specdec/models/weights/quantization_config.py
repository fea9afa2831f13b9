"""The description of quantized weights, wherever the files of a model have it.

It is `quantization_config` of config.json, or of its text_config, or `compression_config`, the
older name of compressed-tensors. Without one it is a separate file: `hf_quant_config.json` of
ModelOpt, `quantize_config.json` of AutoGPTQ, or `quant_config.json` of AutoAWQ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.types.errors import UnsupportedModelError

_KEYS = ("quantization_config", "compression_config")
_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files by name, and the method of those that name none."""

_MODELOPT_FLOAT8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Algorithms of ModelOpt whose weights are stored as those of FP8 checkpoints."""


def read_quantization(directory: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the description in the keys and names of `quantization_config`; None without one.

    That of ModelOpt's FP8 has the method `fp8`, and `quant_algo` beside it. raw: config.json.
    Raises UnsupportedModelError for a description that is not an object.
    """
    nested = raw.get("text_config")
    for keys in (raw, nested if isinstance(nested, dict) else {}):
        for key in _KEYS:
            if (found := keys.get(key)) is not None:
                return _as_config(found, f"{key} in config.json", None)
    for name, method in _FILES.items():
        if (directory / name).is_file():
            return _as_config(_read(directory / name), name, method)
    return None


def described_by(directory: Path, raw: Mapping[str, Any]) -> str:
    """Return what has the description, for messages; raw: config.json."""
    nested = raw.get("text_config")
    owners = [each for each in (raw, nested) if isinstance(each, Mapping)]
    if any(each.get(key) is not None for key in _KEYS for each in owners):
        return "config.json"
    return next((name for name in _FILES if (directory / name).is_file()), "config.json")


def with_quantization(directory: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the description as its `quantization_config`, if there is one."""
    found = read_quantization(directory, raw)
    return {**raw} if found is None else {**raw, "quantization_config": found}


def _as_config(found: object, source: str, method: str | None) -> dict[str, Any] | None:
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"{source} is not a JSON object")
    config = {"quant_method": method, **found} if method else dict(found)
    if config.get("quant_method") != "modelopt":
        return config
    inner = config.get("quantization", config)
    algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
    if algorithm is None and "quantization" in config:
        return None  # of the KV cache alone
    if algorithm in _MODELOPT_FLOAT8:
        ignored = inner.get("exclude_modules") or config.get("ignore") or []
        return {"quant_method": "fp8", "quant_algo": algorithm, "ignored_layers": ignored}
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
