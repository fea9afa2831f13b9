"""A chat that its template refuses is rendered in another form; others stay as they are."""

import json

import pytest
from jinja2 import TemplateError

from specdec.text.chat_rewrites import (
    RefusedChatError,
    render_some_form,
    with_one_system,
    with_single_calls,
)
from specdec.types.request import Conversation


def turn(role, content="", **fields):
    return {"role": role, "content": content, **fields}


def call(name, call_id=None, arguments=None):
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"type": "function", "id": call_id, "function": function}


def require(is_met, words):
    if not is_met:
        raise ValueError(words)


def written(turns):
    """Write a chat as some templates do, with calls and without reasoning."""
    texts = []
    for each in turns:
        names = [made["function"]["name"] for made in each.get("tool_calls", ())]
        texts.append(f"{each['role']}: {each['content']}" + "".join(f"({name})" for name in names))
    return " | ".join(texts)


def any_form(chat):
    return written(chat.messages)


def alternating(chat):
    """Gemma 1 and 2."""
    require(chat.messages[0]["role"] != "system", "System role not supported")
    return strictly_alternating(chat)


def strictly_alternating(chat):
    """Mistral 0.1: the same message for every order."""
    for place, each in enumerate(chat.messages):
        require((each["role"] == "user") == (place % 2 == 0), "roles must alternate")
    return written(chat.messages)


def alternating_around_calls(chat):
    """Mistral Nemo."""
    others = (each for each in chat.messages if each["role"] not in ("system", "tool"))
    for place, each in enumerate(each for each in others if not each.get("tool_calls")):
        require((each["role"] == "user") == (place % 2 == 0), "roles must alternate")
    return written(chat.messages)


def without_text_beside_calls(chat):
    """Mistral Nemo and Small 3.2."""
    alternating_around_calls(chat)
    called = [{**each, "content": ""} if "tool_calls" in each else each for each in chat.messages]
    return written(called)


def system_first(chat):
    """Qwen 3.5."""
    require(all(each["role"] != "system" for each in chat.messages[1:]), "must be at the beginning")
    return written(chat.messages)


def without_repeats(chat):
    roles = [each["role"] for each in chat.messages]
    require(all(map(str.__ne__, roles, roles[1:])), "repeated role")
    return written(chat.messages)


def short_ids(chat):
    """Mistral, which also requires that the ids are those of calls."""
    called = [made["id"] for each in chat.messages for made in each.get("tool_calls", ())]
    answered = [each["tool_call_id"] for each in chat.messages if each["role"] == "tool"]
    require(all(len(each) == 9 and each.isalnum() for each in [*called, *answered]), "length 9")
    require(len({*called}) == len(called) and called == answered, "one result for each call")
    return written(chat.messages)


def single_calls(chat):
    """Llama 3.x, which also needs objects."""
    for each in chat.messages:
        calls = each.get("tool_calls", ())
        require(len(calls) < 2, "single tool-calls at once")
        for made in calls:
            dict(made["function"]["arguments"].items())
    return written(chat.messages)


def analysis_or_text(chat):
    """gpt-oss."""
    for each in chat.messages:
        both = each.get("content") and each.get("reasoning_content")
        require(not (both and "tool_calls" in each), "both content and thinking")
    thoughts = [each.get("reasoning_content", "") for each in chat.messages]
    return written(chat.messages) + "".join(thoughts)


USER, ANSWER, RESULT = turn("user", "u"), turn("assistant", "a"), turn("tool", "r")
SYSTEM = turn("system", "s")
CALLED = turn("assistant", "", tool_calls=[call("f")])
TWO = turn("assistant", "x", tool_calls=[call("f", "1"), call("g", "2")], reasoning="t")


def result(call_id):
    return turn("tool", f"r{call_id}", tool_call_id=call_id)


@pytest.mark.parametrize(
    ("render", "turns", "expected"),
    [
        (any_form, [USER, USER, TWO], "user: u | user: u | assistant: x(f)(g)"),
        (alternating, [USER, USER, ANSWER], "user: u\n\nu | assistant: a"),
        (alternating, [USER, ANSWER, ANSWER, USER], "user: u | assistant: a\n\na | user: u"),
        (alternating, [SYSTEM, USER], "user: s\n\nu"),
        (alternating, [SYSTEM, USER, USER], "user: s\n\nu\n\nu"),
        (alternating, [SYSTEM, SYSTEM, ANSWER], "user: s\n\ns | assistant: a"),
        (
            system_first,
            [SYSTEM, USER, USER, SYSTEM, ANSWER],
            "system: s | user: u | user: u\n\ns | assistant: a",
        ),
        (
            without_repeats,
            [USER, USER, CALLED, RESULT, USER],
            "user: u\n\nu | assistant: (f) | tool: r | user: u",
        ),
        (
            short_ids,
            [TWO, result("1"), result("2")],
            "assistant: x(f)(g) | tool: r1 | tool: r2",
        ),
        (
            short_ids,
            [TWO, result(""), result("2")],
            "assistant: x(f)(g) | tool: r | tool: r2",
        ),
        (short_ids, [CALLED, RESULT], "assistant: (f) | tool: r"),
        (strictly_alternating, [SYSTEM, USER, USER], "user: s\n\nu\n\nu"),
        (
            alternating_around_calls,
            [SYSTEM, USER, CALLED, RESULT, USER],
            "system: s | user: u | assistant: (f) | tool: r | assistant:  | user: u",
        ),
        (
            alternating_around_calls,
            [USER, USER, CALLED, RESULT, USER, USER],
            "user: u\n\nu | assistant: (f) | tool: r | assistant:  | user: u\n\nu",
        ),
        (
            without_text_beside_calls,
            [USER, ANSWER, CALLED, RESULT, ANSWER, USER, USER],
            "user: u | assistant: a | user:  | assistant: (f) | tool: r | assistant: a"
            " | user: u\n\nu",
        ),
        (
            without_repeats,
            [USER, ANSWER, CALLED, RESULT, USER],
            "user: u | assistant: a | user:  | assistant: (f) | tool: r | assistant:  | user: u",
        ),
        (
            single_calls,
            [USER, TWO, result("1"), result("2"), USER],
            "user: u | assistant: x(f) | tool: r1 | assistant: (g) | tool: r2 | user: u",
        ),
        (
            single_calls,
            [TWO, turn("assistant", "", tool_calls=[call("h", "3", '{"a": "cut')])],
            "assistant: x(f) | assistant: (g) | assistant: (h)",
        ),
        (
            single_calls,
            [turn("assistant", "", tool_calls=[call("h", "3", "cut")]), TWO],
            "assistant: (h) | assistant: x(f) | assistant: (g)",
        ),
        (
            analysis_or_text,
            [USER, turn("assistant", "x", tool_calls=[call("f")], reasoning_content="t"), RESULT],
            "user: u | assistant: (f) | tool: rt\n\nx",
        ),
    ],
)
def test_a_refused_chat_has_a_form_that_the_template_accepts(render, turns, expected):
    chat = Conversation(tuple(turns))
    assert render_some_form(chat, render) == expected
    assert chat == Conversation(tuple(turns))


def test_only_what_the_template_refuses_is_changed():
    rendered = []

    def render(chat):
        rendered.append(chat)
        return "".join(made["function"]["arguments"] for made in chat.messages[2]["tool_calls"])

    called = turn("assistant", "", tool_calls=[call("f", "1", {"a": 1}), call("g", "2", {})])
    chat = Conversation((USER, USER, called, result("1")))
    assert render_some_form(chat, render) == '{"a": 1}{}'
    assert rendered[0] is chat
    assert rendered[-1].messages[:2] == (USER, USER)
    assert len(rendered[-1].messages[2]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("render", "turns", "words"),
    [
        (alternating, [ANSWER, USER], "must alternate"),
        (alternating, [SYSTEM, USER, RESULT, RESULT], "must alternate"),
    ],
)
def test_the_failure_is_the_one_that_no_rewrite_prevents(render, turns, words):
    with pytest.raises(RefusedChatError, match=words):
        render_some_form(Conversation(tuple(turns)), render)


def test_the_failure_is_one_that_the_template_describes():
    def render(chat):
        if isinstance(chat.messages[0]["tool_calls"][0]["function"]["arguments"], str):
            raise TypeError
        raise TemplateError("no calls")

    with pytest.raises(RefusedChatError, match="no calls") as caught:
        render_some_form(Conversation((CALLED,)), render)
    assert caught.value.is_described


@pytest.mark.parametrize(
    ("num_chars", "least", "most"),
    [(1, 20, 60), (900_000, 5, 11), (4_000_000, 2, 2), (20_000_000, 1, 1)],
)
def test_a_long_chat_is_rendered_in_few_forms(num_chars, least, most):
    numbers = []

    def render(_):
        numbers.append(len(numbers))
        raise ValueError(numbers[-1])

    function = {"name": "f", "parameters": {"properties": {"a": {}}}}
    turns = (SYSTEM, SYSTEM, USER, turn("user", "u" * num_chars), TWO, RESULT, USER)
    with pytest.raises(RefusedChatError, match=r"\d"):
        render_some_form(Conversation(turns, ({"function": function},)), render)
    assert least <= len(numbers) <= most


