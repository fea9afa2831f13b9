# Modules: cluster.api.http.bodies
"""Bodies are text that can be sent back, in errors or in an answer."""

import json
from contextlib import suppress
from random import Random

import pytest
from pydantic_core import from_json

from cluster.api.http.bodies import MAX_JSON_DEPTH, ApiRequest, read_json
from specdec.types.errors import InvalidValueError


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (b'{"a": [1, "\xf0\x9f\x98\x80"]}', {"a": [1, "\U0001f600"]}),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"a backslash: \\ud83d"', r"a backslash: \ud83d"),
        (b"\xef\xbb\xbf{}", {}),
    ],
)
def test_json_in_utf_8(body, content):
    assert read_json(body) == content


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (rb'"\ud83d"', UnicodeEncodeError),
        (rb'{"\uDE00": 1}', UnicodeEncodeError),
        (b'"\xed\xa0\xbd"', UnicodeDecodeError),
        (json.dumps("UTF-16").encode("utf-16"), UnicodeDecodeError),
        (b'"\xff"', UnicodeDecodeError),
        (b"{", json.JSONDecodeError),
        (b"", json.JSONDecodeError),
        (b"1" * 5000, ValueError),
    ],
)
def test_what_is_no_such_json(body, error):
    with pytest.raises(error) as caught:
        read_json(body)
    assert caught.type is error


PARTS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b'"a"', b'"a":', b"\\", b"\\u0061", b"\\ud83d"),
    *(
        b"\\ude00",
        b"\xc3\xa9",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\x00",
        b" ",
        b"\t\n\r",
        b"\x0b",
        b"true",
    ),
    *(
        b"null",
        b"NaN",
        b"-Infinity",
        b"-",
        b"-0",
        b"0",
        b"01",
        b"1.5",
        b".",
        b"e",
        b"1e400",
        b"9" * 20,
    ),
]


def test_every_text_is_read_as_by_pythons_parser():
    """A text that the fast parser accepts is not parsed again, so it must accept no more."""
    generator, num_accepted = Random(1), 0
    for _ in range(20_000):
        text = b"".join(generator.choices(PARTS, k=generator.randint(1, 6)))
        found = None
        with suppress(ValueError):
            found = repr(from_json(text))  # other than ==, for types, signs of zero and NaN
        if found is not None:
            assert found == repr(json.loads(text.decode())), text
            num_accepted += 1
    assert num_accepted > 500


def test_texts_of_a_client_are_not_kept():
    """The parser's cache is that of the process, and a text may be secret, as `cache_salt` is."""
    first, second = (read_json(b'{"cache_salt": "secret"}')["cache_salt"] for _ in range(2))
    assert first == second
    assert first is not second


def body_of(text):
    """Return a request with a body of that text."""

    async def receive():
        return {"type": "http.request", "body": text}

    return ApiRequest({"type": "http", "headers": []}, receive)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
async def test_the_limit_of_the_depth(opening, closing):
    """A value counts as a level: one at the limit is parsed, one below it is refused."""
    most = MAX_JSON_DEPTH - 1
    content = await body_of(opening * most + b"1" + closing * most).json()
    for _ in range(most):
        (content,) = content if isinstance(content, list) else content.values()
    assert content == 1
    with pytest.raises(InvalidValueError, match="too deep"):
        await body_of(opening * (most + 1) + b"1" + closing * (most + 1)).json()
