# Modules: cluster.api.http.bodies
"""Bodies are text that can be sent back, in errors or in an answer."""

import json

import pytest

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
