"""Structured outputs: structured_outputs and the guided_ fields."""

import pytest

from cluster.api.openai.schemas.sampling_fields import (
    SamplingFields,
    requested_structure,
)
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import StructuredOutput

SCHEMA = {"type": "integer"}
TEXT = '{"type": "integer"}'


def structure(*others, **given):
    """Return the structured output of a request with these fields."""
    return requested_structure(SamplingFields.model_validate(given), *others)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"json": SCHEMA}, StructuredOutput(json_schema=TEXT)),
        ({"json": TEXT}, StructuredOutput(json_schema=TEXT)),
        ({"json_object": True}, StructuredOutput(json_object=True)),
        ({"regex": "a"}, StructuredOutput(regex="a")),
        ({"choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"grammar": "start: A"}, StructuredOutput(grammar="start: A")),
    ],
)
def test_structured_outputs_and_their_older_names(given, form):
    assert structure(structured_outputs=given) == form
    [(name, value)] = given.items()
    if name != "json_object":
        assert structure(**{f"guided_{name}": value}) == form


@pytest.mark.parametrize("given", [{}, {"regex": "a", "choice": ["b"]}, {"json_object": False}])
def test_structured_outputs_have_exactly_one_field(given):
    with pytest.raises(InvalidValueError, match="exactly one"):
        structure(structured_outputs=given)


def test_only_one_structure_may_be_given():
    with pytest.raises(InvalidValueError, match="one of response_format, tools"):
        structure(StructuredOutput(json_object=True), guided_regex="a")


def test_the_default_is_any_text():
    assert structure(None, guided_regex=None) is None
