"""Base classes and shared fields of requests and responses of the OpenAI API.

A field of the OpenAI API that is not supported is rejected with the reason, an unknown field with
the most similar known one. A null field counts as left out, and so does an unsupported one whose
value requests nothing (`unsupported_fields.is_neutral`). Bodies are validated on the event loop:
the length of every list and mapping is limited, and validation stops at its first error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError, to_json

from cluster.api.base.unsupported_fields import is_neutral
from specdec.types.reports.receipts import Receipt


class RequestModel(BaseModel):
    """A request body, or a part of one. Types are not converted."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    refused: ClassVar[Mapping[str, str]] = {}
    """Unsupported fields of the API, with the end of "it must be ..."."""
    api_names: ClassVar[Mapping[str, str]] = {}
    """Names of fields in the API by their names in the engine, for errors: the newest spelling."""
    parents: ClassVar[Mapping[str, str]] = {}
    """Fields whose objects have any entries, by the names of entries that clients send beside."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        """Drop fields that count as left out, and all unknown fields but the first, to report."""
        if not isinstance(given, dict):
            return given
        refused, known = cls.refused, _field_names(cls)
        if given.keys() <= known and None not in given.values():
            return given
        fields = {
            name: value
            for name, value in given.items()
            if not (value is None or (name in refused and is_neutral(name, value)))
        }
        if not fields.keys() <= known:
            for name in [name for name in fields if name not in known][1:]:
                del fields[name]
        return fields

    def fields_of(self, model: type[RequestModel]) -> dict[str, Any]:
        """Return the values of the fields that `model` has too."""
        shared = type(self).model_fields.keys() & model.model_fields.keys()
        return {name: getattr(self, name) for name in shared}

    def names(self) -> dict[str, str]:
        """Return the client's names of fields, by the engine's."""
        return {**self.api_names, **self.sent_names()}

    def sent_names(self) -> dict[str, str]:
        """Return the names that the client used for fields with several spellings."""
        return {}


@cache
def _field_names(model: type[RequestModel]) -> frozenset[str]:
    """Return the names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class ResponseModel(BaseModel):
    """A response body, or a part of one. A field that was not set is left out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def to_json(self) -> str:
        """Serialize to one line of JSON; a field that was set to None is null."""
        return self.model_dump_json(exclude_unset=True)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, like `to_json`."""
        return self.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True)
class PlainBody:
    """A response body, or an event, that is not validated.

    fields: those of a ResponseModel, in its order. Models in them have set all of their own.
    """

    fields: Mapping[str, Any]

    def to_json(self) -> bytes:
        """Serialize to one line of JSON."""
        return to_json(self.fields, inf_nan_mode="null")


def at_most(most: int, least: int = 0) -> Any:
    """Limit the length of a list, and stop its validation at the first invalid item."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def text_type(*names: str) -> BeforeValidator:
    """Reject the type of a part of a message that is not one of `names`, such as an image."""
    *others, last = (repr(name) for name in names)
    limit = f"{', '.join(others)} or {last}" if others else last

    def check(given: Any) -> Any:
        if isinstance(given, str) and given not in names:
            message = f"Input should be {limit}: the served model reads text only"
            raise PydanticCustomError("literal_error", message)
        return given

    return BeforeValidator(check)


def max_entries(most: int) -> BeforeValidator:
    """Reject a mapping with too many entries before any of them is validated.

    Field(max_length), used beside it for /openapi.json, counts only after validation.
    """

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            message = "Dictionary should have at most {most} entries"
            raise PydanticCustomError("too_long", message, {"most": most})
        return given

    return BeforeValidator(check)


Metadata = Annotated[dict[str, str], Field(max_length=16), max_entries(16)]
"""Key-value pairs of the client, with OpenAI's limit."""


def number(meaning: str, low: float | None = None, high: float | None = None) -> Any:
    """Declare an optional number; SamplingParams checks the limits."""
    limits = {"minimum": low, "maximum": high}
    given: JsonDict = {name: value for name, value in limits.items() if value is not None}
    return Field(default=None, description=meaning, json_schema_extra=given)


def option(meaning: str, default: Any = None) -> Any:
    """Declare an optional field."""
    return Field(default=default, description=meaning)


def same_as(model: type[BaseModel], name: str) -> Any:
    """Declare a field with the default, the limits and the description of another model's."""
    return copy(model.model_fields[name])


class ErrorDetails(ResponseModel):
    """The error of a failed request."""

    message: str = Field(description="text with the field, the value and the limit")
    type: str = Field(description="OpenAI's error type")
    param: str | None = Field(description="the invalid field")
    code: str | None = Field(description="OpenAI's error code")


class ErrorBody(ResponseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetails


class PromptTokensDetails(ResponseModel):
    """Details of the prompt tokens."""

    cached_tokens: int = Field(description="tokens found in the prefix cache")
    cache_write_tokens: int = Field(description="0: writing to the prefix cache has no cost")


class SpeculationUsage(ResponseModel):
    """Speculation statistics of a request, for all its choices together."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float = Field(description="accepted / drafted tokens; 0 without drafts")
    mean_acceptance_length: float = Field(description="tokens per draft, with the target's own")
    verifier: str
    is_lossless: bool


class CompletionTokensDetails(ResponseModel):
    """Details of the completion tokens."""

    reasoning_tokens: int = Field(description="tokens up to the end of the separated reasoning")
    accepted_prediction_tokens: int = Field(description="drafted from the prediction and kept")
    rejected_prediction_tokens: int = Field(description="drafted from the prediction and dropped")
    speculation: SpeculationUsage


class Usage(ResponseModel):
    """Token usage of a request. The prompt counts once, for any number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ReceiptOpening(ResponseModel):
    """The tokens that the digests of a receipt were computed from."""

    salt: str
    prompt_token_ids: list[int]
    outputs: list[list[int]] = Field(description="tokens of each choice")


class ReceiptBody(ResponseModel):
    """A signed statement of what determines the tokens of an answer; see docs/receipts.md."""

    statement: str = Field(description="JSON text, whose bytes are signed")
    signature: str = Field(description="Ed25519, hexadecimal")
    public_key: str
    opening: ReceiptOpening


def receipt_bodies(receipts: Iterable[Receipt | None]) -> list[ReceiptBody]:
    """Return the bodies of the receipts that are there."""
    return [ReceiptBody.model_validate(each.to_mapping()) for each in receipts if each is not None]


class GenerationBody(ResponseModel):
    """The common fields of chats, completions and their chunks."""

    id: str
    object: str
    created: int
    model: str
    seed: int = Field(description="seed of the request, or the chosen one")
    choices: Sequence[ResponseModel]
    usage: Usage | None
    receipts: list[ReceiptBody] | None = Field(
        default=None,
        description="one for each prompt, if requested; in a last chunk",
    )


class StreamOptions(RequestModel):
    """Options of a stream."""

    refused: ClassVar[Mapping[str, str]] = {
        "include_obfuscation": "left out: chunks are not padded to hide their length"
    }

    include_usage: bool | None = option(
        "sends the usage in a last chunk without choices; default: as `continuous_usage_stats`"
    )
    continuous_usage_stats: bool = option(
        "sends the usage so far in every chunk, unless `include_usage` is false", False
    )

    @property
    def has_usage(self) -> bool:
        """Return whether a stream has usage."""
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage


FinishReason = Literal["stop", "length", "tool_calls"]
