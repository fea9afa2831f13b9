"""Items of `/v1/responses`: messages, reasoning, calls and their results, and the tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from cluster.api.base.openai_schema import (
    RequestModel,
    ResponseModel,
    at_most,
    option,
    same_as,
    text_type,
)
from cluster.api.openai.logprobs import TokenLogprob
from cluster.api.openai.schemas.chat_schema import (
    CACHE_NOTE,
    MAX_PARTS,
    MAX_TOOLS,
    NOT_SHOWN,
    CacheControl,
    FunctionDefinition,
)
from cluster.replica.limits import MAX_TOKEN_IDS

HOSTED_TOOLS = ("web_search", "tool_search", "local_shell", "image_generation")
"""Tools of OpenAI's servers that coding agents offer with every request: beginnings of types."""
_FUNCTION_TYPES = ("function", "custom", "namespace")
_ITEM_TYPES = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)
_TEXT_ONLY = "the served model reads text only"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("input_image", "input_file", "input_audio"), _TEXT_ONLY),
    "item_reference": "nothing is stored; clients send the items themselves if store is false",
}
"""Reasons why items of other types are refused, beside that the service has no such tools."""
_NOT_ASYNC = "left out: an answer ends with its calls"


class InputPart(RequestModel):
    """A part of a message's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(NOT_SHOWN)
    logprobs: Annotated[list[Any], at_most(MAX_TOKEN_IDS)] | None = option(NOT_SHOWN)
    parsed: Any = option(NOT_SHOWN)
    prompt_cache_breakpoint: CacheControl = option(CACHE_NOTE)


class MessagePart(InputPart):
    """A part of a message; one that is no text is refused with the reason."""

    type: Annotated[
        Literal["input_text", "output_text", "text"],
        text_type("input_text", "output_text", "text", "refusal"),
    ]


class RefusalPart(RequestModel):
    """The text with which an earlier answer of another model refuses."""

    type: Literal["refusal"]
    refusal: str


def _part_type(part: Any) -> str:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return "refusal_part" if is_refusal else "text_part"


_MessagePart = Annotated[
    Annotated[MessagePart, Tag("text_part")] | Annotated[RefusalPart, Tag("refusal_part")],
    Discriminator(_part_type),
]


class InputMessage(RequestModel):
    """One message of the chat. An earlier answer is accepted unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_MessagePart], at_most(MAX_PARTS)]
    name: str | None = option("passed to the chat template")
    id: str | None = option(NOT_SHOWN)
    status: str | None = option(NOT_SHOWN)
    phase: str | None = option(NOT_SHOWN)


class ReasoningPart(RequestModel):
    """A part of the reasoning of an earlier answer, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(RequestModel):
    """The reasoning of an earlier answer, which is passed to the chat template."""

    type: Literal["reasoning"]
    id: str | None = option(NOT_SHOWN)
    content: Annotated[list[ReasoningPart], at_most(MAX_PARTS)] | None = option("the text")
    summary: Annotated[list[ReasoningPart], at_most(MAX_PARTS)] | None = option(
        "read if there is no content"
    )
    encrypted_content: str | None = option("accepted; only its own service can read it")
    status: str | None = option(NOT_SHOWN)


class CallFields(RequestModel):
    """Common fields of the calls of an earlier answer."""

    refused: ClassVar[Mapping[str, str]] = {"async": _NOT_ASYNC}

    call_id: str
    name: str
    namespace: str | None = option("the namespace of the tool")
    id: str | None = option(NOT_SHOWN)
    status: str | None = option(NOT_SHOWN)
    caller: dict[str, Any] | None = option(NOT_SHOWN)


class FunctionCall(CallFields):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: str = Field(description="JSON text of the earlier answer")
    parsed_arguments: Any = option(NOT_SHOWN)


class CustomToolCall(CallFields):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str = Field(description="the text of the earlier answer")


class MediaPart(RequestModel):
    """An image or a file in the result of a call, in place of which the model reads a note."""

    type: Literal["input_image", "input_file"]
    image_url: str | None = option(NOT_SHOWN)
    detail: str | None = option(NOT_SHOWN)
    file_data: str | None = option(NOT_SHOWN)
    file_id: str | None = option(NOT_SHOWN)
    file_url: str | None = option(NOT_SHOWN)
    filename: str | None = option(NOT_SHOWN)


_ResultPart = Annotated[InputPart | MediaPart, Field(discriminator="type")]


class CallOutput(RequestModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Annotated[list[_ResultPart], at_most(MAX_PARTS)]
    id: str | None = option(NOT_SHOWN)
    name: str | None = option(NOT_SHOWN)
    namespace: str | None = option(NOT_SHOWN)
    status: str | None = option(NOT_SHOWN)
    caller: dict[str, Any] | None = option(NOT_SHOWN)


def _item_type(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return str(kind).replace("custom_tool_call_output", "function_call_output")


def _require_known_item(item: Any) -> Any:
    """Refuse other items than these, such as those of hosted tools, with the known types."""
    if isinstance(item, dict) and item.get("type", "message") not in _ITEM_TYPES:
        reason = _REASONS.get(str(item["type"]))
        known = f"Input should be an item of type {', '.join(_ITEM_TYPES)}"
        raise PydanticCustomError("item_type", known if reason is None else f"{known}: {reason}")
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")],
    Discriminator(_item_type),
    BeforeValidator(_require_known_item),
]
"""An item of the input; one without a type is a message."""


class ToolFields(RequestModel):
    """Common fields of functions and custom tools."""

    refused: ClassVar[Mapping[str, str]] = {"async": _NOT_ASYNC}

    name: str = same_as(FunctionDefinition, "name")
    description: str | None = option("shown to the model")
    defer_loading: bool = option("accepted; every tool is offered from the start", False)
    allowed_callers: list[str] | None = option("accepted; the model calls a tool directly")


class FunctionTool(ToolFields):
    """A function that the model may call."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = option("JSON schema of the arguments, an object")
    strict: bool | None = option("enforces the schema also with tool_choice `auto`")
    output_schema: dict[str, Any] | None = option(NOT_SHOWN)


