"""Accepted and rejected forms of prompts and conversations."""

import numpy as np
import pytest

from specdec.llm.prompts import PromptParts, read_conversations, read_prompts
from specdec.types.errors import InvalidValueError

TEXT, TOKENS = PromptParts("a"), PromptParts(None, (1, 2))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("a", [TEXT]),
        (["a", "a"], [TEXT, TEXT]),
        ([1, 2], [TOKENS]),
        ([[1, 2], "a"], [TOKENS, TEXT]),
        ({"prompt": "a"}, [TEXT]),
        ({"prompt_token_ids": (1, 2)}, [TOKENS]),
        ({"prompt_token_ids": [1, 2], "prompt": "a"}, [PromptParts("a", (1, 2))]),
        ([{"prompt": "a", "cache_salt": "mine"}], [PromptParts("a", None, "mine")]),
        ([], []),
        (("a",), [TEXT]),
    ],
)
def test_accepted_prompts(given, parts):
    assert read_prompts(given) == parts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "prompts is 3; it must be a string, .*, or a list of these$"),
        (["a", None], r"prompts\[1\] is None"),
        ({"prompt": 3}, "prompts is {'prompt': 3}"),
        ({"prompt_token_ids": "a"}, "prompts is"),
        ({"prompt_token_ids": []}, "prompts is"),
        ({"prompt_token_ids": ["a"]}, "prompts is"),
        ({"cache_salt": "mine"}, "prompts is {}"),
        ({"prompt": 3, "cache_salt": "mine"}, "prompts is {'prompt': 3};"),
        ({"prompt": "a", "cache_salt": 1}, r"prompts\.cache_salt is 'of type int'; .* a string"),
        (
            {"prompt": "a", "cache_salt": "mine\ud800"},
            r"prompts\.cache_salt is '5 characters'; it must be valid Unicode",
        ),
        (
            [{"prompt": "a", "multi_modal_data": 1}],
            r"unknown key of prompts\[0\] 'multi_modal_data'",
        ),
        ([["a"]], r"prompts\[0\] is \['a'\]; .*, or token ids$"),
        (np.zeros(2), "prompts is array"),
        (b"ab", "prompts is b'ab'"),
        (["a", bytearray(b"ab")], r"prompts\[1\] is bytearray"),
        ({"prompt_token_ids": memoryview(b"ab")}, "prompts is {'prompt_token_ids': <memory"),
    ],
)
def test_rejected_prompts(given, message):
    with pytest.raises(InvalidValueError, match=message):
        read_prompts(given)


TURN = {"role": "user", "content": "Hello"}


def test_one_conversation_and_several():
    [one] = read_conversations([TURN], add_generation_prompt=False)
    assert (one.messages, one.add_generation_prompt) == ((TURN,), False)
    assert [len(each.messages) for each in read_conversations([[TURN], [TURN, TURN]])] == [1, 2]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [conversation] = read_conversations([{"role": "user", "content": parts}])
    assert conversation.messages[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"messages is \[\]; it must be at least one message"),
        (TURN, "messages is {'role': .*}; it must be a list of messages"),
        ("Hello", "messages is 'Hello'; it must be a list of messages"),
        (
            [{**TURN, "tool_calls": ["a"]}],
            r"messages\[0\].tool_calls is \['a'\]; it must be a list",
        ),
        ([[TURN], []], r"messages\[1\] is \[\]"),
        ([{"content": "a"}], r"messages\[0\] is {'content': 'a'}; it must be a mapping with"),
        ([[TURN], ["a"]], r"messages\[1\]\[0\] is 'a'"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is 3; it must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\].content is .*: the model reads text only",
        ),
    ],
)
def test_rejected_conversations(given, message):
    with pytest.raises(InvalidValueError, match=message):
        read_conversations(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": {"type": "function"}}, "tools is {'type': 'function'}; it must be a list of"),
        ({"tools": ["ask"]}, r"tools is \['ask'\]"),
        ({"chat_template_kwargs": ["a"]}, r"chat_template_kwargs is \['a'\]; it must be a mapping"),
    ],
)
def test_rejected_options(options, message):
    with pytest.raises(InvalidValueError, match=message):
        read_conversations([TURN], **options)


def test_options_may_be_none():
    [conversation] = read_conversations([TURN], tools=None, chat_template_kwargs=None)
    assert (conversation.tools, conversation.template_kwargs) == ((), {})


@pytest.mark.parametrize("arguments", ['{"who": 1}', {"who": 1}])
@pytest.mark.parametrize("has_function", [True, False])
def test_tool_call_arguments_are_decoded_for_the_template(arguments, has_function):
    def call(arguments):
        function = {"name": "ask", "arguments": arguments}
        return {"id": "c1", "function": function} if has_function else function

    generated = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    [conversation] = read_conversations([generated])
    assert conversation.messages[0]["tool_calls"] == [call({"who": 1})]


def test_tool_call_arguments_that_are_no_json_are_kept():
    calls = [{"function": {"name": "ask", "arguments": "{"}}, {"function": {"name": "now"}}]
    [conversation] = read_conversations([{"role": "assistant", "tool_calls": calls}])
    assert conversation.messages[0]["tool_calls"] == calls
