"""Converts requests of `/v1/responses` to chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from cluster.api.base.openai_errors import invalid_value
from cluster.api.openai.responses.tools import (
    as_function,
    chat_tool_choice,
    custom_arguments,
)
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.api.openai.schemas.response_items import (
    CallOutput,
    CustomToolCall,
    FunctionCall,
    InputItem,
    InputMessage,
    InputPart,
    MediaPart,
    PlacedTool,
    ReasoningItem,
    RefusalPart,
    function_name,
)
from cluster.api.openai.schemas.responses_schema import ResponsesRequest
from specdec.types.errors import InvalidValueError

OMITTED_MEDIA = "[omitted: the model reads text only]"
"""Text that the model reads in place of an image or a file in the result of a call."""

_OTHER_FIELDS = frozenset({"tools", "tool_choice", "service_tier"})
"""Fields with the names of a chat's and other values."""


def as_chat(request: ResponsesRequest, tools: Sequence[PlacedTool]) -> ChatRequest:
    """Return the equivalent chat. Raise InvalidValueError."""
    shared = request.fields_of(ChatRequest)
    fields: dict[str, Any] = {
        **{name: value for name, value in shared.items() if name not in _OTHER_FIELDS},
        "messages": list(_messages(request)),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.has_logprobs,
        "response_format": _response_format(request),
        "tools": [as_function(each) for each in tools] or None,
        "tool_choice": chat_tool_choice(request, tools),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "verbosity": request.text.verbosity if request.text else None,
    }
    try:
        return ChatRequest(**fields)
    except ValidationError as error:
        raise invalid_value(error, fields) from error


def _messages(request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    if request.instructions is not None:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
    else:
        yield from _turns(request.input)


def _turns(items: Sequence[InputItem]) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of items: those of one answer are one message."""
    answer: dict[str, Any] = {}
    for item in items:
        part = _answer_part(item)
        if answer and (part is None or not _continues(answer, part)):
            yield _closed(answer)
            answer = {}
        if part is None:
            assert isinstance(item, InputMessage | CallOutput), "not a part of an answer"
            yield _other_turn(item)
        else:
            _extend(answer, part)
    if answer:
        yield _closed(answer)


def _answer_part(item: InputItem) -> dict[str, Any] | None:
    """Return the fields of an assistant message in an item, None if it is of no answer."""
    match item:
        case ReasoningItem():
            parts = item.content or item.summary or ()
            texts = [each.text for each in parts]
            return {"reasoning_content": "\n".join(texts)} if texts else {}
        case InputMessage(role="assistant"):
            return {"content": _text(item.content)}
        case FunctionCall():
            return {"tool_calls": [_call(item, item.arguments)]}
        case CustomToolCall():
            return {"tool_calls": [_call(item, custom_arguments(item.input))]}
    return None


def _continues(answer: dict[str, Any], part: dict[str, Any]) -> bool:
    """Return whether an item is of the same answer: reasoning, then text, then calls."""
    return not part or "tool_calls" in part or answer.keys().isdisjoint(("tool_calls", "content"))


def _extend(answer: dict[str, Any], part: dict[str, Any]) -> None:
    """Add an item to its answer: calls follow calls, and reasoning follows reasoning."""
    for name, value in part.items():
        known, separator = answer.get(name), "\n" if name == "reasoning_content" else []
        answer[name] = value if known is None else known + separator + value


def _closed(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **answer}


def _call(item: FunctionCall | CustomToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": function_name(item.namespace, item.name), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _other_turn(item: InputMessage | CallOutput) -> dict[str, Any]:
    if isinstance(item, InputMessage):
        return {"role": item.role, "content": _text(item.content), "name": item.name}
    return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}


def _text(content: str | Sequence[InputPart | RefusalPart | MediaPart]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_part_text, content))


def _part_text(part: InputPart | RefusalPart | MediaPart) -> str:
    match part:
        case InputPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case MediaPart():
            return OMITTED_MEDIA


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text else None
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    if form.json_schema is None:
        raise InvalidValueError("text.format.schema", None, "given with type json_schema")
    schema = {"name": form.name or "schema", "schema": form.json_schema}
    return {"type": "json_schema", "json_schema": schema}
