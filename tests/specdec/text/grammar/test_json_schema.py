"""Schemas without keywords that restrict nothing."""

import json

import pytest

from specdec.text.grammar.json_schema import enforceable

ANY_NAME = {"propertyNames": {"type": "string"}}
RESTRICTS_NOTHING = [
    ANY_NAME,
    {"propertyNames": {}},
    {"propertyNames": True},
    {"uniqueItems": False},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"dependentRequired": {}},
    {"dependentSchemas": {}},
    {"format": "int64"},
    {"format": "uri-reference"},
]
RESTRICTS = [
    {"propertyNames": {"pattern": "a"}},
    {"propertyNames": False},
    {"uniqueItems": True},
    {"unevaluatedProperties": False},
    {"contains": {}},
    {"not": {}},
    {"dependentRequired": {"a": ["b"]}},
    {"format": "date"},
]
PLACES = [
    lambda each: each,
    lambda each: {"properties": {"format": each, "uniqueItems": {"type": "string"}}},
    lambda each: {"items": each, "additionalProperties": each, "type": "object"},
    lambda each: {"items": [each], "anyOf": [each, {"type": "null"}], "$defs": {"a": each}},
    lambda each: {"prefixItems": [each], "patternProperties": {"^a": {"oneOf": [each]}}},
]
DATA = {"const": ANY_NAME, "enum": [ANY_NAME, {"format": "x"}], "default": {"uniqueItems": False}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keyword", RESTRICTS_NOTHING, ids=json.dumps)
def test_what_restricts_nothing_is_left_out_at_every_depth(place, keyword):
    other = {"type": "array", "title": "t"}
    assert enforceable(place({**other, **keyword})) == place(other)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keyword", RESTRICTS, ids=json.dumps)
def test_what_restricts_something_stays(place, keyword):
    assert enforceable(place(keyword)) == place(keyword)


@pytest.mark.parametrize("schema", [DATA, True, 3, "a", None, [], {"properties": 3, "items": 4}])
def test_data_and_what_is_no_schema_stay(schema):
    assert enforceable(schema) == schema


def test_such_a_schema_is_enforced(matcher):
    schema = {
        "type": "object",
        "properties": {"a": {"const": "x", "format": "path"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    written = matcher(json_schema=json.dumps({**schema, **ANY_NAME, "uniqueItems": False}))
    plain = matcher(json_schema=json.dumps(schema))
    while not plain.is_finished:
        assert (written.allowed_mask() == plain.allowed_mask()).all()
        [token, *_] = plain.forced_tokens(1)
        written.advance(token)
        plain.advance(token)
    assert written.is_finished
