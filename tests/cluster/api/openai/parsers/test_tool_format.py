"""Tool prompts, and the grammars of tool calls."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.api.openai.parsers.tool_families import tool_parser
from cluster.api.openai.parsers.tool_format import (
    HERMES,
    LLAMA,
    TOOL_FORMATS,
    Tool,
    forced_calls,
    format_of_template,
    optional_calls,
    tool_prompt,
)
from specdec.text.grammar.translation import to_llguidance
from specdec.types.sampling.sampling_params import StructuredOutput

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", "Reports the weather.", CITY, is_strict=True)
TIME = Tool("time")
TOOLS = (WEATHER, TIME)
GOOD, BAD = {"city": "Ulm", "days": 2}, {"city": 7}


def matches(spec: StructuredOutput, text: str) -> bool:
    """Return whether the grammar derives the text."""
    matcher = LLMatcher(LLTokenizer("byte"), to_llguidance(spec))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_a_forced_call_has_arguments_that_match_the_schema(form):
    one, several = (forced_calls(TOOLS, form, is_parallel=each) for each in (False, True))
    call, other = form.write("weather", GOOD), form.write("time", {"any": [1]})
    for spec in (one, several):
        assert matches(spec, call)
        assert matches(spec, other)
        assert not matches(spec, form.write("weather", BAD))
        assert not matches(spec, form.write("unknown", {}))
        assert not matches(spec, f"Well. {call}")
    both = call + form.separator + other
    assert (matches(one, both), matches(several, both)) == (False, True)


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_a_free_text_may_contain_calls_of_known_functions(form):
    spec = optional_calls(TOOLS, form, is_parallel=True)
    for text in ("", "It rains.", "1 < 2", form.write("weather", GOOD)):
        assert matches(spec, text)
    assert matches(spec, form.write("time", {"any": 1}))
    for text in (form.write("weather", BAD), form.write("unknown", {})):
        assert not matches(spec, text)


@pytest.mark.parametrize(
    "before",
    ["", " ", "\r\n\t", "<|python_tag|>", "\n<|python_tag|> ", "[", "[]", "Now:<|python_tag|>"],
)
def test_a_text_that_parses_as_a_call_is_not_plain_text(before):
    spec = optional_calls(TOOLS, LLAMA, is_parallel=False)
    text = before + LLAMA.write("weather", BAD)
    parser = tool_parser(LLAMA, [WEATHER])
    assert list(parser.feed(text))
    assert parser.num_calls == 1
    assert not matches(spec, text)
    assert matches(spec, f"{before}Well. {{}}")


@pytest.mark.parametrize("loose", [{"anyOf": [{"type": "integer"}, {"type": "object"}]}, {}])
def test_arguments_are_an_object_for_any_schema(loose):
    spec = forced_calls([Tool("time", "", loose)], HERMES, is_parallel=False)
    assert matches(spec, HERMES.write("time", {"a": 1}))
    assert not matches(spec, HERMES.write("time", 1))


def test_a_marked_call_may_follow_a_text():
    spec = optional_calls(TOOLS, HERMES, is_parallel=False)
    call = HERMES.write("weather", GOOD)
    assert matches(spec, f"Let me see.\n{call}")
    assert not matches(spec, f"{call}\n{call}")
    assert not matches(spec, "<tool_call>nothing")


def test_arguments_of_optional_calls_are_free_unless_strict():
    spec = optional_calls((Tool("weather", "", CITY), WEATHER), HERMES, is_parallel=True)
    assert matches(spec, HERMES.write("weather", BAD))


def test_a_schema_cannot_disable_its_requirements():
    loose = Tool("weather", "", {**CITY, "x-guidance": {"lenient": True}}, is_strict=True)
    assert "lenient" not in (forced_calls([loose], HERMES, is_parallel=False).grammar or "")


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    "days",
    [{"uniqueItems": True}, {"not": {}}, {"if": {}, "then": {}}, {"items": {"pattern": "^(?=a)"}}],
    ids=str,
)
def test_only_a_strict_tool_is_refused_for_what_no_grammar_enforces(days, is_strict):
    assert is_refused({"type": "array", **days}, is_strict=is_strict) is is_strict


@pytest.mark.parametrize("days", [{"pattern": "^("}, {"type": "array", "minItems": 10**400}])
def test_an_invalid_value_is_refused_of_any_tool(days):
    assert is_refused(days, is_strict=False)


def is_refused(schema, *, is_strict):
    tool = Tool("weather", "", {"properties": {"days": schema}}, is_strict=is_strict)
    spec = forced_calls([tool], HERMES, is_parallel=False)
    return LLMatcher(LLTokenizer("byte"), to_llguidance(spec), log_level=0).is_error()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ('{"tool_name": name, "parameters": ...}', None),
        ('... <tool_call>\n{"name": <function-name>, "arguments": ...', HERMES),
        ('{"name": function name, "parameters": dictionary}', LLAMA),
        ("'<|tool_call>call:' + name", TOOL_FORMATS["gemma4"]),
        ("tools: <|tool_list_start|>[", TOOL_FORMATS["lfm2"]),
        ("respond only with <|tool_call|> followed by", TOOL_FORMATS["granite"]),
        ("'<TOOLCALL>[' <tool_call>", TOOL_FORMATS["nemotron_json"]),
        ("<|START_ACTION|>[", TOOL_FORMATS["cohere_command3"]),
        ("<minimax:tool_call>\n<invoke", TOOL_FORMATS["minimax_m2"]),
        ("<seed:tool_call>\n<function=", TOOL_FORMATS["seed_oss"]),
        ("<tool_call>\n<function=", TOOL_FORMATS["qwen3_coder"]),
    ],
)
def test_the_format_is_derived_from_the_template(template, form):
    assert format_of_template(template) is form


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
def test_the_prompt_shows_the_functions_and_a_parsable_call(form):
    prompt = tool_prompt(TOOLS, form)
    assert json.dumps(CITY) in prompt
    example = form.write("NAME", {"PARAMETER": "VALUE"})
    assert example in prompt
    parser = tool_parser(form, [Tool("NAME")])
    assert list(parser.feed(example)) != []
    assert parser.num_calls == 1
