"""Requests and responses of `/v1/responses`: text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cluster.api.base.openai_schema import (
    Metadata,
    RequestModel,
    ResponseModel,
    SpeculationUsage,
    at_most,
    number,
    option,
    same_as,
)
from cluster.api.base.unsupported_fields import ENGINE_FIELDS
from cluster.api.openai.logprobs import TokenLogprob
from cluster.api.openai.schemas.chat_schema import MAX_PARTS, ChatRequest
from cluster.api.openai.schemas.sampling_fields import JsonSchemaFormat, Speculation
from cluster.replica.limits import MAX_CHAT_MESSAGES, MAX_TOKEN_IDS
from specdec.types.sampling.sampling_params import MAX_STOP_STRINGS

_NOTHING_IS_STORED = "left out: nothing is stored; send the whole chat as input"
_NO_TOOLS = "left out: use /v1/chat/completions for tools"


class InputPart(RequestModel):
    """A part of a message's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(
        "accepted; not shown to the model"
    )
    logprobs: Annotated[list[Any], at_most(MAX_TOKEN_IDS)] | None = option(
        "accepted; not shown to the model"
    )


class InputMessage(RequestModel):
    """One message of the chat. An earlier answer is accepted unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], at_most(MAX_PARTS)]
    id: str | None = option("accepted; not shown to the model")
    status: str | None = option("accepted; not shown to the model")


class TextFormat(RequestModel):
    """`text`, `json_object`, or `json_schema` with the schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="any text, or JSON")
    name: str | None = Field(
        default=None, min_length=1, max_length=64, description="for the client's own use"
    )
    description: str | None = option("accepted and ignored: put it into the input")
    json_schema: dict[str, Any] | None = same_as(JsonSchemaFormat, "json_schema")
    strict: bool | None = same_as(JsonSchemaFormat, "strict")


class TextOptions(RequestModel):
    """Requirements on the text of the answer."""

    refused: ClassVar[Mapping[str, str]] = {
        "verbosity": "left out: request the length of the answer in a message"
    }

    format: TextFormat | None = option("default: any text")


class ResponsesRequest(RequestModel):
    """A chat to answer, in OpenAI's newer format."""

    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _NOTHING_IS_STORED,
        "conversation": _NOTHING_IS_STORED,
        "background": _NOTHING_IS_STORED,
        "prompt": "left out: stored prompts are not supported",
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "parallel_tool_calls": _NO_TOOLS,
        "max_tool_calls": _NO_TOOLS,
        "stream_options": "left out: the last event has the usage",
        "enable_response_messages": "left out: the output has the messages",
        **ENGINE_FIELDS,
    }

    api_names: ClassVar[Mapping[str, str]] = {
        **ChatRequest.api_names,
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "messages length": "input length",
        "messages content length": "input length",
        "prompt": "input",
        "prompt length": "input length",
        "chat_template_kwargs.reasoning_effort": "reasoning.effort",
        "structured_output.json_schema": "text.format.schema",
        "response_format.json_schema": "text.format.schema",
    }

    model: str | None = same_as(ChatRequest, "model")
    input: str | Annotated[list[InputMessage], at_most(MAX_CHAT_MESSAGES - 1, 1)] = Field(
        description="the user message, or the chat; at most 999 messages"
    )
    instructions: str | None = option("a system message, before all others")
    max_output_tokens: int | None = number(
        "maximum number of tokens of the answer; default: up to the context length", 1
    )
    temperature: float | None = same_as(ChatRequest, "temperature")
    top_p: float | None = same_as(ChatRequest, "top_p")
    top_k: int | None = same_as(ChatRequest, "top_k")
    min_p: float | None = same_as(ChatRequest, "min_p")
    presence_penalty: float | None = same_as(ChatRequest, "presence_penalty")
    frequency_penalty: float | None = same_as(ChatRequest, "frequency_penalty")
    repetition_penalty: float | None = same_as(ChatRequest, "repetition_penalty")
    stop: str | Annotated[list[str], at_most(MAX_STOP_STRINGS)] | None = same_as(
        ChatRequest, "stop"
    )
    seed: int | None = same_as(ChatRequest, "seed")
    stream: bool = same_as(ChatRequest, "stream")
    text: TextOptions | None = option("required format of the text")
    include: Annotated[list[Literal["message.output_text.logprobs"]], at_most(8)] | None = option(
        "returns log-probabilities of the answer's tokens"
    )
    top_logprobs: int | None = number(
        "number of most likely tokens to return at each position; needs `include`", 0, 20
    )
    truncation: Literal["disabled"] | None = option("an input that is too long is rejected")
    reasoning: dict[Literal["effort"], str] | None = option(
        "`effort` is passed to the chat template as reasoning_effort"
    )
    priority: int = same_as(ChatRequest, "priority")
    cache_salt: str | None = option("as in /v1/chat/completions")
    allow_training: bool = same_as(ChatRequest, "allow_training")
    stream_interval: int | None = same_as(ChatRequest, "stream_interval")
    speculation: Speculation | None = same_as(ChatRequest, "speculation")
    metadata: Metadata | None = option("returned in the answer; at most 16 entries")
    store: bool | None = same_as(ChatRequest, "store")
    service_tier: Literal["auto", "default"] | None = same_as(ChatRequest, "service_tier")
    user: str | None = same_as(ChatRequest, "user")
    safety_identifier: str | None = same_as(ChatRequest, "safety_identifier")
    prompt_cache_key: str | None = same_as(ChatRequest, "prompt_cache_key")


class OutputText(ResponseModel):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseModel):
    """The message of the assistant."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class IncompleteDetails(ResponseModel):
    """Why an answer ended before it was complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(ResponseModel):
    """The error of a failed response."""

    code: str
    message: str


class InputTokensDetails(ResponseModel):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = Field(description="0: writing to the prefix cache has no cost")


class OutputTokensDetails(ResponseModel):
    """Details of the output tokens."""

    reasoning_tokens: int = Field(description="tokens up to the end of the separated reasoning")
    speculation: SpeculationUsage


class ResponseUsage(ResponseModel):
    """Token usage of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseBody(ResponseModel):
    """The response; the events of a stream have its state so far."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    seed: int = Field(description="seed of the request, or the chosen one")
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    metadata: dict[str, str]
    output: list[OutputMessage]
    incomplete_details: IncompleteDetails | None
    error: ResponseError | None
    usage: ResponseUsage | None
    tools: list[Any]
    tool_choice: Literal["none"]
    parallel_tool_calls: bool
    store: Literal[False]
