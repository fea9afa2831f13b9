"""Parameters of rotary position embeddings, read from `config.json`.

`specdec.models.layers.rotary` computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specdec.config.json_values import MAX_COUNT, count, overlaid, unsupported
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
    """Llama 3.1 scaling, by the number of wavelengths in the original context.

    More than `high_freq_factor`: unchanged. Fewer than `low_freq_factor`: divided by `factor`.
    Between: interpolated.
    """

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.high_freq_factor < self.low_freq_factor:
            limit = f"a number from low_freq_factor ({self.low_freq_factor}) on"
            raise _unsupported("high_freq_factor", self.high_freq_factor, limit)


@dataclass(frozen=True)
class YarnRope:
    """YaRN (Peng et al. 2023): low frequencies interpolated, high ones kept, a ramp between.

    beta_fast, beta_slow: rotations over the original context at which the ramp begins and ends.
    truncate: whether the ramp begins and ends at integer dimensions.
    attention_factor: factor of queries and keys in addition to the rotation (section 3.4).
    """

    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): each frequency divided by its own factor.

    short_factors, long_factors: for contexts up to the original one, and for longer ones. The
    longest context that a service allows decides for all of its sequences, as in vLLM: KV that was
    rotated by one list cannot be read with the other.
    attention_factor: factor of queries and keys in addition to the rotation.
    """

    theta: float
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    def require_factors(self, count: int) -> None:
        """Raise UnsupportedModelError unless both lists have `count` numbers."""
        for name in ("short_factors", "long_factors"):
            if (found := len(getattr(self, name))) != count:
                limit = f"a list of {count} numbers"
                raise unsupported(name.removesuffix("s"), f"a list of {found}", limit)

    def factors(self, max_positions: int) -> tuple[float, ...]:
        """Return the factors of a service whose longest context is `max_positions`."""
        is_long = max_positions > self.original_max_position_embeddings
        return self.long_factors if is_long else self.short_factors