def tool_then_system_then_ids(chat):
    """A template that describes all its failures but the one with a bare tool."""
    assert [each["function"]["name"] for each in chat.tools] == ["f"] * len(chat.tools)
    if chat.messages[0]["role"] == "system":
        raise TemplateError("System role not supported")
    if len(chat.messages[1]["tool_calls"][0]["id"]) != 9:
        raise TemplateError("length 9")
    return written(chat.messages)


def counted_calls_then_objects(chat):
    """Llama 3.x: its second failure is not described."""
    if any(len(each.get("tool_calls", ())) > 1 for each in chat.messages):
        raise TemplateError("single tool-calls at once")
    return single_calls(chat)


BAD = turn("assistant", "", tool_calls=[call("h", "3", "cut")])


@pytest.mark.parametrize(
    ("render", "turns", "expected"),
    [
        (tool_then_system_then_ids, [SYSTEM, USER, CALLED], "user: s\n\nu | assistant: (f)"),
        (
            counted_calls_then_objects,
            [TWO, BAD],
            "assistant: x(f) | assistant: (g) | assistant: (h)",
        ),
    ],
)
def test_a_rewrite_that_makes_it_worse_is_taken_back(render, turns, expected):
    tools = ({"type": "function", "function": {"name": "f"}},)
    assert render_some_form(Conversation(tuple(turns), tools), render) == expected


def test_a_failure_in_a_rewrite_hides_none_of_the_template():
    def render(chat):
        raise TemplateError("never")

    called = turn("assistant", "", tool_calls=[call("f", "1", {"a": {1, 2}})])
    with pytest.raises(RefusedChatError, match="never"):
        render_some_form(Conversation((called,)), render)


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize(
    ("function", "properties"),
    [
        ({"name": "f"}, {}),
        ({"name": "f", "parameters": {"type": "object"}}, {}),
        ({"name": "f", "description": None, "parameters": None}, {}),
        (
            {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": True}}},
            {"a": {"type": "string", "description": ""}, "b": True},
        ),
    ],
)
def test_what_a_tool_may_leave_out_is_empty(function, properties, is_bare):
    def render(chat):
        [tool] = chat.tools
        inner = tool if is_bare else tool["function"]
        names = inner["parameters"]["properties"]
        return json.dumps([inner["name"], inner["description"] + "", names])

    tools = ({"type": "function", "function": function},)
    text = render_some_form(Conversation((USER,), tools), render)
    assert json.loads(text) == ["f", "", properties]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (["1", "2"], "r1 | r2"),
        (["2", "1"], "r1 | r2"),
        (["1"], "r1 | "),
        (["2"], " | r2"),
        (["", ""], "r | r"),
        (["", "1"], "r1 | r"),
        (["2", ""], "r | r2"),
        (["3", "1", "2"], "r1 | r3 r2"),
        ([], " | "),
    ],
)
def test_a_result_follows_its_call(results, expected):
    made = with_single_calls([USER, TWO, *map(result, results), ANSWER])
    assert [len(each["tool_calls"]) for each in made if "tool_calls" in each] == [1, 1]
    assert (made[0], made[-1], made[1]["reasoning"]) == (USER, ANSWER, "t")
    groups = [[]]
    for each in made[2:-1]:
        if each["role"] == "tool":
            groups[-1].append(each["content"])
        else:
            groups.append([])
    assert " | ".join(map(" ".join, groups)) == expected
    assert len(TWO["tool_calls"]) == 2


def test_later_system_messages_become_text_of_the_user():
    roles = "system", "system", "user", "system", "user", "assistant", "system", "tool", "user"
    given = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    made = with_one_system(given)
    assert [(each["role"], each["content"]) for each in made] == [
        ("system", "0\n\n1"),
        ("user", "2\n\n3\n\n4"),
        ("assistant", "5"),
        ("user", "6"),
        ("tool", "7"),
        ("user", "8"),
    ]
    assert given[0]["content"] == "0"


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["Ada", "Ada"], "Ada"), (["Ada", "Bob"], None), ([None, "Bob"], None), (["Ada", None], None)],
)
def test_a_message_of_several_has_a_name_only_if_all_have_it(names, expected):
    turns = [turn("user", "u", name=name) if name else USER for name in names]
    named = []

    def render(chat):
        named.extend(each.get("name") for each in chat.messages[:1])
        return alternating(chat)

    assert render_some_form(Conversation((*turns, ANSWER)), render) == "user: u\n\nu | assistant: a"
    assert named[-1] == expected
    later = with_one_system([SYSTEM, turn("user", "u", name="Ada"), SYSTEM])
    assert "name" not in later[-1]
