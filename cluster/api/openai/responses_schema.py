"""The bodies of `/v1/responses`, in both directions: text only."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.api.openai.chat_schema import MAX_PARTS
from cluster.api.openai.logprobs import TokenLogprob
from cluster.api.openai.sampling_fields import Speculation
from cluster.api.openai.schema import (
    AnswerModel,
    Metadata,
    RequestModel,
    SpeculationUsage,
    at_most,
    number,
    option,
)
from cluster.replica.limits import MAX_CHAT_MESSAGES, MAX_TOKEN_IDS

_NOTHING_IS_STORED = "left out: nothing is stored; send the whole conversation as input"
_NO_TOOLS = "left out: tools are called by /v1/chat/completions"


class InputPart(RequestModel):
    """A piece of a message's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(
        "accepted; not shown to the model"
    )
    logprobs: Annotated[list[Any], at_most(MAX_TOKEN_IDS)] | None = option(
        "accepted; not shown to the model"
    )


class InputMessage(RequestModel):
    """One turn of the conversation; an earlier answer's may be as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], at_most(MAX_PARTS)]
    id: str | None = option("accepted; not shown to the model")
    status: str | None = option("accepted; not shown to the model")


class TextFormat(RequestModel):
    """`text`, `json_object`, or `json_schema` with the schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="any text, or JSON")
    name: str | None = Field(
        default=None, min_length=1, max_length=64, description="for the caller's own use"
    )
    description: str | None = option("accepted and not used: put it into the input")
    json_schema: dict[str, Any] | None = Field(
        default=None, alias="schema", description="JSON schema, drafts 4 to 2020-12"
    )
    strict: bool | None = option("accepted; a schema is always held to")


class TextOptions(RequestModel):
    """What the answer's text has to be."""

    refused = MappingProxyType({"verbosity": "left out: say in a message how long it shall be"})

    format: TextFormat | None = option("left out: any text")


class ResponsesRequest(RequestModel):
    """A conversation to go on with, in the newer of OpenAI's two shapes."""

    refused = MappingProxyType(
        {
            "previous_response_id": _NOTHING_IS_STORED,
            "conversation": _NOTHING_IS_STORED,
            "background": _NOTHING_IS_STORED,
            "prompt": "left out: there are no stored prompts",
            "tools": _NO_TOOLS,
            "tool_choice": _NO_TOOLS,
            "parallel_tool_calls": _NO_TOOLS,
            "max_tool_calls": _NO_TOOLS,
            "stream_options": "left out: the last event has the usage",
        }
    )

    model: str | None = option(
        "the model that shall answer, at most 256 characters; left out: the one that is loaded"
    )
    input: str | Annotated[list[InputMessage], at_most(MAX_CHAT_MESSAGES - 1, 1)] = Field(
        description="what the user says, or the conversation; at most 999 messages"
    )
    instructions: str | None = option("a system message, before all others")
    max_output_tokens: int | None = number("most tokens of the answer; left out: what fits", 1)
    temperature: float | None = number("divides the logits; 0 takes the likeliest token", 0, 100)
    top_p: float | None = number("keeps the likeliest tokens that sum to so much, above 0", 0, 1)
    top_k: int | None = number("keeps the so many likeliest tokens; 0 or -1 keeps all", -1)
    min_p: float | None = number("keeps tokens so likely beside the likeliest", 0, 1)
    seed: int | None = number("fixes every random choice, to 2^63 - 1; left out: any", 0)
    stream: bool = option("whether the answer comes as server-sent events", False)
    text: TextOptions | None = option("what the text has to be")
    include: Annotated[list[Literal["message.output_text.logprobs"]], at_most(8)] | None = option(
        "tells log-probabilities of the answer's tokens"
    )
    top_logprobs: int | None = number("the likeliest tokens to tell of; with `include`", 0, 20)
    truncation: Literal["disabled"] | None = option("an input that is too long is refused")
    reasoning: dict[Literal["effort"], str] | None = option(
        "`effort`, for templates that know reasoning_effort"
    )
    priority: int = option("lower goes first, from -1000 to 1000", 0)
    cache_salt: str | None = option("as in /v1/chat/completions")
    stream_interval: int | None = number("new tokens that an event of a stream waits for", 1, 2**20)
    speculation: Speculation | None = option("how to speculate for this request")
    metadata: Metadata | None = option("given back in the answer; at most 16")
    store: bool | None = option("accepted; nothing is stored")
    service_tier: Literal["auto", "default"] | None = option("accepted; there is one tier")
    user: str | None = option("accepted and not used")
    safety_identifier: str | None = option("accepted and not used")
    prompt_cache_key: str | None = option("accepted; the cache needs no hint")


class OutputText(AnswerModel):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(AnswerModel):
    """The assistant's turn."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class IncompleteDetails(AnswerModel):
    """Why an answer ended before it was complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(AnswerModel):
    """What a response failed of."""

    code: str
    message: str


class InputTokensDetails(AnswerModel):
    """Of the input's tokens."""

    cached_tokens: int


class OutputTokensDetails(AnswerModel):
    """Of the output's tokens."""

    reasoning_tokens: int = Field(description="0: they are not told apart")
    speculation: SpeculationUsage


class ResponseUsage(AnswerModel):
    """What a request took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseBody(AnswerModel):
    """The answer; the events of a stream show it as it grows."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    seed: int = Field(description="the request's, or the one that was chosen")
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
