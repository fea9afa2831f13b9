"""Rewrites of a chat that its template refuses: the same conversation in another form.

A template that accepts a chat gets it unchanged, so that prompts are those of transformers. Many
refuse what the APIs allow, such as two messages of the user in succession or two calls in one
message; `render_some_form` finds the form that such a template accepts.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat, takewhile
from typing import Any

from specdec.types.request import Conversation

Turn = Mapping[str, Any]
"""A message in the format of chat templates."""

Rewrite = Callable[[Conversation], Conversation]

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read the reasoning of a message."""


_MAX_FORMS = 60
"""Forms of a chat that are rendered at most."""

_MAX_CHARS = 10_000_000
"""Characters that are rendered at most in all forms of a refused chat: ten of the longest one."""


class RefusedChatError(Exception):
    """The failure of a template in the form of a chat that came furthest.

    depth: the number of rewrites in the form.
    """

    def __init__(self, chat: Conversation, failure: Exception, depth: int) -> None:
        super().__init__(str(failure))
        self.chat, self.failure, self.depth = chat, failure, depth

    @property
    def is_described(self) -> bool:
        """Return whether the template describes its failure, with `raise_exception`."""
        from jinja2 import TemplateError

        return type(self.failure) is TemplateError


def render_some_form(chat: Conversation, render: Callable[[Conversation], str]) -> str:
    """Return the text of a chat as it is or, where `render` fails, with rewrites.

    Others are added to a rewrite after which it fails for another reason: first to those after
    which the template describes it. Raises RefusedChatError with the failure of the form with the
    most rewrites, if possible a described one.
    """
    try:
        return render(chat)
    except Exception as error:  # a template is a program and can raise any exception
        pending = [RefusedChatError(chat, error, 0)]
    seen, refused, max_forms = [chat], list(pending), _max_forms(chat)
    while pending and len(seen) < max_forms:
        last = pending.pop()
        found = []
        for form in map(_rewritten, REWRITES, repeat(last.chat)):
            if form in seen or len(seen) >= max_forms:
                continue
            seen.append(form)
            try:
                return render(form)
            except Exception as error:
                if repr(error) != repr(last.failure):
                    found.append(RefusedChatError(form, error, last.depth + 1))
        refused += found
        pending += sorted(found, key=lambda each: not each.is_described)[::-1]
    raise max(refused, key=lambda each: (each.is_described, each.depth))


