"""The syntax of calls whose arguments are JSON, by model family."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from cluster.api.openai.parsers.kimi_ids import read_kimi_id
from cluster.api.openai.parsers.tag_pattern import SPACE, TagPattern
from cluster.api.openai.parsers.tool_format import deepseek_mark


def _plain_name(written: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return a known function without an id."""
    return (written, "") if written in names else None


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of a model family.

    opening, closing: marks of a call; an empty closing mark is the end of its arguments.
    other_openings: further marks that may stand in place of the opening one.
    has_objects: whether calls are objects `{"name": ..., "arguments": {...}}`, one or several, or a
        list of them.
    is_bare: whether an answer may begin with such objects without a mark.
    finds_unopened: whether such an object before a closing mark is a call without the opening one.
    heads: patterns of the text between mark and arguments, of calls that are no such objects.
    read_name: returns the function and the id in the name of a head, None without a known one; by
        default it is the function.
    fence: text that may follow the arguments.
    section: marks around all calls; empty for none. dropped: marks that are no content.
    """

    opening: str
    closing: str = ""
    other_openings: tuple[str, ...] = ()
    has_objects: bool = False
    is_bare: bool = False
    finds_unopened: bool = False
    heads: tuple[TagPattern, ...] = ()
    read_name: Callable[[str, Collection[str]], tuple[str, str] | None] = _plain_name
    fence: str = ""
    section: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


_NAME = re.compile(r"(?P<name>[a-zA-Z0-9_.-]+)")
_KIMI_ID = re.compile(r"(?P<name>[a-zA-Z0-9_.:-]+)")
_DEEPSEEK_MARKS = (deepseek_mark("tool call begin"), deepseek_mark("tool call end"))
_DEEPSEEK_SECTION = (deepseek_mark("tool calls begin"), deepseek_mark("tool calls end"))

SYNTAXES: Mapping[str, CallSyntax] = {
    "hermes": CallSyntax("<tool_call>", "</tool_call>", has_objects=True, finds_unopened=True),
    "llama3_json": CallSyntax("<|python_tag|>", has_objects=True, is_bare=True),
    "granite": CallSyntax(
        "<|tool_call|>",
        "</tool_call>",
        other_openings=("<tool_call>",),
        has_objects=True,
        is_bare=True,
    ),
    "nemotron_json": CallSyntax("<TOOLCALL>", "</TOOLCALL>", has_objects=True),
    "cohere_command3": CallSyntax(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        has_objects=True,
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "mistral": CallSyntax(
        "[TOOL_CALLS]",
        has_objects=True,
        heads=tuple(
            TagPattern(SPACE, _NAME, *call_id, *before)
            for call_id in ((), ("[CALL_ID]", re.compile(r"[^\[{\s]*")))
            for before in (("[ARGS]",), (SPACE, re.compile(r"(?=\{)")))
        ),
    ),
    "deepseek_v3": CallSyntax(
        *_DEEPSEEK_MARKS,
        heads=(TagPattern(SPACE, f"function{deepseek_mark('tool sep')}", _NAME, SPACE, "```json"),),
        fence="```",
        section=_DEEPSEEK_SECTION,
    ),
    "deepseek_v31": CallSyntax(
        *_DEEPSEEK_MARKS,
        heads=(TagPattern(SPACE, _NAME, deepseek_mark("tool sep")),),
        section=_DEEPSEEK_SECTION,
    ),
    "kimi_k2": CallSyntax(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        heads=(TagPattern(SPACE, _KIMI_ID, SPACE, "<|tool_call_argument_begin|>"),),
        read_name=read_kimi_id,
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
}
"""Syntax of the calls of each family, by the name of its parser in vLLM and SGLang."""
