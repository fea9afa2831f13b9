"""Messages and tools are converted to the input of chat templates, and to grammars."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster.api.openai.answer_reading import AnswerReading
from cluster.api.openai.conversation import (
    make_conversation,
    render_tools_as_text,
    tool_use,
    turns,
)
from cluster.api.openai.parsers.pieces import CallStart, Content
from cluster.api.openai.parsers.tool_format import HERMES, LLAMA, TOOL_FORMATS, Tool
from cluster.api.openai.schemas.chat_schema import AnswerMessage, ChatRequest, Message
from specdec.types.errors import InvalidValueError

CALL = {"id": "c1", "type": "function", "function": {"name": "ask", "arguments": '{"who": 1}'}}
TOOL = Tool("ask", "Asks.")


def message(**fields):
    return Message.model_validate(fields)


def test_roles_and_texts():
    made = turns(
        [
            message(role="developer", content="Be brief"),
            message(role="user", content=[{"type": "text", "text": "a"}] * 2),
            message(role="assistant", content=None, tool_calls=[CALL], annotations=[]),
            message(role="tool", content="bread", tool_call_id="c1"),
            message(role="assistant", content="Bread", reasoning_content="hm", refusal=None),
        ]
    )
    assert [each["role"] for each in made] == ["system", "user", "assistant", "tool", "assistant"]
    assert [each["content"] for each in made] == ["Be brief", "a\na", "", "bread", "Bread"]
    assert made[2]["tool_calls"][0]["function"] == {"name": "ask", "arguments": {"who": 1}}
    assert made[4]["reasoning_content"] == made[4]["reasoning"] == "hm"


def test_reasoning_of_an_earlier_answer_has_two_names():
    [made] = turns([message(role="assistant", content="a", reasoning="hm")])
    assert made["reasoning_content"] == made["reasoning"] == "hm"
    [made] = turns([message(role="assistant", content="a", reasoning="b", reasoning_content="hm")])
    assert made["reasoning_content"] == made["reasoning"] == "hm"


def test_a_part_may_have_the_fields_of_its_answer():
    """The Agents SDK for JavaScript sends an answer back as such a part, beside its calls."""
    copied = dict.fromkeys(AnswerMessage.model_fields, "hm") | {"refusal": None, "annotations": []}
    del copied["content"]
    part = {**copied, "type": "text", "text": "a", "role": "assistant", "tool_calls": [CALL]}
    assert turns([message(role="assistant", content=[part])]) == [
        {"role": "assistant", "content": "a"}
    ]


def test_an_answer_may_have_the_fields_that_clients_add_to_it():
    """OpenAI's client parses it, LiteLLM keeps what other services returned."""
    function = {**CALL["function"], "parsed_arguments": {"who": 1}, "provider_specific_fields": {}}
    answer = {"parsed": {"a": 1}, "thinking_blocks": [{"type": "thinking"}], "reasoning_items": []}
    fields = {"type": "text", "provider_specific_fields": {"citations": None}}
    call = {**CALL, "function": function, "provider_specific_fields": {"signature": "x"}}
    given = message(role="assistant", content="{}", tool_calls=[call], **answer, **fields)
    assert turns([given]) == turns([message(role="assistant", content="{}", tool_calls=[CALL])])


def test_the_name_of_a_message_reaches_the_template():
    [made] = turns([message(role="user", content="Hi", name="Ada")])
    assert made == {"role": "user", "content": "Hi", "name": "Ada"}


@pytest.mark.parametrize(("omits", "num_turns"), [(False, 3), (True, 4)])
def test_calls_that_a_template_would_omit_have_messages_of_their_own(omits, num_turns):
    """The template of gpt-oss renders the first call of a message."""
    template = SimpleNamespace(takes_tools=True, takes_later_systems=True, omits_calls=omits)
    calls = [CALL, {**CALL, "id": "c2"}]
    results = [{"role": "tool", "content": "a", "tool_call_id": each} for each in ("c1", "c2")]
    request = ChatRequest(messages=[{"role": "assistant", "tool_calls": calls}, *results])
    made = make_conversation(request, None, template, LLAMA)
    called = [each for each in made.messages if each["role"] == "assistant"]
    assert [len(each["tool_calls"]) for each in called] == ([1, 1] if omits else [2])
    assert len(made.messages) == num_turns


@pytest.mark.parametrize("takes_tools", [True, False])
def test_a_system_message_with_tools_as_text_is_not_trusted(takes_tools):
    """Their descriptions may be those of a server of tools, with control tokens."""
    template = SimpleNamespace(takes_tools=takes_tools, takes_later_systems=True, omits_calls=False)
    request = ChatRequest(messages=[{"role": "user", "content": "Hi"}], tools=[definition("f")])
    tools = tool_use(request, HERMES, lambda text: False)
    assert make_conversation(request, tools, template, HERMES).trusts_system is takes_tools
    assert make_conversation(request, None, template, HERMES).trusts_system


