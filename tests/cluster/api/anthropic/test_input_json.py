"""The input of a call: an object for any text, in streams and whole answers."""

import json
import random

import pytest
from pydantic_core import from_json

from cluster.api.anthropic.input_json import InputWriter

VALID = (
    '{"who": "baker", "days": [1, -2.5e3, true, null, {}, []], "a": {"b": {"c": ""}}}',
    r' { "text" : "\"quoted\" \\ \/ \b\f\n\r\t \u00e9 \ud83d\ude00 \uD83D\uDE00 é 😀" ,'
    '\t"b":\n[ ] }',
    "{}",
)
SLIPS = {
    "trailing commas": ('{"a": [1, 2,], "b": 3 , }', {"a": [1, 2], "b": 3}),
    "commas too many": ('{, "a": [,1,, 2]}', {"a": [1, 2]}),
    "control characters": ('{"a": "1\n2\t3\0"}', {"a": "1\n2\t3\0"}),
    "invalid escapes": (r'{"a": "C:\dir \x \u12 \u12g4 \'"}', {"a": r"C:\dir \x \u12 \u12g4 \'"}),
    "halves of characters": (
        r'{"a": "\ud83d", "b": "\ude00\ud83d\ud83d\ude00\ud83dA\ud83d\u0041"}',
        {"a": "\ufffd", "b": "\ufffd\ufffd\U0001f600\ufffdA\ufffdA"},
    ),
    "no numbers": ('{"a": NaN, "b": -Infinity, "c": 1e999, "d": 01, "e": 1}',
                   {"a": None, "b": None, "c": None, "d": None, "e": 1}),
    "constants of Python": ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
    "two strings": ('{"a": ["b" "c"], "d": 1}', {"a": ["b"]}),
    "no value": ('{"a": {"b": }, "c": 1}', {"a": {"b": None}}),
    "no colon": ('{"a" "b"}', {"a": None}),
    "another bracket": ('{"a": [1}', {"a": [1]}),
    "single quotes": ("{'a': 'b'}", {}),
    "a list": ("[1]", {}),
    "a string": ('"a"', {}),
    "text after it": ('{"a": 1}, "b"', {"a": 1}),
    "a mark within it": ('{"a": "b"</tool_call>', {"a": "b"}),
}  # fmt: skip


def written(text, size):
    writer = InputWriter()
    return "".join(writer.feed(text[start : start + size]) for start in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 3, 1_000])
@pytest.mark.parametrize("text", VALID)
def test_json_stays_as_it_is(text, size):
    assert written(text, size) == text


@pytest.mark.parametrize("size", [1, 2, 5, 1_000])
@pytest.mark.parametrize(("text", "given"), SLIPS.values(), ids=SLIPS)
def test_slips_of_the_model_become_an_object(text, given, size):
    assert json.loads(written(text, size)) == given


@pytest.mark.parametrize("text", ["", '{"who": "ba', r'{"a": "b\ud83d', '{"a": 12', '{"a": 1, '])
def test_what_is_cut_stays_incomplete(text):
    given = written(text, 4)
    assert text.startswith(given)
    with pytest.raises(ValueError, match=r"."):
        json.loads(given)


@pytest.mark.parametrize("size", [1, 3, 1_000])
@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('{"who": "ba', {"who": "ba"}),
        (r'{"a": "b\ud83d', {"a": "b\ufffd"}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": [12', {"a": [12]}),
        ('{"a": 1, ', {"a": 1}),
        ('{"a', {"a": None}),
        ('{"a": ', {"a": None}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_what_the_model_ends_early_is_completed(text, given, size):
    writer = InputWriter()
    parts = [writer.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert json.loads("".join(parts) + writer.finish()) == given


def test_a_call_without_text_has_no_input():
    assert InputWriter().finish() == ""


@pytest.mark.parametrize("word", ["1" * 4_300, "1" * 4_301, f"0.{'1' * 5_000}", "a" * 9_000])
def test_a_word_is_a_value_up_to_a_length_however_it_is_split(word):
    whole = written(f'{{"a": {word}, "b": 1}}', 20_000)
    assert json.loads(whole) == {"a": int(word) if len(word) == 4_300 else None, "b": 1}
    assert written(f'{{"a": {word}, "b": 1}}', 1_000) == whole


def test_text_that_cannot_change_is_not_held():
    writer = InputWriter()
    assert [writer.feed(each) for each in ('{"a": "b', "c\\", "n", "\\ud83d", "\\ude00d")] == [
        '{"a": "b', "c", "\\n", "", "\\ud83d\\ude00d",
    ]  # fmt: skip


def test_random_errors_give_an_object_that_no_split_changes():
    """The errors are one to three other characters in each of 2,000 valid texts."""
    rng = random.Random(5)
    marks = [*'{}[]",:\\', "\\u", "\\ud83d", "\n", "'", " ", "1", "e", "x", "é", "NaN"]
    for _ in range(2_000):
        text, num_errors = rng.choice(VALID), rng.randint(1, 3)
        for _ in range(num_errors):
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(marks) + text[place + rng.randint(0, 2) :]
        whole = written(text, len(text))
        assert written(text, rng.randint(1, 9)) == whole
        value = from_json(whole or "{}", allow_partial=True)  # as the client reads a stream
        json.dumps(value, ensure_ascii=False).encode()
        assert isinstance(value, dict)
