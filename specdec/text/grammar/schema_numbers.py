"""Numbers of JSON schemas as llguidance reads them: bounds are doubles, integers have 64 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_COUNTS = frozenset(
    ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
)

_MAX_COUNT = 2**31 - 1
"""An upper count above it restricts no answer; llguidance reads lengths of 32 bits."""

_MAX_INTEGER = 2**63 - 1
"""Upper bound of integers: llguidance reads any double from 2^63 on as this one."""

_MAX_BOUND = 2**63 - 1025
"""Largest absolute value of other bounds that llguidance enforces: a double above it is 2^63."""


def readable(name: str, value: float, schema: Mapping[str, Any]) -> float:
    """Return the number of a keyword as llguidance reads it.

    Counts are integers. Bounds are in its range, and doubles that no valid number is beyond; two
    bounds that are equal stay, unless they are of integers.
    """
    if name in _COUNTS:
        whole = int(value) if value % 1 == 0 else value
        return min(whole, _MAX_COUNT) if name.startswith("max") else whole
    is_integer = _is_integer(schema.get("type"))
    if value == schema.get("minimum") == schema.get("maximum"):
        if not is_integer or value >= _MAX_INTEGER:
            return value
        return _at_least(value) if name == "minimum" else _at_most(value)
    match name:
        case "minimum" | "exclusiveMinimum":
            return max(_at_least(value), -_MAX_BOUND)
        case "maximum" | "exclusiveMaximum" if is_integer:
            return _at_most(value) if value < _MAX_INTEGER else _MAX_INTEGER
        case "maximum" | "exclusiveMaximum":
            return min(_at_most(value), _MAX_BOUND)
    return value


def readable_data(data: Any) -> Any:
    """Return the value of `const`, `enum` or an annotation, with integers beyond 64 bits as floats.

    If `is_exact`, llguidance writes these with all digits.
    """
    if isinstance(data, Mapping):
        return {name: readable_data(each) for name, each in data.items()}
    if isinstance(data, list):
        return [readable_data(each) for each in data]
    return _nearest(data) if type(data) is int and abs(data) > _MAX_INTEGER else data


def is_exact(data: Any) -> bool:
    """Return whether llguidance writes each integer in `data` with its own digits.

    It writes the shortest decimal of the nearest double: 123456789012345680 for 123456789012345678.
    """
    if isinstance(data, Mapping):
        return all(map(is_exact, data.values()))
    if isinstance(data, list):
        return all(map(is_exact, data))
    if type(data) is not int or abs(data) <= 2**53:
        return True
    nearest = _nearest(data)
    return math.isfinite(nearest) and Decimal(repr(nearest)) == data


def _at_least(value: float) -> float:
    """Return the lowest double that is not below a number; the number itself if it is one."""
    nearest = _nearest(value)
    if nearest == value:
        return value
    return nearest if nearest > value else math.nextafter(nearest, math.inf)


def _at_most(value: float) -> float:
    """Return the highest double that is not above a number; the number itself if it is one."""
    return -_at_least(-value)


def _nearest(value: float) -> float:
    """Return the nearest double, which is infinite beyond the range of doubles."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_integer(kind: Any) -> bool:
    """Return whether a type, or several, has integers as its only numbers."""
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds
