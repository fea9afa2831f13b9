# Modules: cluster.api.openai.parsers.call_syntax
# Modules: cluster.api.openai.parsers.named_calls, cluster.api.openai.parsers.tagged_calls
"""A corpus of model outputs, good and bad: a file of `outputs/` or `outputs/reasoning/` per parser.

A form is a text and what it has to be read as: content, reasoning, and calls.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from cluster.api.openai.parsers.reasoning import SYNTAXES, ReasoningParser
from cluster.api.openai.parsers.tool_families import call_marks_of, tool_parser
from cluster.api.openai.parsers.tool_format import TOOL_FORMATS, Tool
from tests.cluster.api.openai.family_outputs import FAMILIES, Output
from tests.cluster.api.openai.parsers.test_tool_families import read

PROPERTIES = {
    "city": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "days": {"type": "integer"},
    "unit": {"$ref": "#/$defs/Unit"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Unit": {"enum": ["C", "F"]}}}
TOOLS = (Tool("weather", parameters=PARAMETERS), Tool("time"))
_OUTPUTS = Path(__file__).parent / "outputs"
FORMS = {
    f"{prefix}{path.stem}": json.loads(path.read_text())
    for prefix, folder in (("", _OUTPUTS), ("reasoning_", _OUTPUTS / "reasoning"))
    for path in sorted(folder.glob("*.json"))
}
_WORDS = """
    name arguments parameters function functions json type strict null tool_call tool_calls
    tool_call_begin tool_call_end tool_call_argument_begin tool_calls_section_begin
    tool_calls_section_end TOOL_CALLS ARGS CALL_ID abcdef123 python_tag python_start python_end
    parameter arg_key arg_value channel message start end call return constrain analysis final
    commentary assistant code to true tool_call_start tool_call_end TOOLCALL
    START_ACTION END_ACTION START_RESPONSE END_RESPONSE tool_name tool_call_id minimax seed invoke
    thought None think Here is my thought process response tool begin sep calls
"""
FORMAT_WORDS = frozenset(_WORDS.split())
"""Words of marks, keys and headers, which are no content."""


def parser_of(name):
    reasoning = name.removeprefix("reasoning_")
    if reasoning == name:
        return tool_parser(TOOL_FORMATS[name], TOOLS)
    form = TOOL_FORMATS["hermes"]
    return ReasoningParser(
        SYNTAXES[reasoning], lambda: tool_parser(form, TOOLS), call_marks_of(form)
    )


def expected(form):
    calls = [(name, given) for name, given in form.get("calls", ())]
    return form.get("content", ""), form.get("reasoning", ""), calls


def read_json(name, parts, **end):
    content, reasoning, calls = read(parser_of(name), parts, **end)
    return content, reasoning, [(name, json.loads(given)) for name, given in calls]


@pytest.mark.parametrize("name", FORMS)
def test_an_output_is_read_alike_wherever_it_is_split(name):
    for form in FORMS[name]:
        text = form["text"]
        assert read_json(name, [text]) == expected(form), form["form"]
        whole = read(parser_of(name), [text])
        assert read(parser_of(name), text) == whole, f"{form['form']}, character by character"
        for end in range(1, len(text)):
            assert read(parser_of(name), [text[:end], text[end:]]) == whole, (text[:end], text)


@pytest.mark.parametrize("name", FORMS)
def test_nothing_vanishes_but_marks(name):
    """Every word of an output, and of one that ends anywhere, is in what is read."""
    for text in (form["text"] for form in FORMS[name]):
        for end in (*range(1, len(text), 3), len(text)):
            content, reasoning, calls = read(parser_of(name), [text[:end]])
            found = " ".join((content, reasoning, *(f"{name} {given}" for name, given in calls)))
            half = re.split(r"\W", text[:end])[-1] if end < len(text) else ""
            assert words(text[:end]) - {half} <= words(re.sub(r"\\.", " ", found)), text[:end]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_cut_is_not_whole_and_leaves_no_beginning(name):
    for text in (form["text"] for form in FORMS[name]):
        content, _, calls = read_json(name, [text])
        for end in range(1, len(text), 2):
            begun, _, cut = read(parser_of(name), [text[:end]], is_cut=True)
            assert content.startswith((begun.rstrip(), begun[:-1].rstrip())), text[:end]
            assert len(cut) <= len(calls), text[:end]
            for (called, given), (known, whole) in zip(cut, calls, strict=False):
                assert (called, json_or(given, whole)) == (known, whole), text[:end]


def test_every_parser_has_forms():
    assert FORMS.keys() == {*TOOL_FORMATS, *(f"reasoning_{name}" for name in SYNTAXES)}


def words(text):
    """Return the words of a text without those of the format, such as harmony's recipients."""
    return set(re.findall(r"\w{2,}", re.sub(r"to=[\w.]*", "", text))) - FORMAT_WORDS


def json_or(text, default):
    try:
        return json.loads(text)
    except ValueError:
        return default


STRING, NULL = {"type": "string"}, {"type": "null"}
STRINGS = (
    STRING,
    {"anyOf": [STRING, NULL]},
    {"oneOf": [NULL, {"$ref": "#/$defs/Text"}]},
    {"allOf": [{"minLength": 1}, STRING]},
    {"$ref": "#/definitions/Text"},
)
VALUES = ("12345", '{"a": 1}', "[1]", "true", "1e3", "1 </parameter> 2", "a </arg_value> b")
VALUES += ("</invoke>", '<parameter name="y">')
VALUES += ("</tool_call>", "<tool_call>", "<parameter=y>", "<arg_key>y</arg_key>", "</function>")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
@pytest.mark.parametrize("schema", STRINGS, ids=str)
def test_strings_between_tags_stay_strings_whatever_they_contain(name, schema):
    defs = {"Text": {"$ref": "#/$defs/Inner"}, "Inner": STRING}
    properties = {"x": schema, "y": schema, "n": {"type": "integer"}}
    parameters = {"properties": properties, "$defs": defs, "definitions": defs}
    write = FAMILIES[name][1]
    for value, other in itertools.product(VALUES, VALUES):
        given = {"x": value, "y": other, "n": 7}
        text = write(Output("", (("f", given),)))
        parser = tool_parser(TOOL_FORMATS[name], [Tool("f", parameters=parameters)])
        content, _, [(_, arguments)] = read(parser, [text])
        assert (content, json.loads(arguments)) == ("", given)
