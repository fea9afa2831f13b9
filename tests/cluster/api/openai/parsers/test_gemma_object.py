"""Objects of Gemma 4, which are like JSON but for their keys and texts."""

import pytest

from cluster.api.openai.parsers.gemma_object import GemmaSpan, gemma_object


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ('{city:<|"|>Ulm<|"|>,days:3}', {"city": "Ulm", "days": 3}),
        (
            '{a:[<|"|>b, {c}<|"|>,-1.5e-05,true,null,[]]}',
            {"a": ["b, {c}", -1.5e-05, True, None, []]},
        ),
        ('{<|"|>a b<|"|>:{c:False,d:None}}', {"a b": {"c": False, "d": None}}),
        ('{ "a" : "b" , 1 : word }', {"a": "b", "1": "word"}),
        ('{a:<|"|>the "x\\<|"|>}', {"a": 'the "x\\'}),
    ],
)
def test_an_object_is_parsed(text, value):
    assert gemma_object(text) == value


@pytest.mark.parametrize("text", ["{a}", "{a:}", "{a:1,}", "{a:12:30}", "{a:[1}", '{a:<|"|>b}'])
def test_a_malformed_object_is_none(text):
    assert gemma_object(text) is None


def test_the_end_is_found_however_the_text_is_split():
    text = '{a:<|"|>}<|<|"|>,b:[{}]}<tool_call|>'
    wanted = text.index("<tool_call|>")
    for size in range(1, len(text)):
        span, rest, taken = GemmaSpan(), "", 0
        for start in range(0, len(text), size):
            rest += text[start : start + size]
            count = 0 if span.is_complete else span.feed(rest)
            taken, rest = taken + count, rest[count:]
        assert (span.is_complete, taken) == (True, wanted), size
