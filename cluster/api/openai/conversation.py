"""Converts messages and tools of a chat: input of the template, a grammar and a parser of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.api.openai.parsers.pieces import AnswerParser, CallStart
from cluster.api.openai.parsers.tool_families import new_call_id, tool_parser
from cluster.api.openai.parsers.tool_format import (
    BARE,
    HERMES,
    TOOL_FORMATS,
    Tool,
    ToolFormat,
    calls_or_answer,
    forced_calls,
    format_of_template,
    optional_calls,
    tool_prompt,
)
from cluster.api.openai.parsers.unique_calls import UniqueCalls
from cluster.api.openai.request_warnings import RequestWarning
from cluster.api.openai.schemas.chat_schema import (
    TEMPLATE_FIELDS,
    AllowedTools,
    ChatRequest,
    Message,
    NamedTool,
    ToolCall,
)
from cluster.config.serve_config import ServeConfig
from cluster.replica.limits import MAX_TEXT_CHARS
from specdec.text.chat_rewrites import with_one_system, with_single_calls
from specdec.text.chat_template import ChatTemplate, decoded_arguments
from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.validation import require_count

_OBJECT_TYPES = ("object", ["object"], ["object", "null"], ["null", "object"])
"""Types of a schema of arguments, which are an object in any case."""

Turn = dict[str, Any]
"""A message in the format of chat templates."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how their calls are written.

    tools: in the prompt. callable: those that the model may call. form: of the calls in the text.
    structure: grammar of the text, None for any text. is_forced: whether the text is calls alone.
    is_parallel: whether there may be several. shows_special_tokens: whether the marks of calls are
    special tokens, which the text needs. model_form: the model's own format, in which ids are.
    num_earlier_calls: those in the messages of the chat.
    """

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    form: ToolFormat
    structure: StructuredOutput | None
    is_forced: bool
    is_parallel: bool
    shows_special_tokens: bool
    model_form: ToolFormat
    num_earlier_calls: int = 0

    def identified(self, start: CallStart) -> CallStart:
        """Return the start of a call with an id, a new one if the model wrote none."""
        place = self.num_earlier_calls + start.index
        call_id = start.call_id or new_call_id(self.model_form, start.name, place)
        return replace(start, call_id=call_id)

    def parser(self) -> AnswerParser:
        """Make the parser of one answer."""
        return self.unique_parser() if self.ends_at_repeat else self._parser()

    def unique_parser(self) -> UniqueCalls:
        """Make the parser of one answer, which ends at a call that repeats another."""
        return UniqueCalls(self._parser())

    @property
    def ends_at_repeat(self) -> bool:
        """Return whether the answer is several calls, of which none is repeated."""
        return self.is_forced and self.is_parallel

    @property
    def warnings(self) -> list[RequestWarning]:
        """The warnings of calls that no grammar constrains: strict ones, or in any format."""
        found = []
        if self.structure is None and any(each.is_strict for each in self.tools):
            text = (
                "not enforced: no grammar can contain this model's calls, in the format "
                f"{self.form.name}, unless tool_choice requires calls"
            )
            found.append(RequestWarning("tools.function.strict", text))
        if self.form.is_assumed:
            text = (
                "calls may stay in the content: the chat template has no known format of calls, "
                f"so {self.form.name} is assumed; --tool-call-parser selects another"
            )
            found.append(RequestWarning("tools", text))
        return found

    def _parser(self) -> AnswerParser:
        is_constrained = self.structure is not None
        return tool_parser(self.form, self.callable, is_constrained=is_constrained)


def tool_use(
    request: ChatRequest, form: ToolFormat, is_special: Callable[[str], bool]
) -> ToolUse | None:
    """Resolve the tools of a request; return None without any. Raise InvalidValueError.

    form: the model's format of calls. is_special: whether a text is a special token.
    """
    tools = _tools(request)
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    if isinstance(choice, AllowedTools):
        tools, choice = _allowed(choice, tools), choice.allowed_tools.mode
    if not tools or choice == "none":
        _require_no_call(choice)
        return None
    hides_marks = bool(form.opening) and is_special(form.opening)
    chosen, is_parallel = tools, request.parallel_tool_calls
    if isinstance(choice, NamedTool):
        chosen, is_parallel = (_named(choice, tools, "tool_choice"),), False
    schema = _answer_schema(request) if choice == "auto" else None
    is_forced = choice != "auto"
    is_free = not is_forced and schema is None
    enforced = replace(form, is_assumed=False) if form.is_json and not hides_marks else BARE
    written = form if is_free else enforced
    if is_free:
        structure = _optional(tools, form, is_parallel, hides_marks)
    elif schema is not None:
        structure = calls_or_answer(tools, written, schema, is_parallel=is_parallel)
    else:
        structure = forced_calls(chosen, written, is_parallel=is_parallel)
    return ToolUse(
        tools=tools,
        callable=chosen,
        form=written,
        structure=structure,
        is_forced=is_forced,
        is_parallel=is_parallel,
        shows_special_tokens=is_free and (hides_marks or is_special(form.optional_mark)),
        model_form=form,
        num_earlier_calls=sum(len(each.tool_calls or ()) for each in request.messages),
    )


def _answer_schema(request: ChatRequest) -> Mapping[str, Any] | None:
    """Return the schema of an answer that is no call, None if it may be any text."""
    form = request.response_format
    if form is None or form.type == "text":
        return None
    schema = form.required_schema
    return {"type": "object"} if schema is None else schema


def _optional(
    tools: tuple[Tool, ...], form: ToolFormat, is_parallel: bool, hides_marks: bool
) -> StructuredOutput | None:
    """Return a grammar only if the request needs it: strict tools, or no parallel calls.

    Where a grammar cannot contain the calls, such as with marks that are special tokens,
    `ToolUse.is_parallel` ends them after one, and `ToolUse.warnings` reports strict tools.
    """
    is_needed = not is_parallel or any(each.is_strict for each in tools)
    if hides_marks or not (is_needed and form.is_json):
        return None
    return optional_calls(tools, form, is_parallel=is_parallel)


def _require_no_call(choice: str | NamedTool) -> None:
    """Raise InvalidValueError for a choice that needs tools."""
    if choice not in ("auto", "none"):
        sent = choice.model_dump() if isinstance(choice, NamedTool) else choice
        raise InvalidValueError("tool_choice", sent, "none or auto without tools")


def _tools(request: ChatRequest) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for index, each in enumerate(request.tools or ()):
        function = each.function
        parameters = function.parameters or {"type": "object"}
        if parameters.get("type", "object") not in _OBJECT_TYPES:
            name = f"tools[{index}].function.parameters.type"
            raise InvalidValueError(name, parameters["type"], "object")
        if any(function.name == other.name for other in tools):
            name = f"tools[{index}].function.name"
            raise InvalidValueError(name, function.name, "unique among the tools")
        description = function.description or ""
        tools.append(Tool(function.name, description, parameters, function.strict))
    return tuple(tools)


def _allowed(choice: AllowedTools, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Return the allowed tools, in the order of the request. Raise InvalidValueError."""
    field, names = "tool_choice.allowed_tools.tools", choice.allowed_tools.tools
    allowed = {_named(each, tools, f"{field}[{i}]").name for i, each in enumerate(names)}
    return tuple(each for each in tools if each.name in allowed)


