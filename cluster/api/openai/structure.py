"""Converts response_format, structured_outputs and guided_* to the engine's StructuredOutput."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.api.openai.schema import RequestModel, at_most, option
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import MAX_OUTPUT_CHOICES, StructuredOutput

KINDS: Mapping[str, str] = MappingProxyType(
    {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
)
"""The fields of StructuredOutput by their names in vLLM, without `guided_`."""


class JsonSchemaFormat(RequestModel):
    """A named JSON schema."""

    name: str = Field(min_length=1, max_length=64, description="for the client's own use")
    description: str | None = option("accepted and ignored: put it into the prompt")
    json_schema: dict[str, Any] | None = Field(
        default=None, alias="schema", description="JSON schema, drafts 4 to 2020-12"
    )
    strict: bool | None = option("accepted; a schema is always enforced")


class ResponseFormat(RequestModel):
    """`text`, `json_object`, or `json_schema` with the schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="any text, or JSON")
    json_schema: JsonSchemaFormat | None = option("with type `json_schema` only")

    def to_structure(self, name: str = "response_format") -> StructuredOutput | None:
        """Convert; return None for any text. name: of this field, for errors."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            limit = "given with type json_schema, and with no other"
            raise InvalidValueError(f"{name}.json_schema", self.type, limit)
        if self.type == "json_object":
            return StructuredOutput(json_object=True)
        return None if self.json_schema is None else schema_structure(self.json_schema.json_schema)


class StructuredOutputs(RequestModel):
    """vLLM's structured outputs; exactly one of json, json_object, regex, choice and grammar."""

    refused = MappingProxyType(
        {
            "structural_tag": "left out: use tools",
            "disable_fallback": "left out: llguidance is the only backend",
            "disable_any_whitespace": "left out: JSON is written without whitespace",
            "disable_additional_properties": "left out: use additionalProperties in the schema",
            "whitespace_pattern": "left out: JSON is written without whitespace",
        }
    )

    json_schema: str | dict[str, Any] | None = Field(
        default=None, alias="json", description="JSON that matches this schema"
    )
    json_object: bool | None = option("any JSON object; true or left out")
    regex: str | None = option("a text that matches this regular expression")
    choice: Annotated[list[str], at_most(MAX_OUTPUT_CHOICES)] | None = option("one of these texts")
    grammar: str | None = option("a text of this grammar, in Lark or GBNF")

    def to_structure(self) -> StructuredOutput:
        """Convert. Raise InvalidValueError."""
        return _structure(self.model_dump(by_alias=True, exclude_none=True))

    def sent_names(self) -> dict[str, str]:
        """Return the names of the fields of StructuredOutput in this field."""
        return {
            f"structured_output.{own}": f"structured_outputs.{name}" for name, own in KINDS.items()
        }


def schema_structure(schema: str | Mapping[str, Any] | None) -> StructuredOutput:
    """Return the structured output for a JSON schema; without a schema, for any object."""
    if schema is None:
        return StructuredOutput(json_object=True)
    return StructuredOutput(json_schema=schema if isinstance(schema, str) else json.dumps(schema))


def structured_output(
    vllm: StructuredOutputs | None,
    guided: Mapping[str, Any],
    *others: StructuredOutput | None,
) -> StructuredOutput | None:
    """Return the only structure that is given, None for any text.

    Raise InvalidValueError for more than one.
    """
    found = [each for each in others if each is not None]
    found += [vllm.to_structure()] if vllm is not None else []
    found += [
        _structure({name.removeprefix("guided_"): value})
        for name, value in guided.items()
        if value is not None
    ]
    if len(found) > 1:
        kinds = [each.kind for each in found]
        limit = "one of response_format, tools, structured_outputs and the guided_ fields"
        raise InvalidValueError("structured_outputs", kinds, limit)
    return found[0] if found else None


def _structure(fields: Mapping[str, Any]) -> StructuredOutput:
    given = {KINDS.get(name, name): value for name, value in fields.items()}
    if not isinstance(given.get("json_schema", ""), str):
        given["json_schema"] = json.dumps(given["json_schema"])
    return StructuredOutput(**given)
