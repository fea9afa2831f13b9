"""The format that `response_format` requires, and the names of its fields in errors."""

import pytest

from cluster.api.openai.schemas.output_format import ResponseFormat
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import StructuredOutput

SCHEMA = {"type": "integer"}
TEXT = '{"type": "integer"}'


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput(json_object=True)),
        ({"type": "json_object", "schema": SCHEMA}, StructuredOutput(json_schema=TEXT)),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            StructuredOutput(json_schema=TEXT),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            StructuredOutput(json_object=True),
        ),
    ],
)
def test_response_format(given, form):
    assert ResponseFormat.model_validate(given).to_structure() == form


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "text", "json_schema": {"name": "x", "schema": SCHEMA}}, "json_schema"),
        ({"type": "json_schema", "schema": SCHEMA}, "json_schema"),
        ({"type": "text", "schema": SCHEMA}, "schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}, "schema": SCHEMA},
            "schema",
        ),
    ],
)
def test_a_schema_needs_the_matching_type(given, field):
    with pytest.raises(InvalidValueError) as caught:
        ResponseFormat.model_validate(given).to_structure()
    assert caught.value.field == f"response_format.{field}"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"type": "json_object", "schema": SCHEMA}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, None),
    ],
)
def test_an_error_of_the_schema_names_the_field_that_was_sent(given, name):
    names = ResponseFormat.model_validate(given).sent_names()
    assert names.get("structured_output.json_schema") == name