def test_marks_of_caches_are_accepted():
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "a", **mark}
    request = ChatRequest(
        messages=[{"role": "user", "content": [part], **mark}], tools=[{**definition("f"), **mark}]
    )
    assert turns(request.messages) == [{"role": "user", "content": "a"}]


def test_arguments_that_are_not_json_are_unchanged():
    call = {**CALL, "function": {"name": "ask", "arguments": "{"}}
    [made] = turns([message(role="assistant", tool_calls=[call])])
    assert made["tool_calls"][0]["function"]["arguments"] == "{"


def test_half_a_character_in_arguments_does_not_end_a_conversation():
    """A model can write it, and the client sends the answer back."""
    given = r'{"who": "\ud83d baker \ud83d\ude00", "\ude00": 1}'
    call = {**CALL, "function": {"name": "ask", "arguments": given}}
    [made] = turns([message(role="assistant", tool_calls=[call])])
    arguments = made["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"who": "\ufffd baker \U0001f600", "\ufffd": 1}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x" * 1_000_001}, "messages content length"),
    ],
)
def test_an_invalid_message_is_named(fields, field):
    with pytest.raises(InvalidValueError) as caught:
        turns([message(**fields)])
    assert caught.value.field == field


def test_tools_are_described_in_the_system_message():
    user = message(role="user", content="Hi")
    first, second = render_tools_as_text(turns([user]), [TOOL], HERMES)
    assert (first["role"], second["content"]) == ("system", "Hi")
    assert '"name": "ask"' in first["content"]
    system = message(role="system", content="Be brief")
    merged, _ = render_tools_as_text(turns([system, user]), [TOOL], HERMES)
    assert merged["content"] == f"Be brief\n\n{first['content']}"


def test_without_tools_nothing_is_added():
    made = turns([message(role="user", content="Hi")])
    assert render_tools_as_text(made, [], HERMES) == [{"role": "user", "content": "Hi"}]


def test_calls_and_results_become_text():
    made = render_tools_as_text(
        turns(
            [
                message(role="assistant", content="Well.", tool_calls=[CALL, CALL]),
                message(role="tool", content="one"),
                message(role="tool", content="two"),
                message(role="user", content="And?"),
                message(role="tool", content="three"),
            ]
        ),
        [],
        HERMES,
    )
    call = HERMES.write("ask", {"who": 1})
    assert [each["role"] for each in made] == ["assistant", "user", "user", "user"]
    assert made[0]["content"] == f"Well.\n{call}\n{call}"
    result = "<tool_response>\n{}\n</tool_response>"
    assert made[1]["content"] == f"{result.format('one')}\n{result.format('two')}"
    assert made[3]["content"] == result.format("three")
    assert all(set(each) == {"role", "content"} for each in made)


MESSAGES = [{"role": "user", "content": "x"}]