def _named(choice: NamedTool, tools: tuple[Tool, ...], field: str) -> Tool:
    name, by_name = choice.function.name, {each.name: each for each in tools}
    if name not in by_name:
        limit = f"one of the tools: {', '.join(by_name) or 'none'}"
        raise InvalidValueError(f"{field}.function.name", name, limit)
    return by_name[name]


def configured_tool_format(config: ServeConfig, template: ChatTemplate) -> ToolFormat:
    """Return the configured format of tool calls; `auto` derives it from the chat template.

    A template without tools describes them as text, for which calls are JSON objects. Where one
    with tools has no known format, that of Hermes is assumed.
    """
    parser = config.tool_call_parser
    form = format_of_template(template.text) if parser == "auto" else TOOL_FORMATS[parser]
    if not template.takes_tools:
        return form if form is not None and form.is_json else HERMES
    return form or replace(HERMES, is_assumed=True)


def make_conversation(
    request: ChatRequest, tools: ToolUse | None, template: ChatTemplate, form: ToolFormat
) -> Conversation:
    """Build the input of the chat template; without tool support, tools become text."""
    messages = turns(request.messages)
    if _has_later_systems(messages) and not template.takes_later_systems:
        messages = with_one_system(messages)
    if _has_several_calls(messages) and template.omits_calls:
        messages = with_single_calls(messages)
    offered = tools.tools if tools else ()
    has_tool_texts = bool(offered) and not template.takes_tools
    if not template.takes_tools:
        messages, offered = render_tools_as_text(messages, offered, form), ()
    options = dict(request.chat_template_kwargs or {})
    given = {name: getattr(request, name) for name in TEMPLATE_FIELDS}
    options |= {name: value for name, value in given.items() if value is not None}
    add_prompt = request.add_generation_prompt
    if add_prompt is None:
        add_prompt = not request.continue_final_message
    return Conversation(
        messages=tuple(messages),
        tools=tuple(each.template_definition for each in offered),
        add_generation_prompt=add_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=options,
        trusts_system=not has_tool_texts,
    )


