"""Schemas without keywords that restrict nothing."""

import json

import pytest

from specdec.text.grammar.json_schema import enforceable
from specdec.types.sampling.sampling_params import StructuredOutput

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
    {"$schema": "https://json-schema.org/draft-07/schema#"},
    {"$schema": "https://example.com/dialect"},
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
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    {"pattern": "^(?!a)"},
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


MAX = 2**63 - 1
INTEGER = {"type": "integer"}
REWRITTEN = [
    ({"minimum": -(2**63), "maximum": MAX}, "9223372036854774000", "9223372036854775808"),
    ({"exclusiveMinimum": -1.7e308, "maximum": 10**30}, "-5", "null"),
    ({"minimum": MAX, "maximum": MAX}, "9223372036854776000", "5"),
    ({**INTEGER, "minimum": 0, "maximum": MAX}, str(MAX), str(MAX + 1)),
    ({**INTEGER, "minimum": MAX, "maximum": MAX}, str(MAX), str(MAX - 1)),
    ({**INTEGER, "minimum": -(2**63), "maximum": MAX}, str(MAX), "-9223372036854775809"),
    ({"type": ["null", "integer"], "minimum": -1e30, "maximum": 2**64 - 1}, str(MAX), "0.5"),
    ({"minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
    ({"minItems": 1.0}, "[1]", "[]"),
    ({"$ref": "#/$defs/a<b> [é]", "$defs": {"a<b> [é]": {"const": 1}}}, "1", "2"),
    ({"$ref": "#/$defs/a%25b", "$defs": {"a%b": {"const": 1}}}, "1", "2"),
    ({"$ref": "#/$defs/a%b", "$defs": {"a%b": {"const": 1}}}, "1", "2"),
]


@pytest.mark.parametrize(("keywords", "valid", "invalid"), REWRITTEN)
def test_what_llguidance_does_not_read_is_enforced(compiler, tokenizer, keywords, valid, invalid):
    kind = {"minLength": "string", "minItems": "array"}
    types = [name for key, name in kind.items() if key in keywords] or ["number"]
    schema = json.dumps({"type": types[0], **keywords})
    grammar = compiler.compile(StructuredOutput(json_schema=schema))
    for text, is_valid in ((valid, True), (invalid, False)):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        num_valid = grammar.matcher().num_valid(token_ids)
        assert (num_valid == len(token_ids)) is is_valid, text


NOT_REGULAR = [
    "^(?!a)",
    "(?<=a)b",
    r"\bfoo",
    r"^(a)\1$",
    "(?>a)",
    "(?P=n)",
    "(?#c)",
    r"a\Z",
    r"\cA",
]


@pytest.mark.parametrize("pattern", NOT_REGULAR)
def test_only_a_lenient_schema_loses_a_pattern_without_grammar(pattern):
    schema = {"pattern": pattern, "patternProperties": {pattern: {}, "a": {"pattern": pattern}}}
    schema |= {"additionalProperties": False, "unevaluatedProperties": False}
    assert enforceable(schema) == schema
    assert enforceable(schema, is_lenient=True) == {"patternProperties": {"a": {}}}


@pytest.mark.parametrize(
    "pattern",
    [r"a\\b", "^[a-z]+$", "(?:a|b)", "(?i:a)", r"\(?=", "[(?=]x", r"[^]\](?=]", "(?P<n>a)", 3],
)
def test_a_lenient_schema_keeps_other_patterns(pattern):
    schema = {"items": {"pattern": pattern}, "additionalProperties": False}
    schema["patternProperties"] = {str(pattern): {}}
    assert enforceable(schema, is_lenient=True) == schema


def test_an_anchor_stays():
    schema = {"$ref": "#é", "items": {"$anchor": "é"}}
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
