"""Requests of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cluster.api.base.openai_schema import RequestModel, at_most, number, option, same_as
from cluster.api.openai.schemas.chat_schema import (
    CACHE_NOTE,
    MAX_PARTS,
    MAX_TOOLS,
    NOT_SHOWN,
    CacheControl,
    FunctionDefinition,
)
from cluster.api.openai.schemas.sampling_fields import Speculation
from cluster.replica.limits import MAX_CHAT_MESSAGES
from specdec.types.sampling.sampling_params import MAX_STOP_STRINGS

_BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_MAX_EDITS = 16
_NOT_BILLED = "left out: requests are not billed"


class TextBlock(RequestModel):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = option(CACHE_NOTE)
    citations: list[Any] | None = option(NOT_SHOWN)


class ToolUseBlock(RequestModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    toolset_name: str | None = option(NOT_SHOWN)
    caller: dict[str, Any] | None = option(NOT_SHOWN)
    cache_control: CacheControl = option(CACHE_NOTE)


class ToolReferenceBlock(RequestModel):
    """A tool that a search of the client has found, of which the model reads the name."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl = option(CACHE_NOTE)


class MediaBlock(RequestModel):
    """An image or a document in a result, in place of which the model reads a note."""

    type: Literal["image", "document"]
    source: dict[str, Any]
    transformations: dict[str, Any] | None = option(NOT_SHOWN)
    title: str | None = option(NOT_SHOWN)
    context: str | None = option(NOT_SHOWN)
    citations: dict[str, Any] | None = option(NOT_SHOWN)
    cache_control: CacheControl = option(CACHE_NOTE)


_ResultBlock = Annotated[TextBlock | ToolReferenceBlock | MediaBlock, Field(discriminator="type")]


class ToolResultBlock(RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_ResultBlock], at_most(MAX_PARTS)] | None = option("the result")
    toolset_name: str | None = option(NOT_SHOWN)
    is_error: bool = option("whether the call failed, which is written before the result", False)
    cache_control: CacheControl = option(CACHE_NOTE)


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer, which is passed to the chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = option("accepted and ignored")


class RedactedThinkingBlock(RequestModel):
    """Encrypted reasoning of another service, which is not shown to the model."""

    type: Literal["redacted_thinking"]
    data: str


def _require_known(block: Any) -> Any:
    """Refuse other blocks than these, such as images, with the reason."""
    if isinstance(block, dict) and block.get("type") not in _BLOCK_TYPES:
        known = ", ".join(_BLOCK_TYPES)
        message = f"Input should be a block of type {known}: the served model reads text only"
        raise PydanticCustomError("block_type", message)
    return block


_Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
    BeforeValidator(_require_known),
]


class MessageParam(RequestModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], at_most(MAX_PARTS)]


def _require_custom(kind: Any) -> Any:
    """Refuse tools of Anthropic's servers with the reason."""
    if kind != "custom":
        message = "Input should be 'custom': the service runs no tools; define them as functions"
        raise PydanticCustomError("tool_type", message)
    return kind


class ToolParam(RequestModel):
    """A function that the model may call."""

    type: Annotated[Literal["custom"], BeforeValidator(_require_custom)] = "custom"
    name: str = same_as(FunctionDefinition, "name")
    description: str | None = option("shown to the model")
    input_schema: dict[str, Any] = Field(description="JSON schema of the arguments, an object")
    strict: bool | None = same_as(FunctionDefinition, "strict")
    input_examples: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(NOT_SHOWN)
    defer_loading: bool = option("accepted; every tool is offered from the start", False)
    eager_input_streaming: bool = option("accepted; arguments are always streamed", False)
    allowed_callers: list[str] | None = option("accepted; the model calls a tool directly")
    cache_control: CacheControl = option(CACHE_NOTE)


class ToolChoice(RequestModel):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = option("with type `tool`")
    disable_parallel_tool_use: bool = option("limits an answer to one call", False)


