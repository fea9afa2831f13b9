"""Fields that require a format of the text: `response_format`, and vLLM's structured outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cluster.api.base.openai_schema import RequestModel, at_most, option
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import MAX_OUTPUT_CHOICES, StructuredOutput

KINDS: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
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
    object_schema: dict[str, Any] | None = Field(
        default=None,
        alias="schema",
        description="with type `json_object` only: llama.cpp's name of json_schema.schema",
    )

    @property
    def required_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of the text, None if any JSON object or any text will do."""
        return self.json_schema.json_schema if self.json_schema else self.object_schema

    def to_structure(self) -> StructuredOutput | None:
        """Convert; return None for any text. Raise InvalidValueError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            sent = self.model_dump(by_alias=True, exclude_unset=True).get("json_schema")
            limit = "given with type json_schema, and with no other"
            raise InvalidValueError("response_format.json_schema", sent, limit)
        if self.object_schema is not None and self.type != "json_object":
            limit = "left out unless type is json_object; use json_schema"
            raise InvalidValueError("response_format.schema", self.object_schema, limit)
        if self.type == "text":
            return None
        schema = self.required_schema
        return StructuredOutput(json_object=True) if schema is None else structure(json=schema)

    def sent_names(self) -> dict[str, str]:
        """Return the name that the client used for the schema."""
        if self.object_schema is None:
            return {}
        return {"structured_output.json_schema": "response_format.schema"}


class StructuredOutputs(RequestModel):
    """vLLM's structured outputs; exactly one of json, json_object, regex, choice and grammar."""

    refused: ClassVar[Mapping[str, str]] = {
        "structural_tag": "left out: use tools",
        "disable_fallback": "left out: llguidance is the only backend",
        "disable_any_whitespace": "left out: JSON is written without whitespace",
        "disable_additional_properties": "left out: use additionalProperties in the schema",
        "whitespace_pattern": "left out: JSON is written without whitespace",
    }

    json_schema: str | dict[str, Any] | None = Field(
        default=None, alias="json", description="JSON that matches this schema"
    )
    json_object: bool | None = option("any JSON object; true or left out")
    regex: str | None = option("a text that matches this regular expression")
    choice: Annotated[list[str], at_most(MAX_OUTPUT_CHOICES, 1)] | None = option(
        "one of these texts"
    )
    grammar: str | None = option("a text of this grammar, in Lark or GBNF")

    def to_structure(self) -> StructuredOutput:
        """Convert. Raise InvalidValueError."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        self._require_one(given)
        return structure(**given)

    def sent_names(self) -> dict[str, str]:
        """Return the names that the client used, by the engine's."""
        return {
            f"structured_output.{own}": f"structured_outputs.{name}" for name, own in KINDS.items()
        }

    def _require_one(self, given: Mapping[str, Any]) -> None:
        """Raise InvalidValueError unless one field requests a format."""
        used = [name for name, value in given.items() if value is not False]
        if len(used) != 1:
            names = [each.alias or name for name, each in type(self).model_fields.items()]
            limit = f"exactly one of {', '.join(names)}"
            raise InvalidValueError("structured_outputs", used or given, limit)


def structure(**fields: Any) -> StructuredOutput:
    """Build a StructuredOutput from fields with vLLM's names. Raise InvalidValueError."""
    given = {KINDS.get(name, name): value for name, value in fields.items()}
    if not isinstance(given.get("json_schema", ""), str):
        given["json_schema"] = json.dumps(given["json_schema"])
    return StructuredOutput(**given)