def definition(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def use(form=HERMES, special=(), **fields):
    tools = fields.pop("tools", [definition("a"), definition("b")])
    request = ChatRequest.model_validate({"messages": MESSAGES, "tools": tools} | fields)
    return tool_use(request, form, lambda text: text in special)


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_allowed_tools_are_the_only_ones():
    chosen = [named("b")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": chosen}}
    allowed = use(tool_choice=choice)
    assert [each.name for each in allowed.tools] == ["b"]
    assert allowed == use(tools=[definition("b")], tool_choice="required")
    chosen[0] = named("c")
    with pytest.raises(InvalidValueError, match="one of the tools: a, b") as caught:
        use(tool_choice=choice)
    assert caught.value.field == "tool_choice.allowed_tools.tools[0].function.name"


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


@pytest.mark.parametrize(("form", "special"), [(HERMES, ()), (HERMES, ["<tool_call>"])])
def test_an_answer_with_a_schema_may_be_a_call_instead(form, special):
    schema = {"type": "object", "properties": {"x1y": {"const": 1}}, "required": ["x1y"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    made = use(form, special, response_format=wanted)
    assert made.structure.grammar.startswith("start: answer | call")
    assert "x1y" in made.structure.grammar
    assert (made.is_forced, made.shows_special_tokens) == (False, False)
    assert made.form.opening == ("" if special else "<tool_call>")


def test_only_a_named_function_can_be_called():
    forced = use(tool_choice=named("b"))
    assert [each.name for each in forced.callable] == ["b"]
    assert [each.name for each in forced.tools] == ["a", "b"]  # the prompt has all
    assert '\\"b\\"' in forced.structure.grammar
    assert '\\"a\\"' not in forced.structure.grammar


def test_one_call_needs_no_grammar_where_its_marks_are_special_tokens():
    single = use(special=[HERMES.opening], parallel_tool_calls=False)
    assert (single.is_parallel, single.structure) == (False, None)


def test_marks_that_are_special_tokens_are_shown_or_omitted():
    free = use(special=[HERMES.opening])
    assert free.shows_special_tokens
    forced = use(special=[HERMES.opening], tool_choice="required")
    assert (forced.form.opening, forced.shows_special_tokens) == ("", False)
    parser = forced.parser()
    assert list(parser.feed('{"name": "a", "arguments": {}}'))
    assert parser.num_calls == 1
    assert not use(LLAMA, special=[HERMES.opening]).shows_special_tokens


@pytest.mark.parametrize("kind", ["object", ["object"], ["object", "null"], ["null", "object"]])
def test_the_type_of_arguments_may_be_a_list_with_object(kind):
    [tool] = use(tools=[definition("a", parameters={"type": kind})]).tools
    assert tool.parameters == {"type": kind}
    assert use(tools=[definition("a", parameters={"type": kind})], tool_choice="required")


@pytest.mark.parametrize(
    ("name", "mark", "call"),
    [
        ("llama3_json", "<|python_tag|>", '{"name": "a", "parameters": {}}'),
        ("llama4_pythonic", "<|python_start|>", "[a()]"),
    ],
)
def test_a_call_after_a_text_needs_a_mark_that_may_be_a_special_token(name, mark, call):
    form = TOOL_FORMATS[name]
    made = use(form, [mark])
    assert made.shows_special_tokens
    assert not use(form, [mark], tool_choice="required").shows_special_tokens
    parser = made.parser()
    first, *_ = parser.feed(f"Let me see.{mark}{call}")
    assert (first, parser.num_calls) == (Content("Let me see."), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": named("a")},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_forced_calls_have_ids_of_the_models_own_format(fields):
    """Its template rejects others, or reads the name of the function from them."""
    answered = {"role": "assistant", "tool_calls": [CALL, CALL]}
    for name, is_accepted in (
        ("mistral", re.compile(r"[a-zA-Z0-9]{9}").fullmatch),
        ("kimi_k2", re.compile("functions.a:2").fullmatch),
        ("hermes", re.compile(r"call_\w+").fullmatch),
    ):
        form = TOOL_FORMATS[name]
        made = use(form, [form.opening], messages=[*MESSAGES, answered], **fields)
        assert made.form.opening == ""
        [start] = AnswerReading(made, None).wanted([CallStart(0, "a")])
        assert is_accepted(start.call_id)
        assert made.identified(CallStart(1, "a", "x")).call_id == "x"


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
    ],
)
def test_the_error_names_the_invalid_field(fields, field):
    with pytest.raises(InvalidValueError) as caught:
        use(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "is_enforced"),
    [
        ({}, True),
        ({"special": ["<tool_call>"]}, False),
        ({"special": ["<tool_call>"], "tool_choice": "required"}, True),
    ],
)
def test_strict_tools_that_no_grammar_constrains_have_a_warning(fields, is_enforced):
    found = use(tools=[definition("a", strict=True)], **fields)
    assert (found.structure is not None) is is_enforced
    assert [each.field for each in found.warnings] == ["tools.function.strict"] * (not is_enforced)
    assert not use(tools=[definition("a")], **fields).warnings


@pytest.mark.parametrize(
    ("fields", "is_assumed"),
    [
        ({}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [definition("a", strict=True)]}, True),
        ({"tool_choice": "required"}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_calls_in_an_assumed_format_have_a_warning_unless_a_grammar_writes_them(fields, is_assumed):
    """A grammar of any text with calls constrains those in the assumed format alone."""
    found = use(replace(HERMES, is_assumed=True), **fields).warnings
    assert [each.field for each in found] == ["tools"] * is_assumed
    assert not use(HERMES, **fields).warnings


@pytest.mark.parametrize(
    "given",
    [
        {"name": "a", "description": "Asks.", "parameters": {"type": "object"}, "strict": False},
        {"name": "a", "description": "Asks.", "parameters": {"type": "object"}},
        {"name": "a", "parameters": {"type": "object"}, "strict": True},
    ],
)
def test_a_template_reads_the_fields_of_a_tool_as_a_client_writes_them(given):
    """As with transformers and `LLM.chat`, which pass the client's definition unchanged."""
    tool = {"type": "function", "function": given}
    [made] = use(tools=[tool]).tools
    assert json.dumps(made.template_definition) == json.dumps(tool)
