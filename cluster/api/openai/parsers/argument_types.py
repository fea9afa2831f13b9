"""Types of arguments that a model writes as plain text, by the JSON schema of the function.

One place for all parsers of such formats. A schema is read as far as it decides a type: `type`,
`enum`, `const`, `$ref` within the schema, and combinations by `anyOf`, `oneOf` and `allOf`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

from cluster.api.openai.parsers.json_span import json_or_none
from cluster.api.openai.parsers.literals import literal_or_none

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
_STRING_KEYWORDS = frozenset({"pattern", "minLength", "maxLength"})
"""Keywords that without `type` are written for strings."""

_CONSTANTS = {"True": True, "False": False, "None": None}
MAX_DEPTH = 64
"""Nested and referenced schemas beyond this depth do not restrict the type."""


@dataclass(frozen=True)
class Allowed:
    """The values that a schema allows, by type.

    types: names of JSON Schema; "number" comes with "integer". strings: the only strings; None for
    any.
    """

    types: frozenset[str] = _ALL
    strings: frozenset[str] | None = None

    def __or__(self, other: Allowed) -> Allowed:
        """Return the values of either."""
        sets = [each.strings for each in (self, other) if "string" in each.types]
        known = [each for each in sets if each is not None]
        strings = frozenset[str]().union(*known) if sets and len(known) == len(sets) else None
        return Allowed(self.types | other.types, strings)

    def __and__(self, other: Allowed) -> Allowed:
        """Return the values of both."""
        known = [each.strings for each in (self, other) if each.strings is not None]
        strings = known[0].intersection(*known) if known else None
        return Allowed(self.types & other.types, strings)


_ANY, _NOTHING = Allowed(), Allowed(frozenset())


class ArgumentTypes:
    """The types of a function's arguments."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """parameters: JSON schema of the arguments."""
        self._root = parameters
        self._known: dict[str, Allowed] = {}

    def value(self, name: str, text: str) -> Any:
        """Return the value of an argument that was written as `text`.

        A text that is no JSON stays a text, as does one that may be a string; where a schema
        allows both, an object, a list and null are no strings. Constants, lists and objects of
        Python are read, too.
        """
        if name not in self._known:
            reader = _SchemaReader(self._root)
            self._known[name] = reader.combined(reader.members(self._root, name))
        return _value(text, self._known[name])


class _SchemaReader:
    """Reads schemas; each `$ref` is resolved once, so that a schema takes linear time."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._resolved: dict[str, Allowed] = {}
        self._followed = set[str]()  # references whose properties were read
        self._depth = 0

    def members(self, schema: Any, name: str, depth: int = 0) -> Iterator[Any]:
        """Yield the schemas of a property, also of combined and referenced schemas."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif isinstance(schema.get("additionalProperties"), Mapping):
            yield schema["additionalProperties"]
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in self._followed:
            self._followed.add(ref)
            yield from self.members(self._target(ref), name, depth + 1)
        for key in ("allOf", "anyOf", "oneOf"):
            for each in _items(schema.get(key)):
                yield from self.members(each, name, depth + 1)

    def combined(self, schemas: Iterable[Any]) -> Allowed:
        """Return the values that all of several schemas allow; any if there is no such value."""
        allowed = _ANY
        for each in schemas:
            allowed = allowed & self.allowed(each)
        return allowed if allowed.types else _ANY

    def allowed(self, schema: Any) -> Allowed:
        """Return the values that a schema allows."""
        if not isinstance(schema, Mapping) or self._depth >= MAX_DEPTH:
            return _NOTHING if schema is False else _ANY
        self._depth += 1
        allowed = self._of_keywords(schema)
        self._depth -= 1
        return allowed | Allowed(frozenset({"null"})) if schema.get("nullable") is True else allowed

    def _of_keywords(self, schema: Mapping[str, Any]) -> Allowed:
        allowed = _of_type(schema)
        if isinstance(schema.get("$ref"), str):
            allowed &= self._referenced(schema["$ref"])
        for key in ("anyOf", "oneOf"):
            if members := _items(schema.get(key)):
                allowed &= self._either(members)
        for each in _items(schema.get("allOf")):
            allowed &= self.allowed(each)
        return allowed

    def _either(self, members: list[Any]) -> Allowed:
        allowed = _NOTHING
        for each in members:
            allowed |= self.allowed(each)
        return allowed

    def _referenced(self, ref: str) -> Allowed:
        """Return the values of a reference; one that refers to itself adds none."""
        if ref not in self._resolved:
            self._resolved[ref] = _NOTHING
            self._resolved[ref] = self.allowed(self._target(ref))
        return self._resolved[ref]

    def _target(self, ref: str) -> Any:
        """Follow a JSON pointer (RFC 6901) from the root; return {} where it leads nowhere."""
        pointer, target = unquote(ref.removeprefix("#")), cast(Any, self._root)
        if not ref.startswith("#"):
            return {}
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = dict(enumerate(target)).get(int(key) if key.isdecimal() else -1, {})
            else:
                target = target.get(key, {}) if isinstance(target, Mapping) else {}
        return target


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _of_type(schema: Mapping[str, Any]) -> Allowed:
    """Return the values that `type`, `enum` and `const` allow."""
    allowed, kinds = _ANY, schema.get("type")
    names = {each for each in [kinds, *_items(kinds)] if isinstance(each, str)}
    if names and names <= _ALL:
        allowed = Allowed(frozenset(names | ({"integer"} if "number" in names else set())))
    elif not names and not _STRING_KEYWORDS.isdisjoint(schema):
        allowed = Allowed(frozenset({"string"}))
    values = [schema["const"]] if "const" in schema else _items(schema.get("enum"))
    return allowed & _of_values(values) if values else allowed


def _of_values(values: list[Any]) -> Allowed:
    strings = frozenset(each for each in values if isinstance(each, str))
    kinds = frozenset(_TYPES[type(each)] for each in values)
    return Allowed(kinds | ({"integer"} if "number" in kinds else set()), strings or None)


def _value(text: str, allowed: Allowed) -> Any:
    """Return the value of a text, by the values that are allowed."""
    given = _json_value(text)
    kind = _TYPES[type(given)]
    if "string" not in allowed.types:
        is_whole = isinstance(given, float) and given.is_integer()
        is_integer = is_whole and "number" not in allowed.types and "integer" in allowed.types
        return int(given) if is_integer else given
    if allowed == _ANY or text in (allowed.strings or ()):
        return text if allowed != _ANY else given
    if given is None and text != "null":
        return text
    is_typed = kind in _NO_STRINGS or allowed.strings is not None
    return given if is_typed and kind in allowed.types else text


_NO_STRINGS = frozenset({"object", "array", "null"})


def _json_value(text: str) -> Any:
    """Return the JSON value that a text is, or the text."""
    if text.strip() in _CONSTANTS:
        return _CONSTANTS[text.strip()]
    value = json_or_none(text)
    if value is None and text.strip() != "null":
        value = literal_or_none(text)
        return text if value is None else value
    return value
