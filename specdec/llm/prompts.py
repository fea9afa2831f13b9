"""Reads the prompts and conversations that `generate` and `chat` accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeGuard, cast

from specdec.config.fields import refuse_unknown
from specdec.text.chat_template import decoded_arguments
from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation
from specdec.types.validation import VALID_UNICODE, is_valid_unicode


class TextPrompt(TypedDict, total=False):
    """A text. cache_salt: KV and drafts are shared only among prompts with the same salt."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, used as they are. prompt: the text to return with them."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class PromptParts:
    """A normalized prompt. token_ids: None where the text must be encoded."""

    text: str | None
    token_ids: tuple[int, ...] | None = None
    cache_salt: str = ""


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PromptParts]:
    """Read one prompt or several. Raises InvalidValueError, naming the place."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [read_prompt("prompts", prompts)]
    if not _is_list(prompts):
        raise InvalidValueError("prompts", prompts, f"{_LIMIT}, or a list of these")
    return [read_prompt(f"prompts[{index}]", each) for index, each in enumerate(prompts)]


_LIMIT = 'a string, {"prompt": text}, {"prompt_token_ids": ids}, or token ids'


def read_prompt(field: str, prompt: object) -> PromptParts:
    """Read one prompt; `field` names it in errors."""
    if isinstance(prompt, str):
        return PromptParts(prompt)
    if _are_token_ids(prompt):
        return PromptParts(None, tuple(cast("Sequence[int]", prompt)))
    if not isinstance(prompt, Mapping):
        raise InvalidValueError(field, prompt, _LIMIT)
    refuse_unknown(f"key of {field}", prompt, ("prompt", "prompt_token_ids", "cache_salt"))
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    salt = _checked_salt(f"{field}.cache_salt", prompt.get("cache_salt", ""))
    is_text = isinstance(text, str) or (text is None and token_ids is not None)
    are_ids = token_ids is None or _are_token_ids(token_ids)
    if not (is_text and are_ids):
        shown = {name: each for name, each in prompt.items() if name != "cache_salt"}
        raise InvalidValueError(field, shown, _LIMIT)
    return PromptParts(text, None if token_ids is None else tuple(token_ids), salt)


def _checked_salt(field: str, salt: object) -> str:
    """Return a salt that is valid; errors must not contain it."""
    if not isinstance(salt, str):
        raise InvalidValueError(field, f"of type {type(salt).__name__}", "a string")
    if not is_valid_unicode(salt):
        raise InvalidValueError(field, f"{len(salt)} characters", VALID_UNICODE)
    return salt


def _are_token_ids(value: object) -> bool:
    return _is_list(value) and bool(value) and all(type(each) is int for each in value)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, _TEXTS_AND_BYTES)


_TEXTS_AND_BYTES = (str, bytes, bytearray, memoryview)


def read_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any
) -> list[Conversation]:
    """Read one conversation or several; `options` are those of `read_conversation`, for all."""
    if _is_list(messages) and messages and not isinstance(messages[0], Mapping):
        return [
            read_conversation(f"messages[{index}]", each, **options)
            for index, each in enumerate(messages)
        ]
    return [read_conversation("messages", messages, **options)]


def read_conversation(
    field: str,
    messages: object,
    *,
    tools: object = None,
    chat_template_kwargs: object = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Conversation:
    """Read one conversation; `field` names it in errors. The rest: fields of Conversation."""
    if not _is_list(messages):
        raise InvalidValueError(field, messages, "a list of messages")
    if not messages:
        raise InvalidValueError(field, messages, "at least one message")
    tools = () if tools is None else tools
    if not (_is_list(tools) and all(isinstance(each, Mapping) for each in tools)):
        raise InvalidValueError("tools", tools, "a list of mappings, as the OpenAI API has them")
    kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(kwargs, Mapping):
        raise InvalidValueError("chat_template_kwargs", kwargs, "a mapping of variables")
    turns = tuple(_message(f"{field}[{index}]", each) for index, each in enumerate(messages))
    return Conversation(turns, tuple(tools), add_generation_prompt, continue_final_message, kwargs)


def _message(field: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidValueError(field, message, 'a mapping with "role" and "content"')
    read = {**message, "content": _text_of(f"{field}.content", message.get("content"))}
    if message.get("tool_calls") is not None:
        read["tool_calls"] = _tool_calls(f"{field}.tool_calls", message["tool_calls"])
    return read


def _tool_calls(field: str, calls: object) -> list[dict[str, Any]]:
    """Read a tool in the form of the OpenAI API, or of templates, which leave out `function`."""
    if not (_is_list(calls) and all(isinstance(call, Mapping) for call in calls)):
        raise InvalidValueError(field, calls, "a list of mappings")
    return [
        {**call, "function": _decoded(call["function"])}
        if isinstance(call.get("function"), Mapping)
        else _decoded(call)
        for call in calls
    ]


def _decoded(function: Mapping[str, Any]) -> dict[str, Any]:
    if "arguments" not in function:
        return dict(function)
    return {**function, "arguments": decoded_arguments(function["arguments"])}


def _text_of(field: str, content: object) -> str | None:
    """Join the parts of a message's content; only text is supported."""
    if content is None or isinstance(content, str):
        return content
    parts = content if _is_list(content) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        limit = 'a string, or a list of {"type": "text", "text": ...}: the model reads text only'
        raise InvalidValueError(field, content, limit)
    return "\n".join(cast("list[str]", texts))
