"""Keywords of JSON schemas on the names of properties, in those that llguidance enforces."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]

_ANNOTATIONS = frozenset(("$comment", "description", "title", "type"))
"""Keywords of a schema of names that restrict no name: its type is string."""

_APPLICATORS = frozenset(
    ("$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf")
)
"""Keywords whose schemas evaluate properties besides those of the schema itself."""

_NOTHING: Schema = {"not": {}}
"""The schema `false`, as some generators write it."""

_MAX_REFS = 16
_MAX_LENGTH = 2**16
_FORMATS = {"uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"}


def with_known_names(schema: Schema, root: Schema) -> Schema:
    """Return an equivalent schema of an object, with the keywords that llguidance enforces.

    `propertyNames` that list or match the names become `properties` or `patternProperties`, and
    `unevaluatedProperties` become additional ones where no other schema evaluates properties.

    root: the whole schema, to which references are relative.
    """
    if schema.get("type") != "object":
        return schema
    schema = _without_unevaluated(schema)
    names, known = _resolved(schema.get("propertyNames"), root), schema.get("properties", {})
    if not isinstance(names, Mapping) or not isinstance(known, Mapping):
        return schema
    kinds, others = names.keys() - _ANNOTATIONS, schema.get("additionalProperties", True)
    rest = {name: each for name, each in schema.items() if name != "propertyNames"}
    if "patternProperties" in schema or names.get("type", "string") != "string":
        return schema
    if not known and (pattern := _pattern(names, kinds)) is not None:
        return {**rest, "patternProperties": {pattern: others}, "additionalProperties": False}
    if kinds not in ({"enum"}, {"const"}):
        return schema
    listed = _listed(names)
    allowed = [each for each in known if each in listed]
    properties = {each: known.get(each, others) for each in dict.fromkeys([*allowed, *listed])}
    return {**rest, "properties": properties, "additionalProperties": False}


def _without_unevaluated(schema: Schema) -> Schema:
    """Return a schema with `additionalProperties` in place of `unevaluatedProperties`, if equal."""
    name = "unevaluatedProperties"
    if name not in schema or not _APPLICATORS.isdisjoint(schema):
        return schema
    rest = {each: value for each, value in schema.items() if each != name}
    value = False if schema[name] == _NOTHING else schema[name]
    return {"additionalProperties": value, **rest}  # which evaluates all, if there is one


def _resolved(schema: Any, root: Schema) -> Any:
    """Return the schema that a chain of references within the whole schema leads to, if any."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, Mapping) or schema.keys() - _ANNOTATIONS != {"$ref"}:
            return schema
        schema = _at(schema["$ref"], root)
    return None


def _at(pointer: Any, root: Schema) -> Any:
    """Return the part of a schema at a JSON pointer such as `#/$defs/Name`; None without one."""
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    place: Any = root
    for part in pointer[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _pattern(names: Schema, kinds: Set[str]) -> str | None:
    """Return the regular expression of the names, None if it is not known."""
    if kinds == {"pattern"} or (kinds == {"format"} and names["format"] in _FORMATS):
        return str(names["pattern"] if "pattern" in names else _FORMATS[names["format"]])
    bounds = [names.get(each) for each in ("minLength", "maxLength")]
    if not kinds or kinds - {"minLength", "maxLength"} or not all(map(_is_count, bounds)):
        return None
    least, most = bounds
    return f"^[\\s\\S]{{{least or 0},{'' if most is None else most}}}$"


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value <= _MAX_LENGTH)


def _listed(names: Schema) -> list[str]:
    """Return the names that a schema with `enum` or `const` lists, each once."""
    values = names["enum"] if "enum" in names else [names["const"]]
    values = values if isinstance(values, list) else []
    return list(dict.fromkeys(each for each in values if isinstance(each, str)))
