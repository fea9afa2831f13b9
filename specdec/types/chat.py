"""Conversations in requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation. role: one of CHAT_ROLES; checked when it is encoded."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template. Messages and tools have the keys that templates expect.

    messages: each with `role` and `content`; optionally `tool_calls`, whose arguments are objects.
    tools: functions as the OpenAI API describes them.
    add_generation_prompt: whether the assistant's turn is opened at the end.
    continue_final_message: whether the last message is left open, to be continued.
    template_kwargs: further variables of the template, such as `enable_thinking`.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
