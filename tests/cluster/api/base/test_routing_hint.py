"""Routing hints: equal beginnings of prompts have equal keys, whatever API and spelling."""

import json
from itertools import pairwise

import pytest

from cluster.api.base.routing_hint import (
    MAX_OUTPUT_TOKENS,
    MAX_PARTS,
    MAX_READ_BYTES,
    RoutingHint,
    boundaries,
)

SYSTEM = {"role": "system", "content": "You answer in verse. " * 20}
FIRST = {"role": "user", "content": "Why is the sky blue? " * 20}
ANSWER = {"role": "assistant", "content": "It scatters. " * 20}
SECOND = {"role": "user", "content": "And at night?"}


def hint_of(**fields):
    return RoutingHint.of_body(json.dumps(fields).encode())


def common(one, other):
    """Return the number of equal keys at the beginning; they must differ after it."""
    equal = [left == right for left, right in zip(one.prefix_keys, other.prefix_keys, strict=False)]
    count = equal.index(False) if False in equal else len(equal)
    assert not any(equal[count:])
    return count


def test_a_next_turn_has_all_keys_of_the_turn_before():
    before = hint_of(model="m", messages=[SYSTEM, FIRST])
    after = hint_of(model="m", messages=[SYSTEM, FIRST, ANSWER, SECOND])
    assert common(before, after) == len(before.prefix_keys) > 5
    assert after.prompt_tokens > before.prompt_tokens


def test_the_spelling_and_order_of_fields_make_no_difference():
    body = {"model": "m", "messages": [SYSTEM, FIRST], "temperature": 0.5}
    spaced = json.dumps(dict(reversed(body.items())), indent=2, ensure_ascii=False)
    assert RoutingHint.of_body(spaced.encode()) == hint_of(**body)


@pytest.mark.parametrize("field", ["model", "cache_salt", "lora_path"])
def test_what_shares_no_kv_shares_no_key(field):
    one, other = ({"prompt": "text " * 100, field: value} for value in ("a", "b"))
    assert common(hint_of(**one), hint_of(**other)) == 0


def test_a_scope_does_not_run_on_into_the_prompt():
    salt, text = "s" * 128, "text " * 100
    one, other = RoutingHint.of((salt,), text.encode(), 1), RoutingHint.of(("",), b"s" * 128, 1)
    longer = RoutingHint.of(("",), (salt + text).encode(), 1)
    keys = {*other.prefix_keys, *longer.prefix_keys}
    assert not keys & set(one.prefix_keys)
    split = [RoutingHint.of(scope, text.encode(), 1) for scope in (("a\0b",), ("a", "b"))]
    assert not set(split[0].prefix_keys) & set(split[1].prefix_keys)


def test_tools_and_instructions_come_before_the_messages():
    tools = [{"type": "function", "function": {"name": "f" * 200}}]
    with_tools = hint_of(messages=[SYSTEM, FIRST], tools=tools)
    other = hint_of(messages=[FIRST], tools=tools)
    assert common(with_tools, other) == 1
    assert common(with_tools, hint_of(messages=[SYSTEM, FIRST])) == 0


@pytest.mark.parametrize("name", ["prompt", "text", "input_ids", "input"])
def test_token_ids_and_texts_are_prompts(name):
    value = list(range(500)) if name == "input_ids" else "words and words " * 125
    hint = hint_of(**{name: value})
    assert hint.prompt_tokens == 500
    assert sum(hint.tokens_by_key) == 480


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, MAX_OUTPUT_TOKENS),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_output_tokens": 11}, 11),
        ({"sampling_params": {"max_new_tokens": 13}}, 13),
        ({"max_tokens": 100_000}, MAX_OUTPUT_TOKENS),
        ({"max_tokens": None}, MAX_OUTPUT_TOKENS),
        ({"max_tokens": -5}, 1),
        ({"max_tokens": "many"}, MAX_OUTPUT_TOKENS),
    ],
)
def test_the_expected_output_is_the_limit_or_a_default(fields, expected):
    assert hint_of(prompt="text", **fields).output_tokens == expected


def test_a_session_is_a_header_or_the_prompt_cache_key():
    body = json.dumps({"prompt": "text", "prompt_cache_key": "key"}).encode()
    other = b'{"prompt": "other"}'
    assert RoutingHint.of_body(body).session == RoutingHint.of_body(other, "key").session
    assert RoutingHint.of_body(body, "header").session != RoutingHint.of_body(body).session
    assert RoutingHint.of_body(other).session == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b"{}",
        b'{"messages": []}',
        b'{"a":' * 10_000,
        b'{"prompt": "' + b"x" * MAX_READ_BYTES + b'"}',
    ],
)
def test_other_bodies_have_no_hint(body):
    assert RoutingHint.of_body(body) is None


@pytest.mark.parametrize("part", ["word", ["word"], {"a": "b"}])
def test_of_many_small_parts_the_first_ones_are_read(part):
    some, more = (hint_of(prompt=[part] * count) for count in (MAX_PARTS, 2 * MAX_PARTS))
    assert some == more
    assert some.prompt_tokens > MAX_PARTS // 4
    assert hint_of(prompt=[[]] * MAX_PARTS + ["word"]) is None


def test_lone_surrogates_and_large_numbers_are_no_error():
    assert RoutingHint.of_body(b'{"prompt": [5000000000, 1e400, true, null, {"a": "b"}]}')
    assert RoutingHint.of(("\ud800",), b"x" * 200, None, "\ud800").prefix_keys


@pytest.mark.parametrize("session", ["", "abc"])
@pytest.mark.parametrize("num_bytes", [0, 10, 1000, 100_000])
def test_an_encoded_hint_is_decoded(num_bytes, session):
    hint = RoutingHint.of(("m", ""), b"x" * num_bytes, 5, session)
    text = hint.encode()
    assert RoutingHint.decode(text) == hint
    assert text.isascii()
    assert text.isprintable()


@pytest.mark.parametrize("text", ["", "my-session", "specdec-", "specdec-!!", "specdec-AAAA"])
def test_other_session_ids_are_no_hint(text):
    assert RoutingHint.decode(text) is None


def test_a_long_prompt_has_few_keys_and_a_short_distance_between_them():
    ends = list(boundaries(2**20))
    assert len(ends) < 300
    assert all(end - begin <= max(128, begin / 32) for begin, end in pairwise(ends))
