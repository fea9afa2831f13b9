"""Types of arguments by every form in which a schema can give them."""

import time

import pytest

from cluster.api.openai.parsers.argument_types import ArgumentTypes

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
DEFS = {
    "Zip": {"$ref": "#/$defs/Inner"},
    "Inner": STRING,
    "Node": {"anyOf": [STRING, {"$ref": "#/$defs/Node"}]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b": INTEGER,
}


def value(schema, text, **parameters):
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS, **parameters}
    return ArgumentTypes(parameters).value("x", text)


@pytest.mark.parametrize(
    "schema",
    [
        STRING,
        {"type": ["string", "null"]},
        {"anyOf": [STRING, NULL]},
        {"oneOf": [NULL, STRING]},
        {"allOf": [STRING]},
        {"allOf": [{}, {"anyOf": [STRING, INTEGER]}, {"type": ["string", "object"]}]},
        {"$ref": "#/$defs/Zip"},
        {"anyOf": [{"$ref": "#/$defs/Zip"}, NULL]},
        {"$ref": "#/$defs/Node"},
        {"const": "5"},
        {"enum": ["5", "6", None]},
        {"anyOf": [{"const": "5"}, {"enum": ["6"]}]},
        {"type": "string", "nullable": True},
        {"pattern": "^[0-9]$"},
        {"type": ["string", "integer"]},
    ],
    ids=str,
)
def test_digits_stay_a_text_where_a_string_is_allowed(schema):
    assert value(schema, "5") == "5"


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (INTEGER, "5", 5),
        (INTEGER, "5.0", 5),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"enum": [True, False]}, "false", False),
        ({"anyOf": [INTEGER, NULL]}, "None", None),
        ({"$ref": "#/$defs/a~1b"}, "5", 5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"enum": ["1", None]}, "null", None),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [STRING, NULL]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"const": "auto"}, INTEGER]}, "7", 7),
        ({"anyOf": [{"const": "auto"}, INTEGER]}, "auto", "auto"),
        ({"enum": ["auto", 1]}, "1", 1),
        ({}, "[1]", [1]),
        (True, "5", 5),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"$ref": "elsewhere.json"}, "5", 5),
        ({"$ref": "#/$defs/Missing"}, "5", 5),
        ({"type": "date", "enum": []}, "5", 5),
        (INTEGER, "five", "five"),
    ],
    ids=str,
)
def test_other_types(schema, text, expected):
    found = value(schema, text)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    "parameters",
    [
        {"additionalProperties": STRING},
        {"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"y": STRING}}}},
        {"allOf": [{"properties": {"z": {}}}, {"properties": {"y": STRING}}]},
    ],
    ids=str,
)
def test_properties_of_combined_and_further_schemas(parameters):
    assert ArgumentTypes(parameters).value("y", "5") == "5"


def test_references_that_branch_take_linear_time():
    """Each is resolved once; by paths there were 2**25 of them."""
    defs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(25)}
    began_s = time.process_time()
    properties = {"x": {"$ref": "#/$defs/d0"}}
    parameters = {"$ref": "#/$defs/d0", "$defs": {**defs, "d25": STRING}, "properties": properties}
    assert ArgumentTypes(parameters).value("x", "5") == "5"
    assert time.process_time() - began_s < 1
