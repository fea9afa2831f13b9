"""Rotary embedding of a GGUF file, as `rope_parameters` of config.json.

llama.cpp multiplies positions by 1 / factor for every type but `none`, and divides each frequency
by its own factor where the file has a tensor of them: `rope_freqs` (Llama 3.1), or a list for short
and one for long contexts (LongRoPE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.types.errors import UnsupportedModelError

FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
KEYS = frozenset(
    {
        *("rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.attn_factor", "rope.scaling.original_context_length"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        "rope.scaling.finetuned",  # a note on the model's origin
    }
)
_DEFAULT_THETA = 10_000.0


def rope_parameters(
    keys: Mapping[str, Any], factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return the parameters in Hugging Face's words.

    keys: of the architecture, without its prefix. factors: values of FACTOR_TENSORS, by name.
    Without an original context the parameters have none: it is the file's context, as in llama.cpp,
    and the factor does not extend that.
    Raises UnsupportedModelError for scaling that no type of config.json expresses.
    """
    theta = keys.get("rope.freq_base") or _DEFAULT_THETA
    kind = keys.get("rope.scaling.type") or "linear"
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    factor = 1.0 if kind == "none" else factor
    attention = keys.get("rope.scaling.attn_factor") or 1.0
    known = {"rope_theta": theta}
    if original := keys.get("rope.scaling.original_context_length"):
        known["original_max_position_embeddings"] = original
    if factors:
        return known | _by_factors(kind, factor, factors) | {"attention_factor": attention}
    if kind == "yarn" and factor != 1:
        return known | _yarn(keys, factor, attention)
    if kind not in ("none", "linear", "yarn"):
        raise _unsupported("rope.scaling.type", kind, "none, linear or yarn")
    if attention != 1:
        raise _unsupported("rope.scaling.attn_factor", attention, "1 without yarn or rope factors")
    if factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _yarn(keys: Mapping[str, Any], factor: float, attention: float) -> dict[str, Any]:
    beta_fast, beta_slow = (keys.get(f"rope.scaling.yarn_beta_{each}") for each in ("fast", "slow"))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": beta_fast or 32.0,
        "beta_slow": beta_slow or 1.0,
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0),
    }


def _by_factors(kind: str, factor: float, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    if kind == "yarn" and factor != 1:
        raise _unsupported("rope.scaling.type", kind, f"another one beside {min(factors)}")
    both = factors.get("rope_freqs.weight")
    short = factors.get("rope_factors_short.weight", both)
    long = factors.get("rope_factors_long.weight", both)
    if short is None or long is None or (both is not None and len(factors) > 1):
        found, limit = ", ".join(sorted(factors)), "rope_freqs, or rope_factors_short and _long"
        raise _unsupported("tensors", found, limit)
    lists = {"short_factor": short, "long_factor": long}
    return {"rope_type": "longrope", "factor": 1.0} | {
        name: [each * factor for each in values] for name, values in lists.items()
    }


def _unsupported(key: str, value: object, limit: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{key} of the GGUF file is {value!r}; it must be {limit}")
