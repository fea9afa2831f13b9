import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.openai.json_span import JsonSpan

LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
).filter(lambda value: isinstance(value, dict | list | str))


@given(VALUES, st.text(max_size=5), st.integers(1, 7))
def test_the_end_of_the_value_does_not_depend_on_the_split(value, rest, size):
    text = json.dumps(value)
    span, taken = JsonSpan(), 0
    whole = text + rest
    for start in range(0, len(whole), size):
        taken += span.feed(whole[start : start + size])
    assert (taken, span.is_complete) == (len(text), True)


@pytest.mark.parametrize("text", ["{", '{"a": "}', '{"a": [1}', '"\\"', "[[]"])
def test_a_truncated_value_is_not_complete(text):
    span = JsonSpan()
    assert (span.feed(text), span.is_complete) == (len(text), False)
