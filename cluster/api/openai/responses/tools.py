"""Tools of `/v1/responses` as functions of a chat, and calls of these as output items."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api.openai.schemas.response_items import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    NamedToolChoice,
    PlacedTool,
    function_name,
    placed_tools,
)
from cluster.api.openai.schemas.responses_schema import ResponsesRequest
from specdec.text.chat_template import decoded_arguments
from specdec.types.errors import InvalidValueError

_TEXT_ARGUMENT = "input"
"""The argument of a custom tool, whose input is a text."""
_TEXT_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {_TEXT_ARGUMENT: {"type": "string"}},
    "required": [_TEXT_ARGUMENT],
    "additionalProperties": False,
}


def as_function(placed: PlacedTool) -> dict[str, Any]:
    """Return the definition of a tool in a chat."""
    tool = placed.tool
    function: dict[str, Any] = {"name": placed.function_name, "description": tool.description}
    if isinstance(tool, FunctionTool):
        function |= {"parameters": tool.parameters, "strict": tool.strict}
    else:
        function |= {"parameters": _TEXT_ARGUMENTS, "description": _described(tool)}
    return {"type": "function", "function": function}


def custom_arguments(text: str) -> str:
    """Return the arguments of a call of a custom tool with this input, as JSON."""
    return json.dumps({_TEXT_ARGUMENT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool in the arguments of a call; cut arguments unchanged."""
    given = decoded_arguments(arguments)
    text = given.get(_TEXT_ARGUMENT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def offered_tools(request: ResponsesRequest) -> tuple[PlacedTool, ...]:
    """Return the tools that the model reads: no hosted ones, and only those that are allowed."""
    tools = tuple(placed_tools(request.tools or ()))
    choice = request.tool_choice
    if not isinstance(choice, AllowedTools):
        return tools
    allowed = [
        _named(each, tools, f"tool_choice.tools[{i}]") for i, each in enumerate(choice.tools)
    ]
    return tuple(each for each in tools if each in allowed)


def chat_tool_choice(request: ResponsesRequest, tools: Sequence[PlacedTool]) -> Any:
    """Return the tool_choice of the chat. Raise InvalidValueError for an unknown name."""
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.mode
    if not isinstance(choice, NamedToolChoice):
        return choice
    name = _named(choice, tools, "tool_choice").function_name
    return {"type": "function", "function": {"name": name}}


def _named(choice: NamedToolChoice, tools: Sequence[PlacedTool], field: str) -> PlacedTool:
    name = function_name(choice.namespace, choice.name)
    by_name = {each.function_name: each for each in tools}
    if name not in by_name:
        limit = f"one of the tools: {', '.join(by_name) or 'none'}"
        raise InvalidValueError(f"{field}.name", name, limit)
    return by_name[name]


def _described(tool: CustomTool) -> str:
    """Return the description of a custom tool with the grammar of its input."""
    text, form = tool.description or "", tool.format
    if form is None or form.definition is None:
        return text
    grammar = f"The input follows this grammar ({form.syntax or 'lark'}):\n{form.definition}"
    return f"{text}\n{grammar}" if text else grammar
