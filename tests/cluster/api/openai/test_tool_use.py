"""Resolution of tools and tool_choice."""

import pytest

from cluster.api.openai.chat_schema import ChatRequest
from cluster.api.openai.tool_format import HERMES, LLAMA
from cluster.api.openai.tool_use import tool_use
from specdec.types.errors import InvalidValueError

MESSAGES = [{"role": "user", "content": "x"}]


def definition(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def use(form=HERMES, special=(), **fields):
    tools = fields.pop("tools", [definition("a"), definition("b")])
    request = ChatRequest.model_validate({"messages": MESSAGES, "tools": tools, **fields})
    return tool_use(request, form, lambda text: text in special)


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_no_tools_in_the_prompt_without_tools_or_with_choice_none():
    assert use(tools=[]) is None
    assert use(tools=[], tool_choice="none") is None
    assert use(tool_choice="none") is None


def test_the_text_is_unconstrained_unless_the_request_constrains_it():
    free = use()
    assert [each.name for each in free.callable] == ["a", "b"]
    assert free.structure is None
    assert use(parallel_tool_calls=False).structure is not None
    assert use(tools=[definition("a", strict=True)]).structure is not None


def test_only_a_named_function_can_be_called():
    forced = use(tool_choice=named("b"))
    assert [each.name for each in forced.callable] == ["b"]
    assert [each.name for each in forced.tools] == ["a", "b"]  # the prompt has all
    assert '\\"b\\"' in forced.structure.grammar
    assert '\\"a\\"' not in forced.structure.grammar


def test_marks_that_are_special_tokens_are_shown_or_omitted():
    free = use(special=[HERMES.opening])
    assert free.shows_special_tokens
    forced = use(special=[HERMES.opening], tool_choice="required")
    assert (forced.form.opening, forced.shows_special_tokens) == ("", False)
    parser = forced.parser()
    assert list(parser.feed('{"name": "a", "arguments": {}}'))
    assert parser.num_calls == 1
    assert not use(LLAMA, special=[HERMES.opening]).shows_special_tokens


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("c")}, "tool_choice.function.name"),
        ({"tools": [definition("a"), definition("a")]}, "tools[1].function.name"),
        (
            {"tools": [definition("a", parameters={"type": "array"})]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [definition("a", strict=True)], "special": ["<tool_call>"]},
            "tools.function.strict",
        ),
        ({"parallel_tool_calls": False, "special": ["<tool_call>"]}, "parallel_tool_calls"),
    ],
)
def test_the_error_names_the_invalid_field(fields, field):
    with pytest.raises(InvalidValueError) as caught:
        use(**fields)
    assert caught.value.field == field
