"""JSON schemas as llguidance accepts them: rewritten where it would refuse what can be enforced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from specdec.text.grammar.patterns import as_rust
from specdec.text.grammar.property_names import with_known_names
from specdec.text.grammar.schema_numbers import is_exact, readable, readable_data
from specdec.types.errors import InvalidValueError

_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Those that llguidance enforces. By the standard, others are annotations (JSON Schema 2020-12,
Validation 7.2.1); OpenAPI and pydantic write further ones, such as `int64` and `path`."""

_LOCAL_TIME = "time"
"""A format whose pattern, if there is one, has precedence: zod's is of a time without an offset."""

_BY_NAME = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)
"""Keywords whose value is schemas by name."""

_CONSTANTS = frozenset(("const", "enum"))
_DATA = frozenset(("const", "default", "enum", "examples"))
"""Keywords whose value is no schema, whatever it looks like."""

_OF_OTHER_NAMES = ("additionalProperties", "unevaluatedProperties")
"""Keywords about names that no pattern matches, which are unknown without one of the patterns."""

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

    schema: decoded JSON, which need not be a valid schema. is_lenient: whether to leave out what no
    grammar enforces: regular expressions with look-around, word boundaries or back-references, and
    `const` and `enum` with integers that are no doubles. Raises InvalidValueError for the latter.
    """
    return _Rewriting(schema, is_lenient).rewrite(schema)


@dataclass(frozen=True)
class _Rewriting:
    """Rewriting of one whole schema, `root`; is_lenient as in `enforceable`."""

    root: Any
    is_lenient: bool

    def rewrite(self, schema: Any) -> Any:
        """Return a part of the schema as `enforceable` does."""
        if not isinstance(schema, Mapping):
            return schema
        schema = with_known_names(schema, self.root)
        patterns = schema.get("patternProperties") if self.is_lenient else None
        has_dropped = isinstance(patterns, Mapping) and any(map(_is_not_regular, patterns))
        return {
            name: self._value(name, schema)
            for name, value in schema.items()
            if _restricts(name, value, self.is_lenient)
            and not (has_dropped and name in _OF_OTHER_NAMES)
            and not (name == "format" and value == _LOCAL_TIME and "pattern" in schema)
        }

    def _value(self, name: str, schema: Mapping[str, Any]) -> Any:
        value = schema[name]
        if name in _DATA:
            _check_exact(name, value)
            return readable_data(value)
        if name in _BY_NAME and isinstance(value, Mapping):
            return self._by_name(name, value)
        if isinstance(value, list):
            return [self.rewrite(each) for each in value]
        if name == "$ref" and isinstance(value, str):
            return _as_uri(value)
        if name == "pattern" and isinstance(value, str):
            return as_rust(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return readable(name, value, schema)
        return self.rewrite(value)

    def _by_name(self, keyword: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
        is_pattern = keyword == "patternProperties"
        return {
            as_rust(name) if is_pattern else name: self.rewrite(each)
            for name, each in schemas.items()
            if not (is_pattern and self.is_lenient and _is_not_regular(name))
        }


def _check_exact(keyword: str, value: Any) -> None:
    """Raise InvalidValueError for a constant that llguidance would change."""
    if keyword in _CONSTANTS and not is_exact(value):
        limit = "free of integers that differ from the nearest double; write such ones as strings"
        raise InvalidValueError(keyword, value, limit)


def _restricts(name: str, value: Any, is_lenient: bool) -> bool:
    """Return whether a keyword is not known to hold for every value."""
    match name:
        case "propertyNames":
            return value not in (True, {}, {"type": "string"})
        case "unevaluatedItems" | "unevaluatedProperties":
            return value not in (True, {})
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value != {})
        case "uniqueItems":
            return value is not False
        case "format":
            return not isinstance(value, str) or value in _FORMATS
        case "const" | "enum":
            return not is_lenient or is_exact(value)
        case "pattern":
            return not (is_lenient and isinstance(value, str) and _is_not_regular(value))
        case "$schema":
            return not isinstance(value, str) or _KNOWN_DIALECT.fullmatch(value) is not None
    return True


def _is_not_regular(pattern: str) -> bool:
    """Return whether a regular expression has a part, outside its classes, without a grammar."""
    found = _PATTERN_PART.finditer(as_rust(pattern))
    return any(each["group"] or each["escape"] in _NOT_REGULAR_ESCAPES for each in found)


def _as_uri(ref: str) -> str:
    """Escape what a URI cannot contain in a pointer, as in names of types such as `Page<Item>`."""
    base, sign, fragment = ref.partition("#")
    if not fragment.startswith("/"):
        return ref
    escaped = _NOT_IN_FRAGMENT.sub(lambda each: quote(each[0], safe="", errors="replace"), fragment)
    return f"{base}{sign}{escaped}"
