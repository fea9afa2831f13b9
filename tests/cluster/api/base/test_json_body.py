"""Bodies are text that can be sent back, in errors or in an answer."""

import json

import pytest

from cluster.api.base.json_body import read_json


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