class Thinking(RequestModel):
    """Thinking before the answer, for chat templates that have a variable for it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = number(
        "ends longer thinking, where the service has a parser of reasoning", 1
    )
    display: str | None = option("accepted; the whole thinking is returned")
    block_binding: dict[str, Any] | None = option("accepted; blocks have no signature")


class OutputFormat(RequestModel):
    """The format of the text of an answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema", description="schema of the text")


class OutputConfig(RequestModel):
    """Requirements on an answer."""

    effort: str | None = option(
        "variable `reasoning_effort` of the chat template; ignored with a warning if it has none"
    )
    format: OutputFormat | None = option("required format of the text")
    task_budget: dict[str, Any] | None = option(NOT_SHOWN)


class ContextManagement(RequestModel):
    """Edits of a long conversation. None is applied, which the answer reports."""

    edits: Annotated[list[dict[str, Any]], at_most(_MAX_EDITS)] | None = option(
        "accepted; the model reads all messages"
    )


class CountTokensRequest(RequestModel):
    """A request of `/v1/messages/count_tokens`."""

    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "left out: the service calls no other services",
        "billing_policy": _NOT_BILLED,
        "compaction": "left out: the service compacts no conversation",
        "thread": "left out: the service stores no conversations",
    }
    api_names: ClassVar[Mapping[str, str]] = {
        "prompt length": "messages length",
        "tool_choice.function.name": "tool_choice.name",
        "tools.function.strict": "tools.strict",
        "response_format.json_schema": "output_config.format.schema",
        "structured_output.json_schema": "output_config.format.schema",
        "structured_output.grammar": "tools",
        "chat_template_kwargs.reasoning_effort": "output_config.effort",
        "chat_template_kwargs.enable_thinking": "thinking",
    }

    model: str | None = option("name of the model")
    messages: Annotated[list[MessageParam], at_most(MAX_CHAT_MESSAGES - 1, 1)]
    system: str | Annotated[list[TextBlock], at_most(MAX_PARTS)] | None = option("a system message")
    tools: Annotated[list[ToolParam], at_most(MAX_TOOLS)] | None = option("functions")
    tool_choice: ToolChoice | None = option("whether the model calls tools")
    thinking: Thinking | None = option("whether the model thinks first")
    output_config: OutputConfig | None = option("requirements on the answer")
    output_format: OutputFormat | None = option("older name of output_config.format")
    context_management: ContextManagement | None = option("edits of a long conversation")
    cache_control: CacheControl = option(CACHE_NOTE)
    speed: str | None = option("accepted; there is one speed")

    @property
    def text_format(self) -> OutputFormat | None:
        """The required format of the text."""
        given = self.output_config.format if self.output_config else None
        return given or self.output_format

    def sent_names(self) -> dict[str, str]:
        """Return the names of the tools' fields by those in the equivalent chat."""
        names: dict[str, str] = {}
        for index in range(len(self.tools or ())):
            names[f"tools[{index}].function"] = f"tools[{index}]"
            names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
        return names


class MessagesRequest(CountTokensRequest):
    """A request of `/v1/messages`."""

    refused: ClassVar[Mapping[str, str]] = {
        **CountTokensRequest.refused,
        "container": "left out: the service runs no code",
        "inference_geo": "left out: the service runs in one place",
        "diagnostics": "left out: the service stores no messages",
        "fallbacks": "left out: the service tries no other model",
        "fallback_credit_token": _NOT_BILLED,
    }
    api_names: ClassVar[Mapping[str, str]] = {
        **CountTokensRequest.api_names,
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
    }

    max_tokens: int = Field(description="most tokens of the answer")
    stop_sequences: Annotated[list[str], at_most(MAX_STOP_STRINGS)] | None = option(
        "strings that end the text"
    )
    stream: bool = option("streams the answer as server-sent events", False)
    temperature: float | None = number("divides the logits; 0 is greedy", 0, 100)
    top_p: float | None = number("keeps the most likely tokens with this probability", 0, 1)
    top_k: int | None = number("keeps this number of most likely tokens", 0)
    metadata: dict[str, Any] | None = option("accepted and ignored")
    service_tier: str | None = option("accepted; there is one tier")
    priority: int = option("lower is scheduled first", 0)
    speculation: Speculation | None = option("speculation options of this request")
