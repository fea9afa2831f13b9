"""Converts the messages of a request to the input of a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cluster.api.openai.chat_schema import Message, ToolCall
from cluster.api.openai.tool_format import Tool, ToolFormat, tool_prompt
from cluster.replica.limits import MAX_TEXT_CHARS
from specdec.text.chat_template import decoded_arguments
from specdec.types.errors import InvalidValueError
from specdec.types.validation import require_count

Turn = dict[str, Any]
"""A message in the format of chat templates."""


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
        turn["tool_calls"] = [_call(each) for each in message.tool_calls]
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if role == "tool":
        turn["tool_call_id"] = message.tool_call_id or ""
    return turn


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = decoded_arguments(call.function.arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


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
