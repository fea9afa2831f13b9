"""What all bodies of the OpenAI API have in common, in both directions.

A request's field that the API knows and this service cannot serve is refused by its name, with the
reason; one that nobody knows, with the nearest that is. A field that is null counts as left out.
A body is checked on the event loop: every list and mapping has a most, and is left at the first
thing in it that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError


class RequestModel(BaseModel):
    """A body, or a part of one, as a client sends it. Types are not converted."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Fields of the API that are not served, with what completes "it must be ..."."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        """And all unknown fields but the first: one is told of, and each costs a finding."""
        if not isinstance(given, dict):
            return given
        told = {name: value for name, value in given.items() if value is not None}
        unknown = [name for name in told if name not in _field_names(cls)]
        for name in unknown[1:]:
            del told[name]
        return told

    def sent_names(self) -> dict[str, str]:
        """What errors of this body have to call fields that it may spell in several ways."""
        return {}


@cache
def _field_names(model: type[RequestModel]) -> frozenset[str]:
    """As clients spell them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class AnswerModel(BaseModel):
    """A body, or a part of one, as a client gets it. What was not set is left out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def to_json(self) -> str:
        """One line; a field that was set to None is null."""
        return self.model_dump_json(exclude_unset=True)

    def told(self) -> dict[str, Any]:
        """The same as plain data, to be a part of something else."""
        return self.model_dump(mode="json", exclude_unset=True)


def at_most(most: int, least: int = 0) -> Any:
    """Of a list: how many items it has, and that the first wrong one ends the check of it."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def entries(most: int) -> BeforeValidator:
    """Refuses a mapping with more entries than `most` before any of them is looked at.

    Beside Field(max_length), which tells the document of it and counts only when all were checked.
    """

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            message = "Dictionary should have at most {most} entries"
            raise PydanticCustomError("too_long", message, {"most": most})
        return given

    return BeforeValidator(check)


Metadata = Annotated[dict[str, str], Field(max_length=16), entries(16)]
"""A caller's own words; as many as OpenAI takes."""


def number(meaning: str, low: float | None = None, high: float | None = None) -> Any:
    """A field that may be left out, whose limits the sampling parameters check."""
    limits: JsonDict = {"minimum": low, "maximum": high}
    told: JsonDict = {name: value for name, value in limits.items() if value is not None}
    return Field(default=None, description=meaning, json_schema_extra=told)


def option(meaning: str, default: Any = None) -> Any:
    """A field that may be left out."""
    return Field(default=default, description=meaning)


class ErrorDetails(AnswerModel):
    """Why a request failed."""

    message: str = Field(description="for people: names the field, the value and the limit")
    type: str = Field(description="the kind of error, as OpenAI names them")
    param: str | None = Field(description="the field that is wrong")
    code: str | None = Field(description="for programs")


class ErrorBody(AnswerModel):
    """What every answer with a status from 400 on holds."""

    error: ErrorDetails


class PromptTokensDetails(AnswerModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="those whose KV was in the prefix cache")


class SpeculationUsage(AnswerModel):
    """What was drafted for the request, all its choices together, and what came of it."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float = Field(description="accepted / drafted tokens; 0 without drafts")
    mean_acceptance_length: float = Field(description="tokens a draft yielded, bonus included")
    verifier: str
    is_lossless: bool


class CompletionTokensDetails(AnswerModel):
    """Of the answer's tokens."""

    speculation: SpeculationUsage


class Usage(AnswerModel):
    """What a request took. The prompt counts once, however many choices there are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class StreamOptions(RequestModel):
    """What a stream tells besides the answer."""

    refused = MappingProxyType(
        {"include_obfuscation": "left out: chunks are not padded to hide their length"}
    )

    include_usage: bool = option("a last chunk without choices tells the usage", False)
    continuous_usage_stats: bool = option("every chunk tells the usage so far", False)


FinishReason = Literal["stop", "length", "tool_calls"]
