"""JSON schemas as llguidance accepts them: rewritten where it would refuse what can be enforced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

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

_COUNTS = frozenset(
    ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
)

_OF_OTHER_NAMES = ("additionalProperties", "unevaluatedProperties")
"""Keywords about names that no pattern matches, which are unknown without one of the patterns."""

_MAX_BOUND = 2**63 - 1025
"""Largest absolute value of a bound that llguidance enforces: a double above it is 2^63."""

_KNOWN_DIALECT = re.compile(
    r"http://json-schema\.org/draft-0[3-7]/schema#?"
    r"|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
_NOT_IN_FRAGMENT = re.compile(r"%(?![0-9A-Fa-f]{2})|[^\w!$%&'()*+,./:;=?@~-]", re.ASCII)
"""Characters that the fragment of a URI cannot contain (RFC 3986, section 3.5)."""

_PATTERN_PART = re.compile(
    r"\\(?P<escape>.)|\[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\Z)|(?P<group>\(\?(?:<?[=!]|[>#]|P=))",
    re.DOTALL,
)
"""An escape, a class of characters, or the start of a group that no grammar enforces."""

_NOT_REGULAR_ESCAPES = frozenset("123456789BbGZck")


def enforceable(schema: Any, *, is_lenient: bool = False) -> Any:
    """Return an equivalent schema, at every depth without keywords that restrict nothing.

    Bounds beyond ±(2^63 - 1025) become these, except upper ones of integers.

    schema: decoded JSON, which need not be a valid schema. is_lenient: whether to leave out regular
    expressions with look-around, word boundaries or back-references, which no grammar enforces.
    """
    if not isinstance(schema, Mapping):
        return schema
    patterns = schema.get("patternProperties") if is_lenient else None
    has_dropped = isinstance(patterns, Mapping) and any(map(_is_not_regular, patterns))
    return {
        name: _value(name, schema, is_lenient)
        for name, value in schema.items()
        if _restricts(name, value, is_lenient) and not (has_dropped and name in _OF_OTHER_NAMES)
    }


def _value(name: str, schema: Mapping[str, Any], is_lenient: bool) -> Any:
    value = schema[name]
    if name in _DATA:
        return value
    if name in _BY_NAME and isinstance(value, Mapping):
        is_pattern = is_lenient and name == "patternProperties"
        return {
            each: enforceable(inner, is_lenient=is_lenient)
            for each, inner in value.items()
            if not (is_pattern and _is_not_regular(each))
        }
    if isinstance(value, list):
        return [enforceable(each, is_lenient=is_lenient) for each in value]
    if name == "$ref" and isinstance(value, str):
        return _as_uri(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(name, value, schema)
    return enforceable(value, is_lenient=is_lenient)


def _number(name: str, value: float, schema: Mapping[str, Any]) -> float:
    """Return a number that llguidance can read: a count as an integer, a bound in its range.

    It reads all upper bounds of integers, and two bounds that are equal.
    """
    match name:
        case "minimum" | "exclusiveMinimum" if value != schema.get("maximum"):
            return max(value, -_MAX_BOUND)
        case "maximum" | "exclusiveMaximum" if value != schema.get("minimum"):
            return value if _is_integer(schema.get("type")) else min(value, _MAX_BOUND)
    return int(value) if name in _COUNTS and value % 1 == 0 else value


def _is_integer(kind: Any) -> bool:
    """Return whether a type, or several, has integers as its only numbers."""
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds


def _restricts(name: str, value: Any, is_lenient: bool) -> bool:
    """Return whether a keyword is not known to hold for every value."""
    match name:
        case "propertyNames":
            return value not in (True, {}, {"type": "string"})
        case "unevaluatedItems" | "unevaluatedProperties":
            return value not in (True, {})
        case "dependentRequired" | "dependentSchemas":
            return bool(value != {})
        case "uniqueItems":
            return value is not False
        case "format":
            return not isinstance(value, str) or value in _FORMATS
        case "pattern":
            return not (is_lenient and isinstance(value, str) and _is_not_regular(value))
        case "$schema":
            return not isinstance(value, str) or _KNOWN_DIALECT.fullmatch(value) is not None
    return True


def _is_not_regular(pattern: str) -> bool:
    """Return whether a regular expression has a part, outside its classes, without a grammar."""
    found = _PATTERN_PART.finditer(pattern)
    return any(each["group"] or each["escape"] in _NOT_REGULAR_ESCAPES for each in found)


def _as_uri(ref: str) -> str:
    """Escape what a URI cannot contain in a pointer, as in names of types such as `Page<Item>`."""
    base, sign, fragment = ref.partition("#")
    if not fragment.startswith("/"):
        return ref
    escaped = _NOT_IN_FRAGMENT.sub(lambda each: quote(each[0], safe="", errors="replace"), fragment)
    return f"{base}{sign}{escaped}"
