"""Resolves tools and tool_choice of a request: tools for the prompt, a grammar, and a parser."""

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
    """The tools of a request and how their calls are written.

    tools: in the prompt. callable: those that the model may call. structure: grammar of the text,
    None for any text. shows_special_tokens: whether the marks of calls are special tokens, which
    the text needs.
    """

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    form: ToolFormat
    structure: StructuredOutput | None
    shows_special_tokens: bool

    def parser(self) -> ToolCallParser:
        """Make the parser of one answer."""
        return ToolCallParser(self.form, [each.name for each in self.callable])


def tool_use(
    request: ChatRequest, form: ToolFormat, is_special: Callable[[str], bool]
) -> ToolUse | None:
    """Resolve the tools of a request; return None without any. Raise InvalidValueError.

    form: the model's format of calls. is_special: whether a text is a special token.
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
    """Return a grammar only if the request needs it: strict tools, or no parallel calls."""
    if all(not each.is_strict for each in tools) and is_parallel:
        return None
    if hides_marks:  # a grammar cannot contain special tokens
        reason = (
            "for this model, whose call marks are special tokens, unless tool_choice forces calls"
        )
        if not is_parallel:
            raise InvalidValueError("parallel_tool_calls", False, f"true {reason}")
        raise InvalidValueError("tools.function.strict", True, f"false {reason}")
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
            raise InvalidValueError(name, function.name, "unique among the tools")
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