def turns(messages: Sequence[Message], field: str = "messages") -> list[Turn]:
    """Convert messages for a template with tool support. Raise InvalidValueError."""
    converted = [_turn(message, f"{field}[{index}]") for index, message in enumerate(messages)]
    num_chars = sum(len(each["content"]) for each in converted)
    require_count(f"{field} content", num_chars, 0, MAX_TEXT_CHARS, "characters in all")
    return converted


def _turn(message: Message, where: str) -> Turn:
    role = "system" if message.role == "developer" else message.role
    turn: Turn = {"role": role, "content": _text(message, where)}
    if message.tool_calls:
        if role != "assistant":
            limit = "left out unless role is assistant"
            raise InvalidValueError(f"{where}.tool_calls", "given", limit)
        turn["tool_calls"] = [_called(each) for each in message.tool_calls]
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    if reasoning is not None:  # templates read either name
        turn["reasoning_content"] = turn["reasoning"] = reasoning
    if message.name is not None:
        turn["name"] = message.name
    if role == "tool":
        turn["tool_call_id"] = message.tool_call_id or ""
    return turn


def _called(call: ToolCall) -> dict[str, Any]:
    """Return a call with the fields that chat templates read."""
    function = call.function
    called = {"name": function.name, "arguments": decoded_arguments(function.arguments)}
    return {"id": call.id, "type": call.type, "function": called}


def _text(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":  # a message with tool calls needs no content
            return ""
        raise InvalidValueError(f"{where}.content", None, "given")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = getattr(part, part.type)
        if text is None:
            raise InvalidValueError(f"{where}.content[{index}].{part.type}", None, "given")
        texts.append(text)
    return "\n".join(texts)


def _has_later_systems(messages: Sequence[Turn]) -> bool:
    return any(each["role"] == "system" for each in messages[1:])


def _has_several_calls(messages: Sequence[Turn]) -> bool:
    return any(len(each.get("tool_calls", ())) > 1 for each in messages)


def render_tools_as_text(
    messages: Sequence[Turn], tools: Sequence[Tool], form: ToolFormat
) -> list[Turn]:
    """Convert messages for a template without tool support.

    A system message describes the tools, calls become the text that the model would have written,
    and results become user messages.
    """
    rewritten = list(_merged_results(_as_text(each, form) for each in messages))
    if not tools:
        return rewritten
    prompt = tool_prompt(tools, form)
    if rewritten and rewritten[0]["role"] == "system":
        first = rewritten[0]
        return [{**first, "content": f"{first['content']}\n\n{prompt}"}, *rewritten[1:]]
    return [{"role": "system", "content": prompt}, *rewritten]


def _as_text(turn: Turn, form: ToolFormat) -> Turn:
    if turn["role"] == "tool":
        content = f"<tool_response>\n{turn['content']}\n</tool_response>"
        return {"role": "user", "content": content, "is_result": True}
    calls = [each["function"] for each in turn.get("tool_calls", ())]
    if not calls:
        return turn
    written = form.separator.join(form.write(each["name"], each["arguments"]) for each in calls)
    content = f"{turn['content']}\n{written}" if turn["content"] else written
    return {"role": "assistant", "content": content}


def _merged_results(turns: Iterator[Turn]) -> Iterator[Turn]:
    """Merge consecutive results into one message: templates require alternating roles."""
    pending: Turn | None = None
    for turn in turns:
        is_result = turn.pop("is_result", False)
        if pending is not None and is_result:
            pending["content"] += f"\n{turn['content']}"
            continue
        if pending is not None:
            yield pending
        pending = turn if is_result else None
        if not is_result:
            yield turn
    if pending is not None:
        yield pending
