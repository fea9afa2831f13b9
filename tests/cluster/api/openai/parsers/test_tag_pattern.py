"""Patterns of tags against texts that may go on."""

import re

import pytest

from cluster.api.openai.parsers.tag_pattern import SPACE, TagMatch, TagPattern, first_match

NAMED = TagPattern(SPACE, "<a=", re.compile(r"(?P<name>[a-z]+)"), ">")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<a=b>c", TagMatch(5, "b")),
        (" \n<a=bc>", TagMatch(8, "bc")),
        ("<x", None),
        ("<a=1>", None),
        ("<a=b c>", None),
        ("", TagMatch(0, "", is_partial=True)),
        ("  ", TagMatch(2, "", is_partial=True)),
        ("<a", TagMatch(0, "", is_partial=True)),
        ("<a=", TagMatch(3, "", is_partial=True)),
        ("<a=b", TagMatch(4, "b", is_partial=True)),
    ],
)
def test_a_match_is_whole_or_partial_or_none(text, expected):
    assert NAMED.match(text) == expected


def test_a_whole_match_is_preferred():
    other = TagPattern(" <a=b>", "!")
    assert first_match((other, NAMED), " <a=b>") == (NAMED, TagMatch(6, "b"))
    assert first_match((other,), " <a=b>") == (other, TagMatch(6, "", is_partial=True))
    assert first_match((other, NAMED), "?") is None
