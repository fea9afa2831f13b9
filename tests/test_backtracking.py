"""The module-level regular expressions of some packages have no adjacent repeats of a character.

Two such repeats divide a run of the character between them in each possible way. Other causes of
more than linear time, such as a search from each character or code around it, are not examined.
"""

import dataclasses
import importlib
import pkgutil
import re
from re import _compiler, _parser

import pytest

import cluster.api.base
import cluster.api.http
import cluster.api.openai
import specdec.engine.requests
import specdec.text
import specdec.types

PACKAGES = (
    cluster.api.base,
    cluster.api.http,
    cluster.api.openai,
    specdec.engine.requests,
    specdec.text,
    specdec.types,
)
UNBOUNDED = 100
REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT)
PASSES = (_parser.AT, _parser.ASSERT, _parser.ASSERT_NOT)


def characters(node, state):
    pattern = _compiler.compile(_parser.SubPattern(state, [node]))
    return frozenset(filter(pattern.fullmatch, map(chr, range(256))))


def after(nodes, state, live):
    """Return the characters of the repeats that may go on after `nodes`. Raise ValueError.

    live: those of the repeats that may go on before them.
    """
    for kind, value in nodes:
        if kind is _parser.SUBPATTERN:
            live = after(value[-1], state, live)
        elif kind is _parser.BRANCH:
            live = frozenset().union(*(after(each, state, live) for each in value[1]))
        elif kind in REPEATS and value[1] < UNBOUNDED:
            live = after(value[2], state, live) | (live if value[0] == 0 else frozenset())
        elif kind in REPEATS:
            live = after_unbounded(*value, state, live)
        elif kind not in PASSES:
            live = frozenset()
    return live


def after_unbounded(least, _, body, state, live):
    if len(body) > 1 or body[0][0] in (_parser.SUBPATTERN, _parser.BRANCH):
        repeated = after([*body, *body], state, live)
    elif (repeated := characters(body[0], state)) & live:
        raise ValueError(f"two repeats of {''.join(sorted(repeated & live))!r} are adjacent")
    return repeated | (live if least == 0 else frozenset())


def check(pattern):
    parsed = _parser.parse(pattern.pattern, pattern.flags)
    after(parsed, parsed.state, frozenset())


def patterns(value):
    """Yield the expressions in a value of a module."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from patterns(each)
    elif isinstance(value, dict):
        yield from patterns([*value.values()])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from patterns([*vars(value).values()])


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.__name__)
def test_no_expression_backtracks(package):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for each in patterns(vars(module)):
            check(each)


@pytest.mark.parametrize("text", [r"\s*\w*\s*", r"\s*(?:a\w+)?\s*", r"(?:a\w*)?\w*b", r"(a*|b)*"])
def test_adjacent_repeats_are_found(text):
    with pytest.raises(ValueError, match="are adjacent"):
        check(re.compile(text))


@pytest.mark.parametrize(
    "text", [r"\s*\w+\s*", r"\s*(?:a\s*)?b", r"(\.\w+)*", r'"(?:[^"\\]|\\.)*"']
)
def test_repeats_that_a_character_separates_are_accepted(text):
    check(re.compile(text))
