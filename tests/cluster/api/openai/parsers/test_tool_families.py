# Modules: cluster.api.openai.parsers.harmony, cluster.api.openai.parsers.tool_families
# Modules: cluster.api.openai.parsers.pieces, cluster.api.openai.parsers.pythonic_calls
"""Tool calls in every family's format: the same structure however the text is split."""

import json
import time
from typing import get_args

import pytest

from cluster.api.openai.parsers.json_span import JsonSpan
from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Reasoning,
    TrailingSpace,
)
from cluster.api.openai.parsers.tool_families import new_call_id, tool_parser
from cluster.api.openai.parsers.tool_format import TOOL_FORMATS, Tool, deepseek_mark
from cluster.config.parsers import ToolCallParserName
from tests.cluster.api.openai.family_outputs import (
    CALLS_OR_TEXT,
    FAMILIES,
    OUTPUTS,
    TOOLS,
    Output,
)


def read(parser, parts, *, is_cut=False):
    """Return the joined pieces: content, reasoning, and calls with their arguments' text."""
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces += parser.finish(is_cut=is_cut)
    calls = [[piece.name, ""] for piece in pieces if isinstance(piece, CallStart)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    assert parser.num_calls == len(calls)
    return content, reasoning, [tuple(call) for call in calls]


def parser_of(name):
    return tool_parser(TOOL_FORMATS[name], TOOLS)


@pytest.mark.parametrize("index", range(len(OUTPUTS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_is_read_alike_however_it_is_split(family, index):
    (name, write), output = FAMILIES[family], OUTPUTS[index]
    text = write(output)
    whole = read(parser_of(name), [text])
    content, reasoning, calls = whole
    has_text = not (output.calls and name in CALLS_OR_TEXT)
    assert content == (output.before if has_text else "")
    assert reasoning == ""
    assert [(name, json.loads(given)) for name, given in calls] == list(output.calls)
    assert read(parser_of(name), text) == whole, "character by character"
    for size in (2, 5):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(parser_of(name), parts) == whole, size


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_is_read_alike_if_it_is_split_once(family):
    """At every character boundary of each of the outputs."""
    name, write = FAMILIES[family]
    for output in OUTPUTS:
        text = write(output)
        whole = read(parser_of(name), [text])
        for end in range(1, len(text)):
            assert read(parser_of(name), [text[:end], text[end:]]) == whole, (text, end)


def test_every_parser_of_the_configuration_is_tested():
    assert set(get_args(ToolCallParserName)) == {"auto", *TOOL_FORMATS}
    assert {name for name, _ in FAMILIES.values()} == set(TOOL_FORMATS)


def test_there_are_thirty_outputs():
    assert len(OUTPUTS) == len(set(map(repr, OUTPUTS))) == 30


@pytest.mark.parametrize("function", ["a" * 128, "brave-search.web", "2fa_code", "-a", ".a"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_that_a_request_may_give_a_function_is_found(family, function):
    name, write = FAMILIES[family]
    text = write(Output("", ((function, {"city": "Ulm"}),)))
    tools = [Tool(function, parameters=TOOLS[0].parameters)]
    for parts in ([text], text):
        content, _, calls = read(tool_parser(TOOL_FORMATS[name], tools), parts)
        assert (content, [name for name, _ in calls]) == ("", [function])


@pytest.mark.parametrize("family", [each for each in FAMILIES if "llama" not in each])
def test_a_call_of_an_unknown_function_is_content(family):
    name, write = FAMILIES[family]
    text = write(OUTPUTS[0]).replace("get_weather", "delete_all")
    content, _, calls = read(parser_of(name), [text])
    assert calls == []
    assert '"Ulm"' in content or "Ulm" in content
    assert read(parser_of(name), text) == (content, "", [])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_that_is_cut_anywhere_is_read_alike_however_it_is_split(family):
    name, write = FAMILIES[family]
    text = write(OUTPUTS[22])
    for end in range(len(text)):
        whole = read(parser_of(name), [text[:end]])
        assert read(parser_of(name), text[:end]) == whole, end
        assert all(name == "get_weather" for name, _ in whole[2])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"arguments": {"city": "\ud83d"}, "name": "time"}</tool_call>'),
        (
            "hermes",
            r'<tool_call>{"arguments": "{\"city\": \"\ud83d\"}", "name": "time"}</tool_call>',
        ),
        ("mistral", r'[TOOL_CALLS] [{"name": "time", "arguments": {"city": "\ud83d"}}]'),
        ("llama4_pythonic", r'[time(city="\ud83d")]'),
        ("glm45", r'<tool_call>time{"city": "\ud83d"}</tool_call>'),
    ],
)
def test_half_a_character_stays_an_escape_of_json(name, text):
    """Otherwise the response could not be encoded, and the answer would be lost."""
    _, _, [(_, given)] = read(parser_of(name), [text])
    assert given.encode()
    assert json.loads(given) == {"city": "\ud83d"}


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if each.startswith(("deep", "kimi", "gpt", "hermes"))]
)
def test_arguments_in_json_are_passed_on_as_they_arrive(family):
    name, write = FAMILIES[family]
    parser, text = parser_of(name), write(OUTPUTS[15])
    cut = text.index("return")
    early = list(parser.feed(text[:cut]))
    assert CallStart in map(type, early)
    assert any(isinstance(each, CallArguments) and "def f" in each.text for each in early)


def test_content_is_passed_on_as_it_arrives():
    parser = parser_of("qwen3_coder")
    assert list(parser.feed("Let me ")) == [Content("Let me")]
    assert list(parser.feed("see. <tool")) == [Content(" see.")]
    assert list(parser.feed("box>")) == [Content(" <toolbox>")]


def test_values_in_tags_have_the_types_of_the_schema():
    text = (
        "<tool_call><function=get_weather><parameter=days>7</parameter>"
        "<parameter=city>7</parameter><parameter=exact>True</parameter>"
        "<parameter=note>null</parameter><parameter=share>about a half</parameter>"
        "<parameter=unit>celsius</parameter><parameter=new>[1]</parameter></function></tool_call>"
    )
    _, _, [(_, given)] = read(parser_of("qwen3_coder"), [text])
    assert json.loads(given) == {
        "days": 7,
        "city": "7",
        "exact": True,
        "note": None,
        "share": "about a half",
        "unit": "celsius",
        "new": [1],
    }


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("qwen3_coder", '<function=get_weather>{"city": "Ulm", "days": 3}</function>'),
        ("qwen3_coder", '\n<function=get_weather>\n{"city": "Ulm", "days": 3}\n</function>\n'),
        ("glm45", 'get_weather\n{"city": "Ulm", "days": 3}'),
        ("glm45", '\nget_weather{"city": "Ulm", "days": 3}\n'),
    ],
)
def test_arguments_may_be_json_in_place_of_tags(name, body):
    call = Output("", (("time", {"city": "a city"}),))
    tagged = next(write for each, write in FAMILIES.values() if each == name)(call)
    text = f"{tagged}<tool_call>{body}</tool_call>"
    for parts in ([text], text):
        content, _, [_, (called, given)] = read(parser_of(name), parts)
        assert (content, called) == ("", "get_weather")
        assert json.loads(given) == {"city": "Ulm", "days": 3}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("qwen3_coder", "<function=get_weather>Ulm</function>"),
        ("qwen3_coder", '<function=get_weather>["Ulm"]</function>'),
        ("qwen3_coder", "<function=get_weather><parameter=city>Ulm</parameter> or Bonn</function>"),
        ("qwen3_coder", "<function=get_weather>in <parameter=city>Ulm</parameter></function>"),
        ("glm45", "get_weather of Ulm"),
        ("glm45", "get_weather<arg_key>city</arg_key>Ulm"),
        ("glm45", "get_weather<arg_key>city</arg_key><arg_value>Ulm</arg_value> or Bonn"),
    ],
)
def test_a_call_with_text_beside_its_arguments_is_content(name, body):
    text = f"<tool_call>{body}</tool_call>"
    assert read(parser_of(name), [text]) == (text, "", [])
    assert read(parser_of(name), text) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call><function=time>" + "<parameter=a" * 40_000),
        ("qwen3_coder", "<tool_call><function=time>" + "<parameter=a>" * 40_000),
        ("glm45", "<tool_call>time" + "<arg_key>" * 40_000),
        ("glm45", "<tool_call>time" + "<arg_key>a</arg_key>" * 40_000),
        ("glm45", "<tool_call>time<arg_key>a</arg_key><arg_value>" + "<arg_key>" * 40_000),
    ],
    ids=["parameter", "closed parameter", "key", "closed key", "value"],
)
def test_tags_that_are_not_closed_take_linear_time(name, text):
    """A scan to the end for each tag takes over 10 seconds."""
    began_s = time.process_time()
    read(parser_of(name), [f"{text}</tool_call>"])
    assert time.process_time() - began_s < 2


