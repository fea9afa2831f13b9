"""The checker finds what it is made for."""

import httpx
import pytest

from tests.chaos.history import CANCELLED, FINISHED, Call, violations
from tests.chaos.traffic import REFUSALS, status_of

EXPECTED = (3, 1, 4, 1, 5, 9, 2, 6)


def call(*parts, status=FINISHED, usage=None, ends_choice=True):
    made = Call("call", (EXPECTED,))
    for index, part in enumerate(parts):
        made.receive(0, part, ends_choice=ends_choice and index == len(parts) - 1)
    if status is not None:
        made.end(status, usage)
    return made


@pytest.mark.parametrize(
    ("parts", "more"),
    [
        pytest.param([EXPECTED], {}, id="one message"),
        pytest.param([EXPECTED[:3], EXPECTED[3:]], {"usage": 8}, id="two messages and usage"),
        pytest.param([EXPECTED[:3]], {"status": CANCELLED, "ends_choice": False}, id="cancelled"),
        pytest.param([], {"status": "UNAVAILABLE"}, id="refused"),
    ],
)
def test_a_sound_history(parts, more):
    assert violations([call(*parts, **more)], refusals={"UNAVAILABLE"}) == []


@pytest.mark.parametrize(
    ("parts", "more", "fault"),
    [
        ([EXPECTED[:3], EXPECTED[4:]], {}, "a token was lost at position 3"),
        ([EXPECTED[:3], EXPECTED[2:]], {}, "a token was doubled at position 3"),
        ([EXPECTED, EXPECTED[-1:]], {}, "1 tokens after the last one at position 8"),
        ([EXPECTED[3:], EXPECTED[:3]], {}, "token 1 in place of 3 at position 0"),
        ([EXPECTED[:7]], {}, "1 of 8 tokens missing"),
        ([EXPECTED], {"status": None}, "never ended"),
        ([EXPECTED], {"usage": 7}, "usage counts 7 tokens, 8 were received"),
        ([EXPECTED], {"ends_choice": False}, "its end was not reported"),
        ([EXPECTED[:3]], {"status": "INTERNAL"}, "ended with INTERNAL"),
    ],
)
def test_a_fault_is_found(parts, more, fault):
    found = violations([call(*parts, **more)], refusals={"UNAVAILABLE"})
    assert any(fault in each for each in found), found


def test_a_message_after_the_end_is_found():
    made = Call("call", (EXPECTED,))
    made.receive(0, EXPECTED, ends_choice=True)
    made.receive(0, ())
    made.end(FINISHED)
    assert violations([made]) == ["call: choice 0: a message after its end"]


def test_a_second_end_and_a_strange_choice_are_found():
    made = call(EXPECTED)
    made.end(CANCELLED)
    assert violations([made]) == ["call: ended 2 times"]
    other = call(EXPECTED)
    other.receive(1, (7,))
    assert violations([other]) == ["call: messages of choices that were not asked for: [1]"]


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (httpx.Response(503, json={}, headers={"retry-after": "1"}), "503"),
        (httpx.Response(503, json={}), "503 without Retry-After"),
        (httpx.Response(429, json={}), "429"),
        (httpx.Response(503, text="Service Unavailable"), "503 that is not typed"),
        (httpx.Response(500, text="Internal Server Error"), "500 that is not typed"),
    ],
)
def test_an_error_over_http_is_typed(response, status):
    assert status_of(response) == status
    assert (status in REFUSALS) == (status in {"503", "429"})
