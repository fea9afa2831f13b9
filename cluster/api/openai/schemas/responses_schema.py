"""Requests and responses of `/v1/responses`: text and tools, without stored state."""

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
    max_entries,
    number,
    option,
    same_as,
)
from cluster.api.base.unsupported_fields import ENGINE_FIELDS
from cluster.api.openai.schemas.chat_schema import MAX_TOOLS, NO_MODERATION, TEXT_ONLY, ChatRequest
from cluster.api.openai.schemas.output_format import JsonSchemaFormat, StructuredOutputs
from cluster.api.openai.schemas.response_items import (
    AllowedTools,
    InputItem,
    NamedToolChoice,
    OutputItem,
    ToolParam,
    placed_tools,
)
from cluster.api.openai.schemas.sampling_fields import Biases, SamplingFields, Speculation
from cluster.replica.limits import MAX_CHAT_MESSAGES
from specdec.types.sampling.sampling_params import MAX_STOP_STRINGS

_NOTHING_IS_STORED = "left out: nothing is stored; send the whole chat as input"


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


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

    format: TextFormat | None = option("default: any text")
    verbosity: Literal["low", "medium", "high"] | None = option(
        "variable `verbosity` of the chat template; ignored with a warning if it has none"
    )


class ReasoningOptions(RequestModel):
    """Options of the model's reasoning."""

    effort: str | None = option(
        "variable `reasoning_effort` of the chat template; ignored with a warning if it has none"
    )
    summary: Literal["auto", "concise", "detailed"] | None = option(
        "the summary of reasoning items is their whole text, as their content is"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = option("older name")
    context: str | None = option("accepted; the template selects earlier reasoning")
    mode: str | None = option("accepted; there is one mode")


class ResponsesRequest(RequestModel):
    """A chat to answer, in OpenAI's newer format."""

    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _NOTHING_IS_STORED,
        "conversation": _NOTHING_IS_STORED,
        "background": _NOTHING_IS_STORED,
        "background_options": _NOTHING_IS_STORED,
        "context_management": "left out: the service compacts no input",
        "moderation": NO_MODERATION,
        "access_programs": "left out: every client has the same access",
        "image": TEXT_ONLY,
        "prompt": "left out: stored prompts are not supported",
        "max_tool_calls": "left out: it limits the calls of hosted tools",
        "stream_options": "left out: the last event has the usage",
        "enable_response_messages": "left out: the output has the messages",
        "previous_input_messages": _NOTHING_IS_STORED,
        "previous_response": _NOTHING_IS_STORED,
        "mm_processor_kwargs": SamplingFields.refused["mm_processor_kwargs"],
        "vllm_xargs": SamplingFields.refused["vllm_xargs"],
        **ENGINE_FIELDS,
    }

    api_names: ClassVar[Mapping[str, str]] = {
        **ChatRequest.api_names,
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "messages length": "input length",
        "messages content length": "input length",
        "tool_choice.function.name": "tool_choice.name",
        "prompt": "input",
        "prompt length": "input length",
        "tools.function.strict": "tools.strict",
        "chat_template_kwargs.reasoning_effort": "reasoning.effort",
        "chat_template_kwargs.verbosity": "text.verbosity",
        "structured_output.json_schema": "text.format.schema",
        "response_format.json_schema": "text.format.schema",
    }

    model: str | None = same_as(ChatRequest, "model")
    input: str | Annotated[list[InputItem], at_most(MAX_CHAT_MESSAGES - 1, 1)] = Field(
        description="the user message, or the items of the chat; at most 999"
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
    logit_bias: Biases | None = same_as(ChatRequest, "logit_bias")
    include_stop_str_in_output: bool | None = same_as(ChatRequest, "include_stop_str_in_output")
    ignore_eos: bool | None = same_as(ChatRequest, "ignore_eos")
    min_tokens: int | None = same_as(ChatRequest, "min_tokens")
    skip_special_tokens: bool | None = same_as(ChatRequest, "skip_special_tokens")
    seed: int | None = same_as(ChatRequest, "seed")
    stream: bool = same_as(ChatRequest, "stream")
    text: TextOptions | None = option("required format of the text")
    structured_outputs: StructuredOutputs | None = same_as(ChatRequest, "structured_outputs")
    include: Annotated[list[Included], at_most(8)] | None = option(
        "`message.output_text.logprobs` returns log-probabilities of the answer's tokens; "
        "the others are accepted without effect"
    )
    top_logprobs: int | None = number(
        "number of most likely tokens to return at each position; needs `include`", 0, 20
    )
    truncation: Literal["auto", "disabled"] | None = option(
        "default: an input that is too long is rejected; `auto` leaves out its oldest messages"
    )
    reasoning: ReasoningOptions | None = option("options of the reasoning")
    tools: Annotated[list[ToolParam], at_most(MAX_TOOLS)] | None = option(
        "functions and custom tools that the model may call; at most 128"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedTools | None = (
        option(
            "whether the model calls tools; default `auto`; or the tools that it may or must call"
        )
    )
    parallel_tool_calls: bool = same_as(ChatRequest, "parallel_tool_calls")
    priority: int = same_as(ChatRequest, "priority")
    cache_salt: str | None = option("as in /v1/chat/completions")
    allow_training: bool = same_as(ChatRequest, "allow_training")
    request_id: str | None = same_as(ChatRequest, "request_id")
    stream_interval: int | None = same_as(ChatRequest, "stream_interval")
    speculation: Speculation | None = same_as(ChatRequest, "speculation")
    metadata: Metadata | None = option("returned in the answer; at most 16 entries")
    store: bool | None = same_as(ChatRequest, "store")
    client_metadata: Annotated[dict[str, Any], max_entries(64)] | None = option(
        "accepted and ignored; at most 64 entries"
    )
    service_tier: str | None = same_as(ChatRequest, "service_tier")
    user: str | None = same_as(ChatRequest, "user")
    safety_identifier: str | None = same_as(ChatRequest, "safety_identifier")
    prompt_cache_key: str | None = same_as(ChatRequest, "prompt_cache_key")
    prompt_cache_retention: str | None = same_as(ChatRequest, "prompt_cache_retention")
    prompt_cache_options: Annotated[dict[str, Any], max_entries(16)] | None = same_as(
        ChatRequest, "prompt_cache_options"
    )

    def sent_names(self) -> dict[str, str]:
        """Return the places of the tools by those in the equivalent chat, and of their grammar."""
        tools = placed_tools(self.tools or ())
        names = {f"tools[{index}].function": each.field for index, each in enumerate(tools)}
        if self.structured_outputs is not None:
            return names | self.structured_outputs.sent_names()
        return names | {"structured_output.grammar": "tools"}

    @property
    def has_summary(self) -> bool:
        """Return whether a summary of the reasoning is requested."""
        options = self.reasoning
        return options is not None and bool(options.summary or options.generate_summary)

    @property
    def has_logprobs(self) -> bool:
        """Return whether log-probabilities are requested."""
        return "message.output_text.logprobs" in (self.include or ())


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
    """Details of the output tokens: numbers alone, as OpenAI's Agents SDK requires."""

    reasoning_tokens: int = Field(description="tokens up to the end of the separated reasoning")


class ResponseUsage(ResponseModel):
    """Token usage of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    speculation: SpeculationUsage


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
    output: list[OutputItem]
    incomplete_details: IncompleteDetails | None
    error: ResponseError | None
    usage: ResponseUsage | None
    tools: list[dict[str, Any]] = Field(description="those that are offered to the model")
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    store: Literal[False]


class InputTokens(ResponseModel):
    """The number of input tokens of a request."""

    object: Literal["response.input_tokens"]
    input_tokens: int
