"""Python's literals in arguments are values of JSON, or none."""

import pytest

from cluster.api.openai.parsers.literals import literal_or_none


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("['a', \"b\", 1]", ["a", "b", 1]),
        (" {'a': None, 'b': [true, null, False]} ", {"a": None, "b": [True, None, False]}),
        ("[]", []),
        ("'a'", None),
        ("{1, 2}", None),
        ("[open('x')]", None),
        ("[1e999]", None),
        ("[a]", None),
        ("[" * 10_000, None),
    ],
)
def test_only_lists_and_objects_of_literals_are_values(text, value):
    assert literal_or_none(text) == value
