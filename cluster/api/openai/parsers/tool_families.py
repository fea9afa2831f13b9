"""The parsers of tool calls by model family, and the ids of calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from cluster.api.openai.parsers.harmony import HarmonyParser
from cluster.api.openai.parsers.marked_calls import SYNTAXES, MarkedCallParser, MistralCallParser
from cluster.api.openai.parsers.pieces import AnswerParser
from cluster.api.openai.parsers.pythonic_calls import PythonicCallParser
from cluster.api.openai.parsers.tool_format import Tool, ToolFormat
from cluster.api.openai.parsers.tool_parser import ToolCallParser

_MISTRAL_ID_CHARS = 9
"""Mistral's chat templates reject ids of any other length."""


def tool_parser(form: ToolFormat, tools: Sequence[Tool]) -> AnswerParser:
    """Make the parser of one answer. tools: the functions that may be called."""
    match form.name:
        case "hermes" | "llama3_json":
            return ToolCallParser(form, [each.name for each in tools])
        case "llama4_pythonic":
            return PythonicCallParser(tools)
        case "gpt_oss":
            return HarmonyParser(tools)
        case "mistral":
            return MistralCallParser(SYNTAXES["mistral"], tools)
        case name:
            return MarkedCallParser(SYNTAXES[name], tools)


def new_call_id(form: ToolFormat) -> str:
    """Return an id for a call that the model gave none."""
    if form.name == "mistral":
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(_MISTRAL_ID_CHARS))
    return f"call_{secrets.token_hex(12)}"
