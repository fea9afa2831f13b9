"""The choice among endpoints, from facts alone."""

import pytest

from cluster.api.base.prefix_record import PREFIX_WORTH
from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.choice import (
    ADAPTER_TOKENS,
    OTHER_REQUEST_TOKENS,
    UNREAD,
    Candidate,
    PickRequest,
    expected_tokens,
    ranked,
)
from cluster.api.endpoint_picker.open_requests import OpenRequests
from cluster.api.endpoint_picker.reports import EndpointReport

HINT = RoutingHint.of(("m",), b"x" * 4000, 100)
REQUEST = PickRequest(HINT, "m")
WORK = 1000 + 100


def sent(tokens):
    """Return open requests of a number of tokens."""
    requests = OpenRequests()
    requests.begin(RoutingHint((), 0, tokens), 0, 0.0)
    return requests


def addresses(candidates, request=REQUEST):
    return [each.address for each in ranked(candidates, request)]


@pytest.mark.parametrize(
    ("facts", "cost"),
    [
        ({}, WORK),
        ({"open_requests": sent(70)}, WORK + 70),
        ({"num_others": 3}, WORK + 3 * OTHER_REQUEST_TOKENS),
        ({"matched_tokens": 400}, WORK - PREFIX_WORTH * 400),
        ({"report": EndpointReport(num_running=5)}, WORK),
        ({"report": EndpointReport(num_waiting=2)}, WORK + 2 * OTHER_REQUEST_TOKENS),
        ({"report": EndpointReport(kv_cache_usage=1.0)}, WORK),
        ({"report": EndpointReport(kv_cache_usage=0.5, cache_tokens=1000)}, WORK + WORK - 500),
        ({"report": EndpointReport(kv_cache_usage=0.5, cache_tokens=9000)}, WORK),
    ],
)
def test_the_cost_is_in_tokens_that_the_request_waits_for(facts, cost):
    assert expected_tokens([Candidate("a", **facts)], REQUEST) == [cost]


@pytest.mark.parametrize(
    ("report", "cost"),
    [
        (None, ADAPTER_TOKENS),
        (EndpointReport(), ADAPTER_TOKENS),
        (EndpointReport(adapters=frozenset({"m"}), max_adapters=1), 0),
        (EndpointReport(adapters=frozenset({"other"}), max_adapters=2), ADAPTER_TOKENS),
        (EndpointReport(adapters=frozenset({"other"}), max_adapters=1), 2 * ADAPTER_TOKENS),
    ],
)
def test_an_adapter_that_is_not_in_use_costs_tokens(report, cost):
    request = PickRequest(HINT, "m", is_adapter=True)
    assert expected_tokens([Candidate("a", report=report)], request) == [WORK + cost]


def test_the_prefix_is_given_up_for_a_load_that_it_is_not_worth():
    with_prefix = Candidate("a", matched_tokens=400, open_requests=sent(PREFIX_WORTH * 400 - 1))
    assert addresses([Candidate("b"), with_prefix]) == ["a", "b"]
    with_prefix = Candidate("a", matched_tokens=400, open_requests=sent(PREFIX_WORTH * 400 + 1))
    assert addresses([Candidate("b"), with_prefix]) == ["b", "a"]


def test_equal_endpoints_take_turns():
    candidates = [Candidate("a", last_pick=3), Candidate("b", last_pick=1), Candidate("c")]
    assert addresses(candidates) == ["c", "b", "a"]
    assert addresses([*candidates, Candidate("d", open_requests=sent(1))])[-1] == "d"


def test_another_score_replaces_the_cost():
    candidates = [Candidate("a"), Candidate("b", open_requests=sent(5))]
    found = ranked(candidates, PickRequest(UNREAD), lambda listed, _: range(len(listed), 0, -1))
    assert [each.address for each in found] == ["b", "a"]