def test_a_list_of_calls_is_scanned_once(monkeypatch):
    fed = []
    feed = JsonSpan.feed
    monkeypatch.setattr(JsonSpan, "feed", lambda self, text: fed.append(text) or feed(self, text))
    calls = [{"name": "time", "arguments": {"note": "{}]," * 50}}] * 2
    text = f"[TOOL_CALLS] {json.dumps(calls)}"
    assert len(read(parser_of("mistral"), text)[2]) == 2
    assert "".join(fed) == "".join(map(json.dumps, calls))


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "deepseek_v31", "kimi_k2"])
def test_a_text_that_begins_no_call_is_content_at_once(name):
    opening = TOOL_FORMATS[name].opening
    for rest in (" is a mark", "time is no head", " [ARGS", '{"a"'):
        parser = parser_of(name)
        pieces = [*parser.feed(f"{opening} and "), *parser.feed(rest)]
        assert "".join(each.text for each in pieces) == f"{opening} and {rest}"


def test_ids_of_calls():
    assert len(new_call_id(TOOL_FORMATS["mistral"], "time", 3)) == 9
    assert new_call_id(TOOL_FORMATS["hermes"], "time", 3).startswith("call_")
    assert new_call_id(TOOL_FORMATS["kimi_k2"], "time", 3) == "functions.time:3"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[get_weather(**x)]", "[get_weather(**x)]", []),
        ("[get_weather(open('x'))]", "[get_weather(open('x'))]", []),
        ("[time(1)]", "[time(1)]", []),
        ("[unknown()]", "[unknown()]", []),
        ("[time() + 1]", " + 1]", [("time", "{}")]),
        ("[time()] That is all.", "That is all.", [("time", "{}")]),
        ("[time(exact=true)]", "", [("time", '{"exact": true}')]),
        (
            "[time(from='a=b', class = {'x': 1})]",
            "",
            [("time", '{"from": "a=b", "class": {"x": 1}}')],
        ),
        ("[time(_a=1, from=2)]", "", [("time", '{"_a": 1, "from": 2}')]),
        ("[time(1=2)]", "[time(1=2)]", []),
        ("[time('a'=2, in=3)]", "[time('a'=2, in=3)]", []),
    ],
)
def test_python_that_is_no_list_of_calls_is_content(text, content, calls):
    assert read(parser_of("llama4_pythonic"), text) == (content, "", calls)
    assert read(parser_of("llama4_pythonic"), [text]) == (content, "", calls)


