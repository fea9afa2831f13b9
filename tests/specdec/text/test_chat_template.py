# Modules: specdec.types.request
"""Variables, rendering and errors of chat templates."""

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.text.chat_template import ChatTemplate, _variables, decoded_arguments
from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation
from tests.specdec.tiny import train_tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
RICH = (
    "{{ bos_token }}{% set total = messages | length %}{{ total }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)
MESSAGES = ({"role": "user", "content": "Hi"},)
TOOL = {"type": "function", "function": {"name": "ask"}}


@pytest.fixture(scope="module")
def backend():
    return train_tokenizer(300)


def template(backend: PreTrainedTokenizerFast, text: object) -> ChatTemplate:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend.backend_tokenizer, bos_token="<|im_start|>", chat_template=text
    )
    return ChatTemplate(tokenizer)


def test_variables_of_a_template(backend):
    plain, rich = template(backend, PLAIN), template(backend, RICH)
    assert plain.variables == {"messages", "add_generation_prompt"}
    assert (plain.takes_tools, plain.options()) == (False, frozenset())
    assert (rich.takes_tools, rich.options()) == (True, {"enable_thinking"})


def test_rendering_of_a_conversation(backend):
    plain = template(backend, PLAIN)
    assert plain.render(Conversation(MESSAGES)).text == "[user]Hi[assistant]"
    closed = Conversation(MESSAGES, add_generation_prompt=False)
    assert plain.render(closed).text == "[user]Hi"


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        (PLAIN, True),
        ("{% for m in messages if m.role != 'system' or loop.first %}{{ m.content }}{% endfor %}",
         False),
        ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
         "{{ raise_exception('late') }}{% endif %}{{ m.content }}{% endfor %}", False),
    ],
)  # fmt: skip
def test_whether_a_template_takes_later_system_messages(backend, text, takes):
    assert template(backend, text).takes_later_systems == takes


def test_tools_and_variables_reach_the_template(backend):
    rich = template(backend, RICH)
    text = rich.render(
        Conversation(MESSAGES, (TOOL,), template_kwargs={"enable_thinking": True})
    ).text
    assert '"name": "ask"' in text
    assert text.endswith("<think>Hi")
    assert "<think>" not in rich.render(Conversation(MESSAGES)).text


def test_the_last_message_can_be_continued(backend):
    turns = (*MESSAGES, {"role": "assistant", "content": "The river"})
    open_end = Conversation(turns, add_generation_prompt=False, continue_final_message=True)
    assert template(backend, PLAIN + "<end>").render(open_end).text.endswith("[assistant]The river")


@pytest.mark.parametrize(
    ("text", "conversation", "field", "words"),
    [
        (None, Conversation(MESSAGES), "messages", "no chat template"),
        ("{{ raise_exception('no!') }}", Conversation(MESSAGES), "messages", "which raised: no!"),
        ("{{", Conversation(MESSAGES), "messages", "acceptable"),
        (
            PLAIN,
            Conversation(MESSAGES, template_kwargs={"tools": 1}),
            "chat_template_kwargs.tools",
            "variable",
        ),
        (
            "{{ raise_exception('no!') }}",
            Conversation(MESSAGES, template_kwargs={"raise_exception": 1}),
            "chat_template_kwargs.raise_exception",
            "variable of the model's chat template: none",
        ),
        (
            RICH,
            Conversation(MESSAGES, template_kwargs={"bos_token": "x"}),
            "chat_template_kwargs.bos_token",
            "variable of the model's chat template: enable_thinking",
        ),
        (
            PLAIN,
            Conversation(MESSAGES, continue_final_message=True),
            "add_generation_prompt",
            "false",
        ),
    ],
)
def test_the_error_quotes_what_the_template_raised(backend, text, conversation, field, words):
    with pytest.raises(InvalidValueError, match=words) as caught:
        template(backend, text).render(conversation)
    assert caught.value.field == field


def test_of_several_templates_the_one_for_tools_defines_the_variables(backend):
    both = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": RICH}]
    several = template(backend, {each["name"]: each["template"] for each in both})
    assert several.takes_tools
    assert several.render(Conversation(MESSAGES)).text == "[user]Hi[assistant]"


def test_options_belong_to_the_rendered_template(backend):
    several = template(backend, {"default": PLAIN, "tool_use": RICH})
    plain = Conversation(MESSAGES, template_kwargs={"enable_thinking": True})
    with_tools = replace(plain, tools=(TOOL,))
    assert several.unknown_options(plain) == ["enable_thinking"]
    assert several.render(plain).text == "[user]Hi[assistant]"
    assert several.unknown_options(with_tools) == []
    assert "<think>" in several.render(with_tools).text


