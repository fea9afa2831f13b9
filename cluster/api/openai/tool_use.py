"""What a request's tools and tool_choice come to: a prompt, perhaps a grammar, and a parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.api.openai.chat_schema import ChatRequest, NamedTool
from cluster.api.openai.tool_format import Tool, ToolFormat, forced_calls, optional_calls
from cluster.api.openai.tool_parser import ToolCallParser
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import StructuredOutput


@dataclass(frozen=True)
class ToolUse:
    """How tools are told to the model, and read from what it says.

    tools: that the model is told of. callable: those among them that it may call. structure: what
    its text has to be, None for anything. shows_special_tokens: whether the marks of calls would
    be left out of the text otherwise.
    """

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    form: ToolFormat
    structure: StructuredOutput | None
    shows_special_tokens: bool

    def parser(self) -> ToolCallParser:
        """For one answer."""
        return ToolCallParser(self.form, [each.name for each in self.callable])


def tool_use(
    request: ChatRequest, form: ToolFormat, is_special: Callable[[str], bool]
) -> ToolUse | None:
    """None where the model is to know of no tools. Raises InvalidValueError.

    form: how the model writes calls. is_special: whether a text is a token that is no text.
    """
    tools = _tools(request)
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    if not tools and choice not in ("auto", "none"):
        raise InvalidValueError("tool_choice", request.tool_choice, "none or auto without tools")
    if not tools or choice == "none":
        return None
    hides_marks = bool(form.opening) and is_special(form.opening)
    chosen, is_parallel = tools, request.parallel_tool_calls
    if isinstance(choice, NamedTool):
        chosen, is_parallel = (_named(choice, tools),), False
    if choice == "auto":
        structure = _optional(tools, form, is_parallel, hides_marks)
    else:
        form = replace(form, opening="", closing="", separator="; ") if hides_marks else form
        structure = forced_calls(chosen, form, is_parallel=is_parallel)
        hides_marks = False
    return ToolUse(tools, chosen, form, structure, hides_marks)


def _optional(
    tools: tuple[Tool, ...], form: ToolFormat, is_parallel: bool, hides_marks: bool
) -> StructuredOutput | None:
    """The model is held to a grammar only where somebody asked for it."""
    if all(not each.is_strict for each in tools) and is_parallel:
        return None
    if hides_marks:  # a grammar describes text, and no special tokens
        why = "where the model marks calls with special tokens, unless tool_choice forces a call"
        if not is_parallel:
            raise InvalidValueError("parallel_tool_calls", False, f"true {why}")
        raise InvalidValueError("tools.function.strict", True, f"false {why}")
    return optional_calls(tools, form, is_parallel=is_parallel)


def _tools(request: ChatRequest) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for index, each in enumerate(request.tools or ()):
        function = each.function
        parameters = function.parameters or {"type": "object"}
        if parameters.get("type", "object") != "object":
            name = f"tools[{index}].function.parameters.type"
            raise InvalidValueError(name, parameters["type"], "object")
        if any(function.name == other.name for other in tools):
            name = f"tools[{index}].function.name"
            raise InvalidValueError(name, function.name, "another one for each tool")
        description = function.description or ""
        tools.append(Tool(function.name, description, parameters, bool(function.strict)))
    return tuple(tools)


def _named(choice: NamedTool, tools: tuple[Tool, ...]) -> Tool:
    for each in tools:
        if each.name == choice.function.name:
            return each
    known = ", ".join(each.name for each in tools)
    limit = f"one of the tools: {known}"
    raise InvalidValueError("tool_choice.function.name", choice.function.name, limit)