def _max_forms(chat: Conversation) -> int:
    try:
        return min(_MAX_FORMS, _MAX_CHARS // len(repr(chat)))
    except Exception:  # a value of `LLM.chat` can be any object, or nested too deeply
        return 1


def _rewritten(rewrite: Rewrite, chat: Conversation) -> Conversation:
    """Return a form of a chat; the chat where its values are not JSON and cannot be rewritten."""
    try:
        return rewrite(chat)
    except Exception:
        return chat


def _with_turns(change: Callable[[Sequence[Turn]], Iterable[Turn]]) -> Rewrite:
    return lambda chat: replace(chat, messages=tuple(change(chat.messages)))


def _with_arguments(change: Callable[[object], object]) -> Rewrite:
    """Return the rewrite that changes the arguments of all calls."""

    def turn_of(turn: Turn) -> Turn:
        calls = turn.get("tool_calls")
        return {**turn, "tool_calls": [call_of(each) for each in calls]} if calls else turn

    def call_of(call: Turn) -> Turn:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": call_of(call["function"])}
        return {**call, "arguments": change(call.get("arguments"))}

    return _with_turns(lambda turns: map(turn_of, turns))


def _with_short_ids(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Give calls and their results ids of 9 characters, which Mistral's templates require."""
    for turn, results in _rounds(turns):
        calls = [{**each, "id": _short(each.get("id"))} for each in turn.get("tool_calls") or ()]
        yield {**turn, "tool_calls": calls} if calls else turn
        for each in results:
            yield {**each, "tool_call_id": _short(each.get("tool_call_id"))}


def _short(call_id: object) -> str:
    return hashlib.sha256(str(call_id or "").encode(errors="replace")).hexdigest()[:9]


def _as_object(arguments: object) -> Mapping[str, Any]:
    """Return arguments as an object: the one that a malformed or cut text begins with, if any."""
    if isinstance(arguments, Mapping):
        return arguments
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        for read in (_first_value, _cut_value):
            try:
                return dict(read(arguments.lstrip()))
            except (ValueError, RecursionError):
                continue
    return {"arguments": arguments}


def _first_value(text: str) -> Any:
    return json.JSONDecoder().raw_decode(text)[0]


def _cut_value(text: str) -> Any:
    from pydantic_core import from_json

    return from_json(text, allow_partial="trailing-strings")


def _as_text(arguments: object) -> str:
    """Return arguments as JSON text, which some templates join to other text."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _with_complete_tools(chat: Conversation) -> Conversation:
    """Add empty descriptions and properties: they are optional in the OpenAI API."""
    return replace(chat, tools=tuple(map(_complete_tool, chat.tools)))


def _with_bare_tools(chat: Conversation) -> Conversation:
    """Complete tools, and take the functions out of the objects around them."""
    tools = _with_complete_tools(chat).tools
    return replace(chat, tools=tuple(each.get("function", each) for each in tools))


def _complete_tool(tool: Turn) -> Turn:
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": _complete_tool(tool["function"])}
    parameters = tool.get("parameters")
    given = parameters if isinstance(parameters, Mapping) else {"type": "object"}
    properties = given.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    described = {name: _described(each) for name, each in properties.items()}
    return {**_described(tool), "parameters": {**given, "properties": described}}


def _described(each: Any) -> Any:
    if not isinstance(each, Mapping) or each.get("description") is not None:
        return each
    return {**each, "description": ""}


def _without_text_beside_reasoning(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Move the text before calls to the end of the reasoning before it.

    The template of gpt-oss takes one of them, as the analysis before a call.
    """
    for turn in turns:
        reasoning = next((turn[name] for name in _REASONING if turn.get(name)), None)
        if reasoning and turn.get("content") and turn.get("tool_calls"):
            others = {name: each for name, each in turn.items() if name not in _REASONING}
            both = f"{reasoning}\n\n{turn['content']}"
            yield {**others, "content": "", "reasoning_content": both}
        else:
            yield turn


def with_single_calls(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Divide each message with several calls: one with each call, and its result after it.

    Results of no call follow the last one.
    """
    divided: list[dict[str, Any]] = []
    for turn, results in _rounds(turns):
        several = len(turn.get("tool_calls") or ()) > 1
        divided += map(dict, _divided(turn, results) if several else [turn, *results])
    return divided


def _rounds(turns: Sequence[Turn]) -> Iterator[tuple[Turn, list[Turn]]]:
    """Return each message and the results after it.

    A result without an id gets that of the first call without a result.
    """
    place = 0
    while place < len(turns):
        turn, others = turns[place], (turns[each] for each in range(place + 1, len(turns)))
        results = list(takewhile(lambda each: each["role"] == "tool", others))
        place += 1 + len(results)
        known = {each.get("tool_call_id") for each in results}
        call_ids = (each.get("id") for each in turn.get("tool_calls") or ())
        free = (each for each in call_ids if each not in known)
        for index, each in enumerate(results):
            if not each.get("tool_call_id"):
                results[index] = {**each, "tool_call_id": next(free, "")}
        yield turn, results


def _divided(turn: Turn, results: list[Turn]) -> Iterator[Turn]:
    *calls, last = turn["tool_calls"]
    answers = defaultdict[str, deque[Turn]](deque)
    for each in results:
        answers[each.get("tool_call_id") or ""].append(each)
    for call in calls:
        yield {**turn, "tool_calls": [call]}
        turn = {"role": turn["role"], "content": ""}
        if own := answers[call.get("id") or ""]:
            yield own.popleft()
    yield {**turn, "tool_calls": [last]}
    yield from chain.from_iterable(answers.values())


def with_one_system(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Convert messages for a template that takes a system message only at the beginning.

    The first ones become one. A later one becomes text of the user, in one message with the user's
    messages around it: many templates require alternating roles.
    """
    groups: list[list[Turn]] = []
    follows_system = False
    for turn in turns:
        is_system, last = turn["role"] == "system", groups[-1][0] if groups else None
        is_first = last is None or last["role"] == "system"
        role = "user" if is_system and not is_first else turn["role"]
        if last is not None and role == last["role"] and (is_system or follows_system):
            groups[-1].append({**turn, "role": role})
        else:
            groups.append([{**turn, "role": role}])
        follows_system = is_system
    return list(map(_joined, groups))


def _merged(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Merge successive messages of one role, except for results and those with calls.

    Mistral's templates leave out a text beside calls.
    """
    groups: list[list[Turn]] = []
    for turn in with_one_system(turns):
        last = groups[-1][-1] if groups else {}
        is_alone = turn["role"] == "tool" or turn.get("tool_calls") or last.get("tool_calls")
        if is_alone or turn["role"] != last.get("role"):
            groups.append([turn])
        else:
            groups[-1].append(turn)
    return list(map(_joined, groups))


def _joined(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return one message of several of the same role, with a name only if all of them have it."""
    joined = {name: each for turn in turns for name, each in turn.items()}
    if any(turn.get("name") != joined.get("name") for turn in turns):
        del joined["name"]
    for name in ("content", *_REASONING) if len(turns) > 1 else ():
        if name in joined:
            joined[name] = "\n\n".join(turn[name] for turn in turns if turn.get(name))
    return joined


def _with_empty_texts(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Merge as `_merged` does, and add empty messages where roles have to alternate.

    One of the assistant is between results and the user's text, one of the user between an
    assistant's text and calls.
    """
    filled: list[dict[str, Any]] = []
    for turn in _merged(turns):
        role, last = turn["role"], filled[-1]["role"] if filled else None
        if (last, role) == ("tool", "user"):
            filled.append({"role": "assistant", "content": ""})
        if last == role == "assistant" and turn.get("tool_calls"):
            filled.append({"role": "user", "content": ""})
        filled.append(turn)
    return filled


def _without_system(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Merge as `_merged` does, with the system message at the beginning of the user's text."""
    first, *others = _merged(turns)
    role = "user" if first["role"] == "system" else first["role"]
    return _merged([{**first, "role": role}, *others])


REWRITES: tuple[Rewrite, ...] = (
    _with_arguments(_as_object),
    _with_arguments(_as_text),
    _with_complete_tools,
    _with_bare_tools,
    _with_turns(_with_short_ids),
    _with_turns(_without_text_beside_reasoning),
    _with_turns(with_single_calls),
    _with_turns(with_one_system),
    _with_turns(_merged),
    _with_turns(_with_empty_texts),
    _with_turns(_without_system),
)
"""In the order in which they are tried; a rewrite may change nothing."""
