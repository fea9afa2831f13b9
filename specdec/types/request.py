"""Requests of the service and the conversations in them, shared by all interfaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.types.sampling.sampling_params import SamplingParams

CHAT_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Caller:
    """Client of a request, for limits of each client.

    name: that of its API key; the network address of a stranger; empty for the process itself.
    is_stranger: whether it has no API key.
    """

    name: str = ""
    is_stranger: bool = False


OWN_PROCESS = Caller()


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
    trusts_system: whether control tokens in system messages are tokens. Not with texts of tools.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trusts_system: bool = True


Chat = tuple[ChatMessage, ...]
Prompt = str | tuple[int, ...] | Chat | Conversation
"""A text, token ids that are used as they are, or a conversation, perhaps with tools."""


@dataclass(frozen=True)
class ThinkingBudget:
    """Limit of the reasoning of an answer, in tokens.

    closing_ids: the tokens that end reasoning which is longer. is_open: returns whether a text, cut
    anywhere, ends in reasoning; a front end pickles it.
    """

    num_tokens: int
    closing_ids: tuple[int, ...]
    is_open: Callable[[str], bool]

    def end_of_mark(self, output: Sequence[int]) -> int:
        """Return the number of tokens of an output up to the end of the mark; 0 without one.

        A token that ends the answer may cut the mark.
        """
        end = min(len(output), self.num_tokens + len(self.closing_ids))
        mark = tuple(output[self.num_tokens : end])
        return end if mark and mark == self.closing_ids[: len(mark)] else 0


@dataclass(frozen=True)
class GenerateRequest:
    """A request to complete one prompt.

    model: empty for the model that is served. request_id: empty to have one generated.
    priority: lower numbers are scheduled first; equal priorities in order of arrival.
    resume_token_ids: output that the client already has from an interrupted stream; generation
        continues after it and returns only what follows.
    stream_interval: number of new tokens of a choice that are sent together; None takes the
        engine's setting. The first and the last output never wait, and the second may be shorter.
    cache_salt: cached KV blocks and drafts from earlier outputs are shared only among requests
        with the same salt.
    allow_training: whether its tokens may train the draft head of the service, if that is enabled.
    receipt: whether the last output has a signed receipt of the tokens.
    thinking_budget: of one choice without log-probabilities, receipt and resume_token_ids.
    """

    prompt: Prompt = field(repr=False)
    params: SamplingParams
    model: str = ""
    request_id: str = ""
    priority: int = 0
    resume_token_ids: tuple[int, ...] = field(default=(), repr=False)
    stream_interval: int | None = None
    cache_salt: str = ""
    allow_training: bool = False
    receipt: bool = False
    thinking_budget: ThinkingBudget | None = None


@dataclass(frozen=True)
class TokenizeRequest:
    """A request to encode a text or a chat; `add_special_tokens` applies to texts only."""

    prompt: str | Chat | Conversation
    model: str = ""
    add_special_tokens: bool = True


@dataclass(frozen=True)
class DetokenizeRequest:
    """A request to decode token ids."""

    token_ids: tuple[int, ...]
    model: str = ""