def test_variables_of_jinja_and_transformers_are_not_options(backend):
    text = "{% set x = namespace(a=1) %}{{ range(2) }}{{ strftime_now('%Y') }}{{ tone }}"
    assert template(backend, text).options() == {"tone"}


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{{ messages[0].secret.part }}", "{{", "{{ 'x' | no_filter }}"]
)
def test_a_fault_of_the_template_is_not_quoted(backend, text):
    with pytest.raises(InvalidValueError) as caught:
        template(backend, text).render(Conversation(MESSAGES))
    assert caught.value.limit == "acceptable to the model's chat template, which failed on them"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ messages.append.__self__.__class__.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'replaced'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_runs_in_a_sandbox(backend, text):
    messages = ({"role": "user", "content": "Hi"},)
    with pytest.raises(InvalidValueError, match="failed on them"):
        template(backend, text).render(Conversation(messages))
    assert messages == ({"role": "user", "content": "Hi"},)


def test_a_filter_does_not_read_private_attributes(backend):
    text = "[{{ ''|attr('__class__') }}]"
    assert template(backend, text).render(Conversation(MESSAGES)).text == "[]"


def test_a_template_inserted_by_a_client_is_text(backend):
    given = "{{ 7 * 7 }}{% for x in messages %}{% endfor %}"
    messages = ({"role": "user", "content": given},)
    assert (
        template(backend, PLAIN).render(Conversation(messages)).text == f"[user]{given}[assistant]"
    )


def test_a_template_that_is_nested_too_deeply_fails_as_others_do():
    assert _variables("{{ " + "(" * 5000 + " }}") == frozenset()


NEEDS_A_DESCRIPTION = "{{ tools[0].function.description + '!' if tools }}" + PLAIN
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)


def test_a_template_that_refuses_a_chat_gets_another_form_of_it(backend):
    turns = ({"role": "system", "content": "Be brief"}, *MESSAGES, *MESSAGES)
    text = template(backend, GEMMA).render(Conversation(turns)).text
    assert text == "[user]Be brief\n\nHi\n\nHi[assistant]"
    assert (
        template(backend, PLAIN)
        .render(Conversation(turns))
        .text.startswith("[system]Be brief[user]")
    )
    assert template(backend, NEEDS_A_DESCRIPTION).render(Conversation(MESSAGES, (TOOL,))).text == (
        "![user]Hi[assistant]"
    )
    answered = Conversation(({"role": "assistant", "content": "Hi"},))
    with pytest.raises(InvalidValueError, match="raised: roles must alternate"):
        template(backend, GEMMA).render(answered)


def test_tools_that_the_template_refuses_are_named(backend):
    text = "{{ raise_exception('no tools') if tools }}" + PLAIN
    with pytest.raises(InvalidValueError) as caught:
        template(backend, text).render(Conversation(MESSAGES, (TOOL,)))
    assert (caught.value.field, caught.value.value) == ("tools", "1 given")


def test_messages_are_named_where_the_template_refuses_them_without_tools_too(backend):
    rendered = []
    made = template(backend, "{{ raise_exception('no tools') if tools }}" + PLAIN)
    made._rendered = lambda chat: rendered.append(chat) or {}["refused"]
    with pytest.raises(InvalidValueError) as caught:
        made.render(Conversation(MESSAGES, (TOOL,)))
    assert (caught.value.field, caught.value.value) == ("messages", f"{len(MESSAGES)} given")
    assert [bool(each.tools) for each in rendered].count(False) == 1


@pytest.mark.parametrize(
    ("calls", "omits"),
    [
        ("{% for t in m.tool_calls or [] %}({{ t.function.name }}){% endfor %}", False),
        ("{% if m.tool_calls %}({{ m.tool_calls[0].function.name }}){% endif %}", True),
        ("{{ raise_exception('one') if m.tool_calls and m.tool_calls[1:] }}", False),
        ("", False),
    ],
)
def test_whether_a_template_omits_calls(backend, calls, omits):
    for content in ("{{ m.content }}", "{{ m.content[0].text }}"):
        text = "{% for m in messages %}" + content + calls + "{% endfor %}"
        assert template(backend, text).omits_calls == omits


LOOP = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
FILTER = "{{ (m.content | selectattr('type', 'equalto', 'text') | first).text }}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}"
STRICT = "{{ raise_exception('no text') if m.content is string }}{{ m.content[0].text }}"
TWO_TURNS = (*MESSAGES, {"role": "assistant", "content": "Yes?"})


@pytest.mark.parametrize("read", [LOOP, FILTER, EITHER, STRICT, "{{ m.content[0]['text'] }}"])
@pytest.mark.parametrize("turns", [MESSAGES, TWO_TURNS])
def test_a_template_gets_contents_in_the_form_that_it_reads(backend, read, turns):
    text = "{% for m in messages %}[{{ m.role }}]" + read + "{% endfor %}"
    expected = "".join(f"[{each['role']}]{each['content']}" for each in turns)
    assert template(backend, text).render(Conversation(turns)).text == expected


def test_each_of_several_templates_gets_its_form(backend):
    parts = "{% for m in messages %}" + LOOP + "{% endfor %}"
    several = template(backend, {"default": PLAIN, "tool_use": parts})
    assert several.render(Conversation(MESSAGES)).text == "[user]Hi[assistant]"
    assert several.render(Conversation(MESSAGES, (TOOL,))).text == "Hi"


