"""Converts requests of the Messages API to chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from cluster.api.anthropic.schema import (
    CountTokensRequest,
    MediaBlock,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolParam,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from cluster.api.base.openai_errors import invalid_value
from cluster.api.openai.responses.input import OMITTED_MEDIA
from cluster.api.openai.schemas.chat_schema import MAX_TOOLS, ChatRequest
from cluster.replica.limits import MAX_CHAT_MESSAGES
from specdec.text.chat_template import ChatTemplate
from specdec.types.errors import InvalidValueError
from specdec.types.validation import require_count

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING_MARK = "x-anthropic-billing-header:"
"""Beginning of a system text of Claude Code that is not for the model. It differs between sessions,
whose prompts would share no prefix."""
_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of chat templates by which a model thinks on request. A template without any gets the
first one, which is ignored with a warning."""


def to_chat(
    request: CountTokensRequest, template: ChatTemplate, *, has_parser: bool = False
) -> ChatRequest:
    """Return the equivalent chat. Raise InvalidValueError.

    has_parser: whether the service separates reasoning by marks, so that a budget can end it.
    """
    messages = list(_messages(request))
    while messages and _is_empty_answer(messages[-1]):
        messages.pop()
    require_count("messages", len(messages), 1, MAX_CHAT_MESSAGES, "with the results of calls")
    fields: dict[str, Any] = {
        "messages": messages,
        "model": request.model,
        "continue_final_message": _is_prefill(messages[-1]),
    }
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    fields |= _tool_choice(request) | _thinking(request, template, has_parser=has_parser)
    fields |= _output(request)
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "priority": request.priority,
            "speculation": request.speculation,
            **{name: getattr(request, name) for name in ("temperature", "top_p", "top_k")},
        }
    try:
        return ChatRequest(**fields)
    except ValidationError as error:
        raise invalid_value(error, fields) from error


def _tool(tool: ToolParam) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    content = [value for name, value in message.items() if name != "role"]
    return message["role"] == "assistant" and not any(content)


def _is_prefill(message: Mapping[str, Any]) -> bool:
    """Return whether a last message is the beginning of the answer, which continues it."""
    is_text = bool(message["content"]) and "tool_calls" not in message
    return message["role"] == "assistant" and is_text


def _tool_choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    given: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type != "tool":
        return {**given, "tool_choice": _CHOICES[choice.type]}
    if choice.name is None:
        raise InvalidValueError("tool_choice.name", None, "given with type tool")
    named = {"type": "function", "function": {"name": choice.name}}
    return {**given, "tool_choice": named}


def _thinking(
    request: CountTokensRequest, template: ChatTemplate, *, has_parser: bool
) -> dict[str, Any]:
    if request.thinking is None:
        return {}
    known = template.options(has_tools=bool(request.tools))
    is_on = request.thinking.type != "disabled"
    variables = [each for each in _THINKING_VARIABLES if each in known] or _THINKING_VARIABLES[:1]
    given: dict[str, Any] = {"chat_template_kwargs": dict.fromkeys(variables, is_on)}
    budget = request.thinking.budget_tokens
    if has_parser and is_on and budget is not None:
        given["thinking_token_budget"] = budget
    return given


def _output(request: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of `output_config`."""
    effort = request.output_config.effort if request.output_config else None
    fields: dict[str, Any] = {"reasoning_effort": effort}
    if form := request.text_format:
        schema = {"name": "answer", "schema": form.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    system = request.system
    if isinstance(system, list):
        system = _text([each for each in system if not each.text.startswith(_BILLING_MARK)])
    if system:
        yield {"role": "system", "content": system}
    for index, message in enumerate(request.messages):
        yield from _turns(message, f"messages[{index}].content")


def _turns(message: MessageParam, field: str) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of a message: results of calls have their own, before its text.

    field: name of its content, for errors.
    """
    blocks = message.content
    if isinstance(blocks, str):
        yield {"role": message.role, "content": blocks}
        return
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = "" if block.content is None else _text(block.content)
            content = f"Error: {text}" if block.is_error else text
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    turn: dict[str, Any] = {"role": message.role, "content": _joined(texts)}
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        require_count(field, len(calls), 0, MAX_TOOLS, "tool_use blocks")
        turn["tool_calls"] = calls
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning_content"] = _joined(thoughts)
    if texts or len(turn) > 2:
        yield turn


def _joined(texts: Iterable[str]) -> str:
    """Join the texts of blocks; an empty one adds nothing."""
    return "\n".join(filter(None, texts))


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _text(content: str | Sequence[TextBlock | ToolReferenceBlock | MediaBlock]) -> str:
    return content if isinstance(content, str) else _joined(map(_block_text, content))


def _block_text(block: TextBlock | ToolReferenceBlock | MediaBlock) -> str:
    match block:
        case TextBlock():
            return block.text
        case ToolReferenceBlock():
            return block.tool_name
        case MediaBlock():
            return OMITTED_MEDIA
