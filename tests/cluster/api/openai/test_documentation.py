"""docs/openai.md documents every field as the schema does."""

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from cluster.api.base.openai_schema import StreamOptions
from cluster.api.openai.schemas.chat_schema import (
    ChatRequest,
    FunctionDefinition,
    Message,
    Prediction,
)
from cluster.api.openai.schemas.completion_schema import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cluster.api.openai.schemas.responses_schema import ResponsesRequest, TextFormat
from cluster.api.openai.schemas.sampling_fields import (
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    Speculation,
    StructuredOutputs,
)

PAGE = Path(__file__).parents[4] / "docs" / "openai.md"
SAMPLING_PAGE = PAGE.with_name("sampling.md")
MODELS = (
    SamplingFields,
    StreamOptions,
    ResponseFormat,
    JsonSchemaFormat,
    FunctionDefinition,
    TextFormat,
    ChatRequest,
    Message,
    Prediction,
    CompletionRequest,
    ResponsesRequest,
    Speculation,
    StructuredOutputs,
    TokenizeRequest,
    DetokenizeRequest,
)


def own_fields(model):
    """Return the fields of a model without those that two endpoints share."""
    shared = SamplingFields.model_fields if model is not SamplingFields else {}
    inherits = issubclass(model, SamplingFields)
    return {k: v for k, v in model.model_fields.items() if not (inherits and k in shared)}


def literals(annotation):
    """Return the values of a field of literals."""
    if get_origin(annotation) is Literal:
        return [f"`{each}`" for each in get_args(annotation) if isinstance(each, str)]
    return [each for part in get_args(annotation) for each in literals(part)]


def limits(field):
    extra = field.json_schema_extra or {}
    match extra.get("minimum"), extra.get("maximum"):
        case None, None:
            return ", ".join(literals(field.annotation))
        case low, None:
            return f"{low} or more"
        case low, high:
            return f"{low} to {high}"


def row(name, field):
    return f"| `{field.alias or name}` | {limits(field)} | {field.description} |"


def table(model, omitted=()):
    fields = own_fields(model).items()
    rows = [row(name, field) for name, field in fields if (field.alias or name) not in omitted]
    return ["| field | limits | meaning |", "|---|---|---|", *rows]


def refused_table(model):
    """Return one row per reason, with the names in their order."""
    shared = SamplingFields.refused if model is not SamplingFields else {}
    names = {}
    for name, why in model.refused.items():
        if name not in shared:
            names.setdefault(why, []).append(f"`{name}`")
    rows = [f"| {', '.join(each)} | {why} |" for why, each in names.items()]
    return ["| refused | it must be |", "|---|---|", *rows] if rows else []


def documented(marker):
    """Return the lines of the table after a marker."""
    found = re.search(rf"<!-- {marker} -->\n((?:\|.*\n)+)", PAGE.read_text())
    assert found, f"docs/openai.md has no table after <!-- {marker} -->"
    return found[1].splitlines()


def listed(model, place):
    """Return the fields whose description is at another place, in the line after a marker."""
    marker = f"<!-- fields of {model.__name__} {place} -->\n"
    _, _, rest = PAGE.read_text().partition(marker)
    return re.findall(r"`(\w+)`", rest.partition("\n")[0])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_page_has_every_field_of_the_schema(model):
    names = [*listed(model, "as above"), *listed(model, "in sampling.md")]
    assert set(names) <= {field.alias or name for name, field in own_fields(model).items()}
    assert documented(f"fields of {model.__name__}") == table(model, names)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_fields_that_are_listed_have_the_same_row_above(model):
    above = [line for each in MODELS if each is not model for line in table(each)]
    own, shown = table(model), table(model, listed(model, "as above"))
    assert {*own} - {*shown} <= {*above}


def test_sampling_parameters_that_are_listed_have_a_row_in_their_page():
    cells = re.findall(r"^\| (`[^|]+) \|", SAMPLING_PAGE.read_text(), re.MULTILINE)
    documented_there = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    names = listed(SamplingFields, "in sampling.md")
    assert len(names) > 15
    assert {*names} <= documented_there


@pytest.mark.parametrize(
    "model", [each for each in MODELS if refused_table(each)], ids=lambda model: model.__name__
)
def test_the_page_has_every_unsupported_field(model):
    assert documented(f"refused by {model.__name__}") == refused_table(model)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_has_a_description_that_fits_a_table(model):
    for name, field in own_fields(model).items():
        assert field.description, name
        assert "|" not in field.description