def test_harmony_separates_reasoning_content_and_calls():
    text = (
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It rains.<|return|>"
    )
    assert read(parser_of("gpt_oss"), text) == ("It rains.", "The user asks.", [])
    text = (
        "<|channel|>analysis<|message|>Look up.<|end|><|start|>assistant to=functions.time"
        '<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    assert read(parser_of("gpt_oss"), text) == ("", "Look up.", [("time", '{"a": 1}')])


@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>Look up.<|end|>"])
def test_a_harmony_recipient_may_follow_the_role_without_a_space(before):
    header = "assistantto=functions.time"
    text = f'{before}{header}<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    reasoning = "Look up." if before else ""
    for parts in (text, [text]):
        assert read(parser_of("gpt_oss"), parts) == ("", reasoning, [("time", '{"a": 1}')])


@pytest.mark.parametrize(
    "header",
    [
        "assistantto=functions.time",
        "to=a<|channel|>commentary",
        "assistantto=ato=bto=c",
        "assistant<|channel|>commentaryto=functions.time<|constrain|>json",
    ],
)
def test_a_harmony_header_that_is_not_complete_is_dropped(header):
    text = f"<|channel|>final<|message|>So<|start|>{header}"
    assert read(parser_of("gpt_oss"), [text]) == ("So", "", [])


def test_deepseek_marks():
    assert deepseek_mark("tool sep") == "<\uff5ctool\u2581sep\uff5c>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama4_pythonic", "[weather(city=1e999)]"),
        ("hermes", '<tool_call>{"arguments": {"city": NaN}, "name": "weather"}</tool_call>'),
        ("qwen3_coder", '<tool_call><function=weather>{"city": -1e999}</function></tool_call>'),
    ],
)
def test_numbers_that_json_lacks_are_no_arguments(name, text):
    assert read(parser_of(name), [text]) == (text, "", [])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_long_text_is_read_in_chunks(name):
    """The text that is copied at each step is short, and its length changes no result."""
    parser, text = parser_of(name), "<{[ " * 2_500
    lengths = [len(parser._buffer) for _ in parser.feed(text)]
    assert max(lengths, default=0) < 5_000
    assert read(parser_of(name), [text]) == read(parser_of(name), text)


def test_whitespace_is_withheld_up_to_more_text():
    space = TrailingSpace()
    assert [space.withhold(each) for each in ("a ", "\n", "b", " ")] == ["a", "", " \nb", ""]
    assert (space.take(), space.take()) == (" ", "")
