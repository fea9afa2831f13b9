"""The thirty outputs of each family under the grammars of a request: calls forced, and free."""

import json
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.api.openai.conversation import tool_use
from cluster.api.openai.parsers.tool_format import TOOL_FORMATS
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.config.parsers import ToolFormatName
from specdec.text.grammar.translation import to_llguidance
from tests.cluster.api.openai.family_outputs import FAMILIES, OUTPUTS, TOOLS
from tests.cluster.api.openai.parsers.test_tool_families import read


def ordered(output):
    """Return an output whose arguments have the order of the schema, which grammars enforce."""
    names = list(TOOLS[0].parameters["properties"])
    calls = (
        (name, dict(sorted(given.items(), key=lambda each: names.index(each[0]))))
        for name, given in output.calls
    )
    return replace(output, calls=tuple(calls))


ORDERED = [ordered(each) for each in OUTPUTS]
FORCED = [each for each in ORDERED if each.calls]
JSON_FAMILIES = [name for name in get_args(ToolFormatName) if TOOL_FORMATS[name].is_json]


@cache
def use_of(name, choice, *, is_strict=False):
    """Return the tools of a request for a model whose calls are in a format."""
    functions = [{**each.template_definition["function"], "strict": is_strict} for each in TOOLS]
    tools = [{"type": "function", "function": each} for each in functions]
    messages = [{"role": "user", "content": "text"}]
    request = ChatRequest(messages=messages, tools=tools, tool_choice=choice)
    return tool_use(request, TOOL_FORMATS[name], lambda text: False)


@cache
def tokenizer():
    return LLTokenizer("byte")


def accepts(structure, text):
    """Return whether the grammar derives the text; without one any text is derived."""
    if structure is None:
        return True
    matcher = LLMatcher(tokenizer(), to_llguidance(structure))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("name", get_args(ToolFormatName))
def test_forced_calls_are_derived_and_read_alike_however_they_are_split(name):
    use = use_of(name, "required")
    for output in FORCED:
        written = (use.form.write(name, dict(given)) for name, given in output.calls)
        text = use.form.separator.join(written)
        assert accepts(use.structure, text), text
        content, reasoning, calls = whole = read(use.parser(), [text])
        assert (content, reasoning) == ("", "")
        assert [(name, json.loads(given)) for name, given in calls] == list(output.calls)
        assert read(use.parser(), text) == whole
        for end in range(1, len(text), 7):
            assert read(use.parser(), [text[:end], text[end:]]) == whole, (text, end)


@pytest.mark.parametrize("name", get_args(ToolFormatName))
def test_a_forced_answer_is_calls_of_known_functions_alone(name):
    use = use_of(name, "required")
    call = use.form.write("time", {})
    assert not accepts(use.structure, f"Let me see. {call}")
    assert not accepts(use.structure, use.form.write("delete_all", {}))
    assert not accepts(use.structure, "")


@pytest.mark.parametrize(
    ("family", "is_strict"),
    [
        *((family, False) for family in FAMILIES),
        *((family, True) for family in FAMILIES if FAMILIES[family][0] in JSON_FAMILIES),
    ],
)
def test_free_outputs_are_derived_and_read_as_without_a_grammar(family, is_strict):
    """Others refuse strict tools unless calls are forced."""
    name, write = FAMILIES[family]
    use = use_of(name, "auto", is_strict=is_strict)
    assert (use.structure is not None) is is_strict
    for output in ORDERED:
        text = write(output)
        assert accepts(use.structure, text), text
        calls = read(use.parser(), text)[2]
        assert [(name, json.loads(given)) for name, given in calls] == list(output.calls)


@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_strict_free_calls_match_their_schema(name):
    use = use_of(name, "auto", is_strict=True)
    assert not accepts(use.structure, use.form.write("get_weather", {"days": "three"}))
    assert accepts(use_of(name, "auto").structure, use.form.write("get_weather", {"days": "three"}))