@dataclass(frozen=True)
class ProportionalRope:
    """The first `fraction` of frequencies, each divided by `factor`; the others are 0 (Gemma 4)."""

    theta: float
    fraction: float
    factor: float

    def __post_init__(self) -> None:
        for name, limit in (("fraction", 1.0), ("theta", math.inf), ("factor", math.inf)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= limit or value == math.inf:
                key = {"fraction": "partial_rotary_factor", "theta": "rope_theta"}.get(name, name)
                raise _unsupported(key, value, f"a number above 0, at most {limit}")


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

_DEFAULT_THETA = 10_000.0
_ORIGINAL = "original_max_position_embeddings"
_KNOWN_KEYS = {"rope_type", "partial_rotary_factor", "mscale", "mscale_all_dim"}.union(
    *({field.name for field in fields(kind)} - {"theta"} for kind in (Llama3Rope, YarnRope)),
    # `type` is the older name of rope_type; `finetuned` is a note on the model's origin.
    {"rope_theta", "type", "finetuned", "short_factor", "long_factor"},
    {"attn_factor", "extrapolation_factor"},
)


def read_rope(raw: Mapping[str, Any], *, may_be_partial: bool = False) -> Rope:
    """Read `rope_parameters`, or the older rope_theta and rope_scaling, of a `config.json`.

    may_be_partial: whether only some dimensions of a head may be rotated; see `rotary_fraction`.
    Raises UnsupportedModelError for an unknown type or key, or a value out of its limits. A
    parameter that the type does not use is ignored.
    """
    parameters = _parameters(raw)
    if not may_be_partial and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    rope_type = parameters["rope_type"]
    theta = _positive(parameters, "rope_theta", _DEFAULT_THETA)
    match rope_type:
        case "default" | "dynamic":
            # Dynamic scaling has no effect up to max_position_embeddings, the longest context
            # that is supported.
            return DefaultRope(theta)
        case "linear":
            return LinearRope(theta, _positive(parameters, "factor"))
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            factor, low, high = (_positive(parameters, name) for name in names)
            return Llama3Rope(theta, factor, low, high, _original_context(parameters))
        case "yarn":
            return _read_yarn(parameters, theta, raw["max_position_embeddings"])
        case "longrope" | "su":  # the older name
            return _read_longrope(parameters, theta, raw["max_position_embeddings"])
    raise UnsupportedModelError(
        f"rope type {rope_type} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
    )


def longest_context(raw: Mapping[str, Any]) -> int:
    """Return max_position_embeddings, or the longer context to which the scaling extends a model.

    That is original_max_position_embeddings times the factor where YaRN or linear scaling has both,
    such as Qwen 2.5 with the scaling of its model card. vLLM does so for YaRN; for linear scaling
    it multiplies max_position_embeddings, which is the extended context already in many files.
    Raises UnsupportedModelError for a context over the limit of max_position_embeddings.
    """
    longest = count(raw, "max_position_embeddings")
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    scaling = {"factor": given.get("factor"), _ORIGINAL: _original(raw, given)}
    is_extended = given.get("rope_type", given.get("type")) in ("yarn", "linear")
    if not is_extended or None in scaling.values():
        return longest
    factor, original = (_positive(scaling, name) for name in scaling)
    if factor * original > MAX_COUNT:
        limit = f"at most {MAX_COUNT} / {_ORIGINAL} ({original:g})"
        raise _unsupported("factor", factor, limit)
    return max(longest, int(factor * original))


def rotary_fraction(raw: Mapping[str, Any]) -> float:
    """Return the fraction of a head's dimensions, from the first on, that are rotated.

    Raises UnsupportedModelError for a value that is not above 0 and at most 1.
    """
    parameters = _parameters(raw)
    parameters.setdefault("partial_rotary_factor", 1.0)
    found = _positive(parameters, "partial_rotary_factor")
    if found > 1:
        raise _unsupported("partial_rotary_factor", found, "at most 1")
    return found


def rotary_fraction_of_dim(raw: Mapping[str, Any]) -> float:
    """Return the fraction, which may also be given by `rotary_dim` (MiniMax-M2)."""
    dim = raw.get("rotary_dim")
    return rotary_fraction(
        raw
        if dim is None or raw.get("partial_rotary_factor") is not None
        else overlaid(raw, partial_rotary_factor=count(raw, "rotary_dim") / raw["head_dim"])
    )


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters by their newer names; if both are given the older one wins."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise _unsupported("rope_scaling", given, "an object")
    parameters = dict(given)
    for name in ("rope_theta", "partial_rotary_factor"):
        if raw.get(name) is not None:
            parameters.setdefault(name, raw[name])
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    original = _original(raw, parameters)
    parameters[_ORIGINAL] = raw["max_position_embeddings"] if original is None else original
    unknown = sorted(parameters.keys() - _KNOWN_KEYS)
    if unknown:
        raise UnsupportedModelError(f"rope parameters with {', '.join(unknown)} are not supported")
    return parameters


def _original(raw: Mapping[str, Any], parameters: Mapping[str, Any]) -> Any:
    """Return the original context; a value at the top level wins over one in the parameters."""
    beside = raw.get(_ORIGINAL)
    return parameters.get(_ORIGINAL) if beside is None else beside


def _read_yarn(
    parameters: Mapping[str, Any], theta: float, max_position_embeddings: int
) -> YarnRope:
    if (weight := _positive(parameters, "extrapolation_factor", 1.0)) != 1:
        raise _unsupported("extrapolation_factor", weight, "1.0")
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
    """Return the given factor, else 0.1 ln(factor) + 1, or the ratio by mscale, mscale_all_dim.

    `attn_factor` multiplies the latter two, as in vLLM and llama.cpp: DeepSeek-R1-0528-Qwen3-8B has
    the inverse of 0.1 ln(4) + 1, so that nothing is scaled. transformers ignores the key.
    """
    if parameters.get("attention_factor") is not None:
        return _positive(parameters, "attention_factor")

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight = _positive(parameters, "attn_factor", 1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        numerator = weight * temperature(_positive(parameters, "mscale"))
        return numerator / temperature(_positive(parameters, "mscale_all_dim"))
    return weight * temperature(1.0)


def _read_longrope(
    parameters: Mapping[str, Any], theta: float, max_position_embeddings: int
) -> LongRope:
    original = _original_context(parameters)
    factor = _positive(parameters, "factor", max_position_embeddings / original)
    # The factor of the LongRoPE paper, section 4.
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(
        theta=theta,
        short_factors=_factors(parameters, "short_factor"),
        long_factors=_factors(parameters, "long_factor"),
        original_max_position_embeddings=original,
        attention_factor=_positive(parameters, "attention_factor", default),
    )


def _factors(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    given = parameters.get(name)
    if not isinstance(given, list) or not given:
        raise _unsupported(name, given, "a list of numbers above 0")
    return tuple(_positive({name: each}, name) for each in given)


def _original_context(parameters: Mapping[str, Any]) -> int:
    return int(_positive(parameters, _ORIGINAL))


def _positive(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    value = default if value is None else value
    # True is an instance of int.
    if not isinstance(value, int | float) or value is True or not 0 < value < math.inf:
        raise _unsupported(name, value, "a number above 0")
    return float(value)


def _unsupported(name: str, value: object, limit: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"rope parameter {name} is {value!r}; it must be {limit}")
