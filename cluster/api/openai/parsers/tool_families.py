"""The parsers of tool calls by model family, and the ids of calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import replace

from cluster.api.openai.parsers import call_syntax, pythonic_calls, tagged_calls
from cluster.api.openai.parsers.harmony import HarmonyParser
from cluster.api.openai.parsers.named_calls import NamedCallParser
from cluster.api.openai.parsers.pieces import AnswerParser
from cluster.api.openai.parsers.pythonic_calls import PythonicCallParser
from cluster.api.openai.parsers.tagged_calls import TaggedCallParser
from cluster.api.openai.parsers.tool_format import Tool, ToolFormat
from cluster.api.openai.parsers.tool_parser import ToolCallParser

_MISTRAL_ID_CHARS = 9
"""Mistral's chat templates reject ids of any other length."""


def tool_parser(
    form: ToolFormat, tools: Sequence[Tool], *, is_constrained: bool = False
) -> AnswerParser:
    """Make the parser of one answer.

    tools: the functions that may be called. is_constrained: whether a grammar writes the marks, so
    that there is no call without one.
    """
    if form.name == "gpt_oss":
        return HarmonyParser(tools)
    if (marks := pythonic_calls.MARKS.get(form.name)) is not None:
        return PythonicCallParser(marks, tools)
    if (tags := tagged_calls.SYNTAXES.get(form.name)) is not None:
        return TaggedCallParser(tags, tools)
    syntax, names = call_syntax.SYNTAXES[form.name], [each.name for each in tools]
    if syntax.heads:
        return NamedCallParser(syntax, names)
    finds_unopened = syntax.finds_unopened and not is_constrained
    return ToolCallParser(replace(syntax, finds_unopened=finds_unopened), names)


def call_marks_of(form: ToolFormat) -> tuple[str, ...]:
    """Return the marks before calls; none where calls have none."""
    marks = [form.opening or form.optional_mark]
    if (syntax := call_syntax.SYNTAXES.get(form.name)) is not None:
        marks += [*syntax.section[:1], *syntax.other_openings]
    if (tagged := tagged_calls.SYNTAXES.get(form.name)) is not None:
        marks.append(tagged.unopened)
    return tuple(filter(None, marks))


def new_call_id(form: ToolFormat, name: str, place: int) -> str:
    """Return an id for a call that the model gave none; the chat template must accept it.

    form: the model's own format. name: of the function. place: of the call among all of the chat,
    by which Kimi's template names functions.
    """
    match form.name:
        case "mistral":
            alphabet = string.ascii_letters + string.digits
            return "".join(secrets.choice(alphabet) for _ in range(_MISTRAL_ID_CHARS))
        case "kimi_k2":
            return f"functions.{name}:{place}"
        case _:
            return f"call_{secrets.token_hex(12)}"
