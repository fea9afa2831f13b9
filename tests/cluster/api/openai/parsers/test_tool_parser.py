# Modules: cluster.api.openai.parsers.tool_parser, cluster.api.openai.parsers.json_span
"""Parsing of tool calls, independent of how the text is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.openai.parsers.call_syntax import SYNTAXES
from cluster.api.openai.parsers.json_span import EscapedStrings, JsonSpan, json_or_none
from cluster.api.openai.parsers.pieces import CallArguments, CallStart, Content
from cluster.api.openai.parsers.tool_parser import ToolCallParser

NAMES = ("weather", "time")
HERMES, LLAMA = SYNTAXES["hermes"], SYNTAXES["llama3_json"]
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


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
).filter(lambda value: isinstance(value, dict | list | str))


@given(VALUES, st.text(max_size=5), st.integers(1, 7))
def test_the_end_of_the_value_does_not_depend_on_the_split(value, rest, size):
    text = json.dumps(value)
    span, taken = JsonSpan(), 0
    whole = text + rest
    for start in range(0, len(whole), size):
        taken += span.feed(whole[start : start + size])
    assert (taken, span.is_complete) == (len(text), True)


@pytest.mark.parametrize("text", ["{", '{"a": "}', '{"a": [1}', '"\\"', "[[]"])
def test_a_truncated_value_is_not_complete(text):
    span = JsonSpan()
    assert (span.feed(text), span.is_complete) == (len(text), False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\n\ty\x00", "b":\n[1]}', {"a": "x\n\ty\x00", "b": [1]}),
        ('{"a": "C:\\dir \\u00e9\\n\\"\\\\"}', {"a": 'C:\\dir é\n"\\'}),
        ('\n{"a\\\n": "\\é"}', {"a\\\n": "\\é"}),
        (r'{"a": "C:\users\x \u12 \u12g4 \u00e"}', {"a": r"C:\users\x \u12 \u12g4 \u00e"}),
        (r'{"a": "\ud83d\ude00 \ud83d\u0041"}', {"a": "\U0001f600 \ud83dA"}),
    ],
)
def test_strings_of_an_object_are_escaped_wherever_it_is_split(text, value):
    written = EscapedStrings().feed(text)
    assert json.loads(written) == json_or_none(text) == value
    for end in range(len(text)):
        writer = EscapedStrings()
        assert writer.feed(text[:end]) + writer.feed(text[end:]) == written


@given(st.dictionaries(st.text(max_size=4), VALUES), st.booleans())
def test_valid_objects_and_other_texts_stay(value, is_ascii):
    for text in (json.dumps(value, ensure_ascii=is_ascii, indent=1), 'print("a\n\\d")', ' "\n'):
        assert EscapedStrings().feed(text) == text
