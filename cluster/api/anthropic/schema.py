"""Requests of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cluster.api.base.openai_schema import RequestModel, at_most, number, option
from cluster.api.openai.schemas.chat_schema import MAX_PARTS, MAX_TOOLS
from cluster.api.openai.schemas.sampling_fields import Speculation
from cluster.replica.limits import MAX_CHAT_MESSAGES
from specdec.types.sampling.sampling_params import MAX_STOP_STRINGS

_BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking")


class TextBlock(RequestModel):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = option("accepted; prefix caching needs no marks")
    citations: list[Any] | None = option("accepted; not shown to the model")


class ToolUseBlock(RequestModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = option("accepted; prefix caching needs no marks")


class ToolResultBlock(RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], at_most(MAX_PARTS)] | None = option("the result")
    is_error: bool = option("whether the call failed, which is written before the result", False)
    cache_control: dict[str, Any] | None = option("accepted; prefix caching needs no marks")


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer, which is passed to the chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = option("accepted and ignored")


def _require_known(block: Any) -> Any:
    """Refuse other blocks than these, such as images, with the reason."""
    if isinstance(block, dict) and block.get("type") not in _BLOCK_TYPES:
        known = ", ".join(_BLOCK_TYPES)
        message = f"Input should be a block of type {known}: the models read text only"
        raise PydanticCustomError("block_type", message)
    return block


_Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    Field(discriminator="type"),
    BeforeValidator(_require_known),
]


class MessageParam(RequestModel):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[_Block], at_most(MAX_PARTS)]


class ToolParam(RequestModel):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = option("shown to the model")
    input_schema: dict[str, Any] = Field(description="JSON schema of the arguments, an object")
    cache_control: dict[str, Any] | None = option("accepted; prefix caching needs no marks")


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


class CountTokensRequest(RequestModel):
    """A request of `/v1/messages/count_tokens`."""

    model: str | None = option("name of the model")
    messages: Annotated[list[MessageParam], at_most(MAX_CHAT_MESSAGES - 1, 1)]
    system: str | Annotated[list[TextBlock], at_most(MAX_PARTS)] | None = option("a system message")
    tools: Annotated[list[ToolParam], at_most(MAX_TOOLS)] | None = option("functions")
    tool_choice: ToolChoice | None = option("whether the model calls tools")
    thinking: Thinking | None = option("whether the model thinks first")


class MessagesRequest(CountTokensRequest):
    """A request of `/v1/messages`."""

    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "left out: the service calls no other services",
        "container": "left out: the service runs no code",
        "context_management": "left out: send the messages that the model should read",
    }
    api_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "prompt length": "messages length",
        "tool_choice.function.name": "tool_choice.name",
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
