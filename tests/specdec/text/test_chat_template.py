# Modules: specdec.types.request
"""Variables, rendering and errors of chat templates."""

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.text.chat_template import ChatTemplate, _variables
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
    assert plain.render(Conversation(MESSAGES)) == "[user]Hi[assistant]"
    closed = Conversation(MESSAGES, add_generation_prompt=False)
    assert plain.render(closed) == "[user]Hi"


def test_tools_and_variables_reach_the_template(backend):
    rich = template(backend, RICH)
    text = rich.render(Conversation(MESSAGES, (TOOL,), template_kwargs={"enable_thinking": True}))
    assert '"name": "ask"' in text
    assert text.endswith("<think>Hi")
    assert "<think>" not in rich.render(Conversation(MESSAGES))


def test_the_last_message_can_be_continued(backend):
    turns = (*MESSAGES, {"role": "assistant", "content": "The river"})
    open_end = Conversation(turns, add_generation_prompt=False, continue_final_message=True)
    assert template(backend, PLAIN + "<end>").render(open_end).endswith("[assistant]The river")


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
    assert several.render(Conversation(MESSAGES)) == "[user]Hi[assistant]"


def test_options_belong_to_the_rendered_template(backend):
    several = template(backend, {"default": PLAIN, "tool_use": RICH})
    options = {"enable_thinking": True}
    with pytest.raises(InvalidValueError):
        several.render(Conversation(MESSAGES, template_kwargs=options))
    assert several.render(Conversation(MESSAGES, (TOOL,), template_kwargs=options))


def test_variables_of_jinja_and_transformers_are_not_options(backend):
    text = "{% set x = namespace(a=1) %}{{ range(2) }}{{ strftime_now('%Y') }}{{ tone }}"
    assert template(backend, text).options() == {"tone"}


@pytest.mark.parametrize("text", ["{{ 1 / 0 }}", "{{ messages[0].secret.part }}", "{{"])
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
    assert template(backend, text).render(Conversation(MESSAGES)) == "[]"


def test_a_template_inserted_by_a_client_is_text(backend):
    given = "{{ 7 * 7 }}{% for x in messages %}{% endfor %}"
    messages = ({"role": "user", "content": given},)
    assert template(backend, PLAIN).render(Conversation(messages)) == f"[user]{given}[assistant]"


def test_a_template_that_is_nested_too_deeply_fails_as_others_do():
    assert _variables("{{ " + "(" * 5000 + " }}") == frozenset()
