"""JSON schemas without what restricts nothing, which llguidance would refuse as not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Those that llguidance enforces. By the standard, others are annotations (JSON Schema 2020-12,
Validation 7.2.1); OpenAPI and pydantic write further ones, such as `int64` and `path`."""

_BY_NAME = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)
"""Keywords whose value is schemas by name."""

_DATA = frozenset(("const", "default", "enum", "examples"))
"""Keywords whose value is no schema, whatever it looks like."""


def enforceable(schema: Any) -> Any:
    """Return an equivalent schema, at every depth without keywords that restrict nothing.

    schema: decoded JSON, which need not be a valid schema.
    """
    if not isinstance(schema, Mapping):
        return schema
    return {name: _value(name, value) for name, value in schema.items() if _restricts(name, schema)}


def _value(name: str, value: Any) -> Any:
    if name in _DATA:
        return value
    if name in _BY_NAME and isinstance(value, Mapping):
        return {each: enforceable(inner) for each, inner in value.items()}
    if isinstance(value, list):
        return [enforceable(each) for each in value]
    return enforceable(value)


def _restricts(name: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword is not known to hold for every value."""
    value: object = schema[name]
    match name:
        case "propertyNames":
            return value not in (True, {}, {"type": "string"})
        case "unevaluatedItems" | "unevaluatedProperties":
            return value not in (True, {})
        case "dependentRequired" | "dependentSchemas":
            return value != {}
        case "uniqueItems":
            return value is not False
        case "format":
            return not isinstance(value, str) or value in _FORMATS
    return True
