"""Leaves out the oldest messages of chats that are too long: `truncation` `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from cluster.api.openai.builders import RequestContext
from cluster.api.openai.chat import ChatBuilder, prepare_chat
from cluster.api.openai.request_warnings import RequestWarning
from cluster.api.openai.schemas.chat_schema import ChatRequest, Message
from cluster.replica.router import Router

_SYSTEM_ROLES = ("system", "developer")
_OUTPUT_SHARE = 4
"""The context divided by this is left for an output without a limit."""


async def fitting(
    router: Router, chat: ChatRequest, whole: ChatBuilder, context: RequestContext
) -> ChatBuilder:
    """Return a chat without its oldest messages, with a warning, if it is too long.

    whole: with all messages, which is returned if it fits, or if none without the oldest ones does.
    Its earlier calls are counted in any case: their number is in the ids of new ones.
    """
    limit = whole.calls[0].params.max_tokens
    wanted = limit or router.max_model_len // _OUTPUT_SHARE
    if _room(router, whole) >= wanted or not (starts := chat_starts(chat.messages)):
        return whole
    num_warnings = len(context.warnings)

    async def beginning_at(start: int) -> ChatBuilder:
        shorter = chat.model_copy(update={"messages": messages_from(chat.messages, start)})
        made = await prepare_chat(router, shorter, context)
        del context.warnings[num_warnings:]
        made.reading = replace(made.reading, tools=whole.reading.tools)
        return made

    found = await beginning_at(starts[-1])
    if _room(router, found) < (limit or 1):
        return whole
    end = len(starts) - 1
    first = 0 if _room(router, found) >= wanted else end
    while first < end:
        middle = (first + end) // 2
        tried = await beginning_at(starts[middle])
        if _room(router, tried) >= wanted:
            found, end = tried, middle
        else:
            first = middle + 1
    if (kept := lasting_start(end, len(starts))) != end:
        found, end = await beginning_at(starts[kept]), kept
    num_left_out = len(chat.messages) - len(messages_from(chat.messages, starts[end]))
    text = f"the oldest {num_left_out} messages are left out"
    context.warnings.append(RequestWarning("truncation", text))
    return found


def chat_starts(messages: Sequence[Message]) -> list[int]:
    """Return the places before which the messages of a chat can be left out, in ascending order.

    Each is that of a message of the user, or of an answer after the last one of these. No result
    after it is of a call before it.
    """
    last, calls, needed = _last_of_user(messages), dict[str, int](), list[int]()
    for place, each in enumerate(messages):
        calls.update((call.id, place) for call in each.tool_calls or ())
        needed.append(calls.get(each.tool_call_id or "", place) if each.role == "tool" else place)
    needed = [*accumulate(reversed(needed), min)][::-1]  # the oldest by any from a place on
    starts, num_left_out = dict[int, int](), 0  # by the number of messages left out
    for place, each in enumerate(messages):
        may_begin = each.role == "user" or (each.role == "assistant" and place > last)
        if may_begin and needed[place] == place and num_left_out:
            starts.setdefault(num_left_out, place)
        num_left_out += place != last and each.role not in _SYSTEM_ROLES
    return [*starts.values()]


def messages_from(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the messages from a place on, all of the system, and the last one of the user."""
    last = _last_of_user(messages)
    return [
        each
        for place, each in enumerate(messages)
        if place >= start or place == last or each.role in _SYSTEM_ROLES
    ]


def lasting_start(index: int, num_starts: int) -> int:
    """Return the index of a start, at most half of the rest later, that longer chats have too.

    It is a multiple of a power of two: it stays for as many turns, and so do cached prefixes.
    """
    step = 1 << (max((num_starts - index) // 2, 1).bit_length() - 1)
    return -(-index // step) * step


def _last_of_user(messages: Sequence[Message]) -> int:
    """Return the place of the last message of the user, -1 without any."""
    return max((place for place, each in enumerate(messages) if each.role == "user"), default=-1)


def _room(router: Router, chat: ChatBuilder) -> int:
    """Return how many tokens of the context a prompt leaves, below 0 if it is too long."""
    [call] = chat.calls
    assert isinstance(call.prompt, tuple), "the prompt is tokenized"
    return router.max_model_len - len(call.prompt)