def test_a_message_of_parts_can_be_continued(backend):
    text = "{% for m in messages %}[{{ m.role }}]" + LOOP + "<end>{% endfor %}"
    open_end = Conversation(TWO_TURNS, add_generation_prompt=False, continue_final_message=True)
    assert template(backend, text).render(open_end).text == "[user]Hi<end>[assistant]Yes?"


CALLS = (
    "{% for m in messages %}{{ m.content }}{% for t in m.tool_calls or [] %}"
    "{% for k, v in t.function.arguments|items %}({{ k }}={{ v }}){% endfor %}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": 1}', "(a=1)"),
        ("", ""),
        (" ", ""),
        ("null", ""),
        ('{"a": "cut', "(a=cut)"),
        ('{"a": 1, "b": [2, {"c": ', "(a=1)(b=[2, {}])"),
        ("{", ""),
        ('{"a": 1}}', "(a=1)"),
        (' {"a": 1}</tool_call>', "(a=1)"),
        ("[1]", "(arguments=[1])"),
        ("a=1", "(arguments=a=1)"),
        ("{a: 1}", "(arguments={a: 1})"),
        ('{"a":' * 9000, "(arguments=" + '{"a":' * 9000 + ")"),
    ],
)
def test_a_chat_with_calls_that_a_model_wrote_badly_can_go_on(backend, arguments, written):
    function = {"name": "ask", "arguments": decoded_arguments(arguments)}
    for call in ({"function": function}, {"id": "c1", "function": dict(function)}):
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert (
            template(backend, CALLS).render(Conversation((*MESSAGES, turn))).text == f"Hi{written}"
        )


def test_arguments_stay_as_they_are_where_a_template_writes_any(backend):
    text = CALLS.replace("t.function.arguments|items", "[(1, t.function.arguments)]")
    call = {"function": {"name": "ask", "arguments": '{"a": "cut'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert template(backend, text).render(Conversation((turn,))).text == '(1={"a": "cut)'


MARKS = ("<think>", "</think>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ start }}{% endif %}"
)
WRITES_BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NEEDS_AN_ANSWER = "{{ raise_exception('no question') if not add_generation_prompt }}" + CHATML
MARKED = {"role": "user", "content": "What do <think> and </think> mean? <think>"}


def answer_start(backend, text, turns, *, start="", **fields):
    conversation = Conversation(turns, template_kwargs={"start": start}, **fields)
    made = template(backend, text)
    return made.answer_start(conversation, made.render(conversation).text, MARKS)


@pytest.mark.parametrize("turns", [MESSAGES, (MARKED,), (MARKED, TWO_TURNS[1], MARKED)])
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("", ""),
        ("<think>", "<think>"),
        ("<think>\n", "<think>\n"),
        ("<think>\nOkay, ", "<think>\nOkay, "),
        ("</think>", "</think>"),
        ("<think>\n\n</think>\n\n", "</think>\n\n"),
        ("<think></think>\nIn short: ", "</think>\nIn short: "),
    ],
)
def test_an_answer_starts_at_the_last_mark_after_the_messages(backend, turns, start, expected):
    assert answer_start(backend, CHATML, turns, start=start) == expected


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (CHATML, "The answer", "The answer"),
        (CHATML, "<think>\nTwo and", "<think>\nTwo and"),
        (CHATML, "<think>a</think>So", "</think>So"),
        (WRITES_BLOCKS, "The answer", "</think>\n\nThe answer"),
        (WRITES_BLOCKS, "<think>\nTwo and", "<think>\nTwo and"),
    ],
)
@pytest.mark.parametrize("before", [MESSAGES, (MARKED,), ()])
def test_a_continued_message_is_the_start_of_the_answer(backend, text, content, expected, before):
    turns = (*before, {"role": "assistant", "content": content})
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert answer_start(backend, text, turns, **fields) == expected


def test_no_answer_starts_in_a_prompt_that_ends_with_a_question(backend):
    assert answer_start(backend, CHATML, (MARKED, TWO_TURNS[1]), add_generation_prompt=False) == ""
    assert answer_start(backend, NEEDS_AN_ANSWER, (MARKED,)) == ""
    assert answer_start(backend, NEEDS_AN_ANSWER, MESSAGES, start="<think>") == "<think>"


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{{ start }}{% endif %}"
)


@pytest.mark.parametrize("start", ["", "<|channel|>final<|message|>"])
def test_an_answer_of_gpt_oss_starts_at_its_role(backend, start):
    mark, made = "<|start|>assistant", template(backend, HARMONY)
    for turns in (MESSAGES, TWO_TURNS):
        chat = Conversation(turns, template_kwargs={"start": start})
        assert made.answer_start(chat, made.render(chat).text, [mark]) == f"{mark}{start}"
        no_start = replace(chat, add_generation_prompt=False)
        assert made.answer_start(no_start, made.render(no_start).text, [mark]) == ""
