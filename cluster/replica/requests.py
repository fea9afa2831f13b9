"""What the interfaces ask of a Router, whichever protocol it came by."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.text.chat_template import Conversation
from specdec.types.chat import ChatMessage
from specdec.types.sampling_params import SamplingParams

Chat = tuple[ChatMessage, ...]
Prompt = str | tuple[int, ...] | Chat | Conversation
"""A text, token ids that are used as they are, or a conversation, perhaps with tools."""


@dataclass(frozen=True)
class GenerateCall:
    """A completion that is asked for. Empty `model`: the loaded one. Empty `request_id`: any.

    priority, resume_token_ids, stream_interval, cache_salt: as in specdec.sequences.sequence.Request.
    """

    model: str
    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int = 0
    resume_token_ids: tuple[int, ...] = ()
    stream_interval: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True)
class TokenizeCall:
    """An encoding that is asked for; `add_special_tokens` concerns texts only."""

    model: str
    prompt: str | Chat | Conversation
    add_special_tokens: bool


@dataclass(frozen=True)
class DetokenizeCall:
    """A text that is asked for."""

    model: str
    token_ids: tuple[int, ...]
