"""Parsing of tool calls, independent of how the text is split."""

import pytest

from cluster.api.openai.tool_format import HERMES, LLAMA
from cluster.api.openai.tool_parser import CallArguments, CallStart, Content, ToolCallParser

NAMES = ("weather", "time")
WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "n": [1, {}]}}\n</tool_call>'
)
NOT_OFFERED = '<tool_call>{"name":"new","arguments":{"a":1}}</tool_call>'
UNCLOSED = '<tool_call>{"name":"time","arguments":{}}'
ULM = '{"city": "Ulm", "n": [1, {}]}'


def read(form, text, size):
    parser = ToolCallParser(form, NAMES)
    pieces = [
        piece
        for start in range(0, len(text), size)
        for piece in parser.feed(text[start : start + size])
    ]
    pieces += parser.finish()
    return pieces


def joined(pieces):
    """Return the content, and the calls with their arguments."""
    calls = [(piece.name, "") for piece in pieces if isinstance(piece, CallStart)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.text)
    return "".join(piece.text for piece in pieces if isinstance(piece, Content)), calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text\n", "plain text\n", []),
        ("1 < 2 and <tool or <b>", "1 < 2 and <tool or <b>", []),
        (WEATHER, "", [("weather", ULM)]),
        (f"Let me see.\n\n{WEATHER}", "Let me see.", [("weather", ULM)]),
        (f"{WEATHER}\n{WEATHER}", "", [("weather", ULM)] * 2),
        (f"{WEATHER}\nThere.", "\nThere.", [("weather", ULM)]),
        ('<tool_call>{"name":"time","arguments":{}}</tool_call>', "", [("time", "{}")]),
        ('<tool_call>{"name":"time"}</tool_call>', "", [("time", "{}")]),
        (NOT_OFFERED, NOT_OFFERED, []),
        (f"{NOT_OFFERED}\n{WEATHER}", NOT_OFFERED, [("weather", ULM)]),
        (f"{UNCLOSED}\nThat is all.", "That is all.", [("time", "{}")]),
        (f"{UNCLOSED}\n</tool_c", "", [("time", "{}")]),
        (f"{UNCLOSED} And: {WEATHER}", "And:", [("time", "{}"), ("weather", ULM)]),
        ('<tool_call>{"arguments":{"a": 1},"name":"time"}</tool_call>', "", [("time", '{"a": 1}')]),
        ('<tool_call>{"name":"time","arguments":"{\\"a\\":1}"}', "", [("time", '{"a":1}')]),
        ('<tool_call>{"name":"time","arguments":null}', "", [("time", "{}")]),
        ('<tool_call>{"name":"weather","arguments":{"city":"U', "", [("weather", '{"city":"U')]),
        (
            '<tool_call>{"name":"time","arguments":{}}<tool_call>{"name":"time","arguments":{}}',
            "",
            [("time", "{}")] * 2,
        ),
        ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        ('<tool_call>{"name": "ti', '<tool_call>{"name": "ti', []),
        ("<tool_call>{'name': 'time'}", "<tool_call>{'name': 'time'}", []),
        ("ends in a mark <tool_call", "ends in a mark <tool_call", []),
    ],
)
def test_hermes(text, content, calls, size):
    assert joined(read(HERMES, text, size)) == (content, calls)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain {text}", "plain {text}", []),
        ('{"name": "time", "parameters": {"a": 1}}', "", [("time", '{"a": 1}')]),
        ('\n{"name": "time", "arguments": {}}', "", [("time", "{}")]),
        ('<|python_tag|>{"name": "time", "parameters": {}}', "", [("time", "{}")]),
        (
            '{"type": "function", "name": "time", "parameters": {}}',
            "",
            [("time", "{}")],
        ),
        (
            '{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"x": 2}}',
            "",
            [("time", "{}"), ("weather", '{"x": 2}')],
        ),
        ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"name": "time", "parameters": {}} That is all.', "That is all.", [("time", "{}")]),
        ("<|python", "<|python", []),
        ("  ", "  ", []),
    ],
)
def test_llama(text, content, calls, size):
    assert joined(read(LLAMA, text, size)) == (content, calls)


def test_arguments_stream_as_they_are_generated():
    parser = ToolCallParser(HERMES, NAMES)
    assert list(parser.feed('<tool_call>\n{"name": "weather", "arguments": {"ci')) == [
        CallStart(0, "weather"),
        CallArguments(0, '{"ci'),
    ]
    assert list(parser.feed('ty": ')) == [CallArguments(0, 'ty": ')]
