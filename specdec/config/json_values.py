"""Values of a `config.json`, and the errors that name what is wrong with them."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, cast

from specdec.types.errors import UnsupportedModelError

MAX_COUNT = 2**31 - 1
_MAX_SHOWN_CHARS = 200


def count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a whole number above 0. Raises UnsupportedModelError for another value."""
    value = raw.get(name)
    value = default if value is None else whole(value)
    if type(value) is not int or not 0 < value <= MAX_COUNT:
        raise unsupported(name, value, f"a whole number from 1 to {MAX_COUNT}")
    return value


def whole(value: object) -> object:
    """Return a whole number that a file writes as 512.0 as an int, and other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def positive(raw: Mapping[str, Any], name: str) -> float:
    """Return a finite number above 0. Raises UnsupportedModelError for another value."""
    value: Any = raw.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise unsupported(name, value, "a number above 0")
    return float(value)


def positive_or_none(raw: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number above 0, or None for null. Raises as `positive` does."""
    return None if raw.get(name) is None else positive(raw, name)


def fraction(raw: Mapping[str, Any], name: str) -> float:
    """Return a number above 0 and below 1. Raises UnsupportedModelError for another value."""
    value: Any = raw.get(name)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise unsupported(name, value, "a number above 0 and below 1")
    return float(value)


def require_keys(raw: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise UnsupportedModelError for a config.json without all of these keys."""
    missing = [name for name in names if name not in raw]
    if missing:
        raise UnsupportedModelError(f"config.json has no {', '.join(missing)}")


def overlaid(raw: Mapping[str, Any], **values: Any) -> Mapping[str, Any]:
    """Return config.json with some values; of the other keys those that are read are read there."""
    return ChainMap(values, cast(MutableMapping[str, Any], raw))


def head_dim_of(raw: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    """Return the size of a head, by default the share of one in the hidden size."""
    return count(raw, "head_dim", hidden_size // num_heads)


def unsupported(
    name: str, value: object, limit: str, file: str = "config.json"
) -> UnsupportedModelError:
    """Return the error for a value in a file. limit: what it must be."""
    return UnsupportedModelError(f"{name} in {file} is {_shown(value)}; it must be {limit}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