class CustomFormat(RequestModel):
    """The format of the text of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = option("of the grammar")
    definition: str | None = option("the grammar, shown to the model and not enforced")


class CustomTool(ToolFields):
    """A tool whose input is a text; the model calls a function with the argument `input`."""

    type: Literal["custom"]
    format: CustomFormat | None = option("default: any text")


_Callable = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(RequestModel):
    """A group of tools. The model reads their names as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: str = same_as(FunctionDefinition, "name")
    description: str | None = option(NOT_SHOWN)
    tools: Annotated[list[_Callable], at_most(MAX_TOOLS)]


class HostedTool(RequestModel):
    """A tool that OpenAI's servers run. It is not offered to the model."""

    model_config = ConfigDict(extra="ignore")

    type: str


def _tool_type(tool: Any) -> str:
    """Return the type of a tool, `hosted` for those of OpenAI's servers; some end in a date."""
    kind = str(tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", ""))
    return "hosted" if kind.startswith(HOSTED_TOOLS) else kind


def _require_known_tool(tool: Any) -> Any:
    """Refuse tools of other types, such as those that read stored files, with the known types."""
    if _tool_type(tool) not in ("hosted", *_FUNCTION_TYPES):
        message = f"Input should be a tool of type {', '.join(_FUNCTION_TYPES)}"
        raise PydanticCustomError("tool_type", message)
    return tool


Tool = FunctionTool | CustomTool | NamespaceTool | HostedTool
ToolParam = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_type),
    BeforeValidator(_require_known_tool),
]


@dataclass(frozen=True)
class PlacedTool:
    """A tool of a request. namespace: None outside of one. field: its place in the request."""

    tool: FunctionTool | CustomTool
    namespace: str | None
    field: str

    @property
    def function_name(self) -> str:
        """The name that the model reads and writes."""
        return function_name(self.namespace, self.tool.name)


def function_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in a chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def placed_tools(tools: Iterable[Tool]) -> Iterator[PlacedTool]:
    """Yield the tools that the model can call: no hosted ones."""
    for index, each in enumerate(tools):
        field = f"tools[{index}]"
        match each:
            case NamespaceTool():
                for place, tool in enumerate(each.tools):
                    yield PlacedTool(tool, each.name, f"{field}.tools[{place}]")
            case FunctionTool() | CustomTool():
                yield PlacedTool(each, None, field)


class NamedToolChoice(RequestModel):
    """The tool that the model must call."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = option("the namespace of the tool")


class AllowedTools(RequestModel):
    """The tools that the model may call; the others are not offered."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], at_most(MAX_TOOLS, 1)]


class OutputText(ResponseModel):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(ResponseModel):
    """The message of the assistant."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(ResponseModel):
    """The text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(ResponseModel):
    """The text of the reasoning where the request asks for a summary: nothing summarizes it."""

    type: Literal["summary_text"]
    text: str


class OutputReasoning(ResponseModel):
    """The reasoning before an answer, if the service has a parser of reasoning."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[SummaryText] = Field(description="empty unless `reasoning.summary` is given")
    content: list[ReasoningText]


class OutputFunctionCall(ResponseModel):
    """A call of a function; the client returns a function_call_output with its call_id."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = Field(default=None, description="of a tool in a namespace")
    arguments: str = Field(description="JSON")
    status: ItemStatus


class OutputCustomCall(ResponseModel):
    """A call of a custom tool; the client returns a custom_tool_call_output with its call_id."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = Field(default=None, description="of a tool in a namespace")
    input: str
    status: ItemStatus


OutputItem = OutputReasoning | OutputMessage | OutputFunctionCall | OutputCustomCall
