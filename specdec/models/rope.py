"""How a model turns positions into rotary angles, as its `config.json` says.

These are the parameters; `specdec.models.layers.rotary` makes frequencies of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True)
class DefaultRope:
    """Frequency i of a head is theta ** (-2i / head_dim) (Su et al. 2021)."""

    theta: float


@dataclass(frozen=True)
class LinearRope:
    """Every frequency divided by `factor` (position interpolation, Chen et al. 2023)."""

    theta: float
    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Frequencies by how many waves the original context holds, as in Llama 3.1.

    More than `high_freq_factor`: kept. Fewer than `low_freq_factor`: divided by `factor`. Between:
    blended.
    """

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            limit = f"a number above low_freq_factor ({self.low_freq_factor})"
            raise _unsupported("high_freq_factor", self.high_freq_factor, limit)


@dataclass(frozen=True)
class YarnRope:
    """YaRN (Peng et al. 2023): slow dimensions interpolated, fast ones kept, a ramp between.

    beta_fast, beta_slow: turns over the original context at which the ramp begins and ends.
    truncate: whether the ramp begins and ends at whole dimensions.
    attention_factor: by what queries and keys are scaled beside the rotation (section 3.4).
    """

    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_DEFAULT_THETA = 10_000.0
_KNOWN_KEYS = {"rope_type", "partial_rotary_factor", "mscale", "mscale_all_dim"}.union(
    *({field.name for field in fields(kind)} - {"theta"} for kind in (Llama3Rope, YarnRope)),
    # `type` is the older spelling of rope_type; `finetuned` says where a model comes from.
    {"rope_theta", "type", "finetuned"},
)


def read_rope(raw: Mapping[str, Any]) -> Rope:
    """Reads a whole `config.json`: `rope_parameters`, or the older rope_theta and rope_scaling.

    Raises UnsupportedModelError for another type, a key that may change the meaning of the rest, or
    a value out of its limits. A parameter that the type does not use is ignored.
    """
    parameters = _parameters(raw)
    rope_type = parameters["rope_type"]
    theta = _positive(parameters, "rope_theta", _DEFAULT_THETA)
    match rope_type:
        case "default" | "dynamic":
            # Dynamic scaling changes nothing up to max_position_embeddings, the longest context
            # that is ever run.
            return DefaultRope(theta)
        case "linear":
            return LinearRope(theta, _positive(parameters, "factor"))
        case "llama3":
            return _read_llama3(parameters, theta)
        case "yarn":
            return _read_yarn(parameters, theta, raw["max_position_embeddings"])
    raise UnsupportedModelError(
        f"rope type {rope_type} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
    )


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in the newer spelling; where both are given the older one wins."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if raw.get(name) is not None:
            parameters.setdefault(name, raw[name])
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    # Beside the parameters it wins over the one inside; in neither place, nothing was extended.
    original = parameters.get("original_max_position_embeddings", raw["max_position_embeddings"])
    beside = raw.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = original if beside is None else beside
    unknown = sorted(parameters.keys() - _KNOWN_KEYS)
    if unknown:
        raise UnsupportedModelError(f"rope parameters with {', '.join(unknown)} are not supported")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    return parameters


def _read_llama3(parameters: Mapping[str, Any], theta: float) -> Llama3Rope:
    return Llama3Rope(
        theta=theta,
        factor=_positive(parameters, "factor"),
        low_freq_factor=_positive(parameters, "low_freq_factor"),
        high_freq_factor=_positive(parameters, "high_freq_factor"),
        original_max_position_embeddings=_original_context(parameters),
    )


def _read_yarn(
    parameters: Mapping[str, Any], theta: float, max_position_embeddings: int
) -> YarnRope:
    original = _original_context(parameters)
    factor = _positive(parameters, "factor", max_position_embeddings / original)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_positive(parameters, "beta_fast", 32.0),
        beta_slow=_positive(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """As given; else 0.1 ln(factor) + 1, or a quotient of two such with the logarithm weighted."""
    if parameters.get("attention_factor") is not None:
        return _positive(parameters, "attention_factor")

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        numerator = temperature(_positive(parameters, "mscale"))
        return numerator / temperature(_positive(parameters, "mscale_all_dim"))
    return temperature(1.0)


def _original_context(parameters: Mapping[str, Any]) -> int:
    return int(_positive(parameters, "original_max_position_embeddings"))


def _positive(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    value = default if value is None else value
    # To isinstance, True is an int.
    if not isinstance(value, int | float) or value is True or not 0 < value < math.inf:
        raise _unsupported(name, value, "a number above 0")
    return float(value)


def _unsupported(name: str, value: object, limit: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"rope parameter {name} is {value!r}; it must be {limit}")
