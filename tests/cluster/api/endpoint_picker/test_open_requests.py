# Modules: cluster.api.endpoint_picker.goodput_score
"""The load of an endpoint between reports, by hand."""

from dataclasses import replace
from random import Random

import pytest

from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.choice import OTHER_REQUEST_TOKENS, Candidate, PickRequest
from cluster.api.endpoint_picker.goodput_score import GoodputScore, load_of
from cluster.api.endpoint_picker.open_requests import OpenRequests
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from specdec.types.reports.service_curve import ServiceCurve

CURVE = ServiceCurve((1, 8), (100.0, 50.0), 1000.0)
REPORT = EndpointReport(curve=CURVE, output_tokens=50.0)
LIMIT_S = 0.5


def renew(requests, at_s, **numbers):
    requests.renew(replace(REPORT, **numbers), at_s)


def begin(requests, prompt_tokens, at_s):
    return requests.begin(RoutingHint((), prompt_tokens + 5, 10), 5, at_s)


def sent(*pairs):
    """Return open requests of prompt tokens and times, and what ends each."""
    requests = OpenRequests(LIMIT_S)
    renew(requests, 0.0)
    return requests, [begin(requests, *each) for each in pairs]


def load(requests, at_s, report=REPORT):
    return load_of(Candidate("a", open_requests=requests, report=report), CURVE, at_s)


def facts(requests, at_s):
    """Return the numbers of streams, of those in time, and of prompt tokens."""
    found = load(requests, at_s)
    return found.num_streams, found.num_in_time, found.backlog_tokens


def a_stream():
    """Return open requests of which the only one has had tokens since its second report."""
    requests, keys = sent((1000, 0.1))
    for at_s in (0.2, 1.5):
        renew(requests, at_s, num_running=1, num_decoding=1)
    return requests, keys


def test_requests_since_the_report_are_added():
    requests, _ = sent((1000, 0.1), (500, 0.2))
    assert facts(requests, 0.2) == (2, 2, 1400)  # a tenth of a second of the first
    assert load(requests, 0.2).output_tokens == 50.0
    assert (requests.tokens, len(requests)) == (1520, 2)


def test_the_latest_requests_are_those_without_a_token():
    requests, _ = sent((1000, 0.1), (500, 0.2), (300, 0.3))
    renew(requests, 0.5, num_running=2, num_decoding=1, num_waiting=1)
    assert facts(requests, 0.6) == pytest.approx((3, 3, 700))  # the second begins by the report
    renew(requests, 0.7, num_running=3, num_decoding=3)
    assert facts(requests, 0.7)[2] == 0


def test_a_prompt_yields_no_more_tokens_than_it_has():
    assert facts(sent((100, 0.1), (500, 0.1))[0], 0.9)[2] == 500


def test_requests_without_a_token_by_the_limit_are_late_for_good():
    requests, _ = sent((1000, 0.1), (500, 0.2))
    renew(requests, 0.4, num_running=2, num_decoding=1)
    assert facts(requests, 0.7)[:2] == (2, 2)
    assert facts(requests, 0.8)[:2] == (2, 1), "the second still has no token"
    renew(requests, 0.9, num_running=2, num_decoding=2)
    assert facts(requests, 5.0)[:2] == (2, 1)


def test_ends_since_the_report_are_subtracted_once():
    requests, keys = sent((10, 0.1), (10, 0.1))
    renew(requests, 0.5, num_running=2, num_decoding=2)
    requests.end(keys[0], 0.6)
    assert facts(requests, 0.6)[0] == 1
    renew(requests, 0.7, num_running=1, num_decoding=1)
    assert facts(requests, 0.7)[0] == 1


@pytest.mark.parametrize("make", [lambda: sent((1000, 0.1)), a_stream])
def test_a_request_that_has_ended_leaves_nothing(make):
    requests, [key] = make()
    requests.end(key, 1.6)
    assert facts(requests, 1.6) == (0, 0, 0)
    assert requests.tokens == 0


def test_before_any_report_the_load_is_what_was_sent():
    requests = OpenRequests(LIMIT_S)
    begin(requests, 1000, 0.1)
    found = load(requests, 0.3, report=None)
    assert (found.curve, *found[1:5]) == (CURVE, 1, 8, 1, 800)  # a substitute's rate


def test_streams_stay_streams_after_their_last_report():
    requests, _ = a_stream()
    begin(requests, 300, 1.6)
    assert facts(requests, 1.7) == pytest.approx((2, 2, 200))
    assert facts(requests, 60.0) == (2, 1, 0)


def test_waiting_requests_of_other_senders_have_a_backlog():
    requests = OpenRequests()  # of a picker that has just started
    renew(requests, 0.0, num_running=3, num_decoding=2, num_waiting=4)
    assert facts(requests, 0.0) == (7, 7, 5 * OTHER_REQUEST_TOKENS)
    begin(requests, 100, 0.0)
    assert facts(requests, 0.0) == (8, 8, 5 * OTHER_REQUEST_TOKENS + 100)


def test_a_stream_is_never_taken_for_a_waiting_request_of_another_sender():
    """Nor for one of several choices of a request, which reports count."""
    requests, _ = a_stream()
    renew(requests, 1.6, num_running=1, num_decoding=1, num_waiting=2)
    assert facts(requests, 1.6) == (3, 3, 2 * OTHER_REQUEST_TOKENS)


def test_a_request_in_transit_gives_no_token_to_one_before_it():
    requests, _ = sent((10_000, 0.1))
    for at_s in (0.2, 0.3):
        renew(requests, at_s, num_running=1)
    begin(requests, 100, 0.39)
    renew(requests, 0.4, num_running=1)
    assert facts(requests, 0.4) == pytest.approx((2, 1 + 1, 9800))
    renew(requests, 0.5, num_running=1, num_waiting=1)
    assert facts(requests, 0.5) == pytest.approx((2, 2, 9700))


def test_a_request_that_other_senders_hid_from_its_first_report_is_found_by_the_second():
    requests, _ = sent((1000, 0.1))
    renew(requests, 0.1, num_running=1, num_decoding=1)
    assert facts(requests, 0.1)[2] == 0
    renew(requests, 0.2, num_running=2, num_decoding=1)
    assert facts(requests, 0.2) == (2, 2, 1000)


def test_several_choices_have_one_prompt():
    requests, _ = sent()
    hint = RoutingHint((), 2005, 10)
    request = requests.begin(hint, 5, 0.1, num_choices=4)
    for number, left in ((0, 1900), (1, 1900), (4, 0), (4, 0)):
        renew(requests, 0.2, num_running=4, num_decoding=number)
        assert facts(requests, 0.2) == pytest.approx((4, 4, left)), number
    requests.end(request, 0.3)
    renew(requests, 0.4)
    assert facts(requests, 0.4) == (0, 0, 0)


def test_outputs_are_bounded():
    report = replace(REPORT, output_tokens=1e300)
    assert load(sent()[0], 0.0, report).output_tokens == 2**20


def test_the_share_of_prompts_decays():
    requests, _ = sent((1000, 0.1), (1000, 0.1))
    assert load(requests, 0.1).prompt_share == pytest.approx(0.2)
    assert load(requests, 30.0).prompt_share < 0.02


def test_a_request_that_was_computed_elsewhere_leaves_no_share():
    requests, keys = sent((1000, 0.1), (1000, 3.0))
    requests.end(keys[0], 4.0, has_moved=True)
    requests.end(keys[1], 4.0)
    alone, _ = sent((1000, 3.0))
    assert load(requests, 4.0).prompt_share == pytest.approx(load(alone, 4.0).prompt_share)


def test_a_prompt_that_never_was_computed_leaves_no_share():
    requests, keys = sent((1000, 0.1), (1000, 0.1))
    renew(requests, 0.2, num_running=1, num_waiting=1)
    for each in keys:
        requests.end(each, 3.0)
    assert load(requests, 3.0).prompt_share == pytest.approx(0)


def test_an_answer_between_two_reports_had_a_prompt():
    requests, [key] = sent((1000, 0.1))
    requests.end(key, 0.15)
    assert load(requests, 0.15).prompt_share == pytest.approx(0.1, rel=0.01)


def test_counts_agree_with_the_requests_after_any_operations():
    chance, requests, open_, at_s = Random(5), OpenRequests(LIMIT_S), [], 0.0
    for _ in range(3000):
        at_s += chance.expovariate(20)
        action = chance.choice(("begin", "begin", "end", "renew", "late"))
        if action == "begin":
            hint = RoutingHint((), chance.randrange(1, 900), 10)
            open_.append(requests.begin(hint, 0, at_s, num_choices=chance.choice((1, 1, 3))))
        elif action == "end" and open_:
            requests.end(open_.pop(chance.randrange(len(open_))), at_s)
        elif action == "renew":
            running, decoding = sorted((chance.randrange(30), chance.randrange(30)))[::-1]
            renew(requests, at_s, num_running=running, num_decoding=decoding)
        requests.num_late(at_s)
        requests.check_integrity()
        assert len(requests) == len(open_)
    requests.num_late(at_s + 2 * LIMIT_S)
    requests.check_integrity()


def test_a_full_kv_cache_is_a_wait():
    """One endpoint has many streams, the other queued requests that do not fit its cache."""
    report = replace(REPORT, curve=ServiceCurve((1, 256), (60.0, 30.0), 5000.0))
    report = replace(report, output_tokens=400.0, cache_tokens=20_000)
    free, full = OpenRequests(), OpenRequests()
    for requests, number in ((free, 60), (full, 50)):
        requests.renew(report, 0.0)
        for _ in range(number):
            begin(requests, 100, 1.0)
    states = (
        (free, {"num_running": 60, "num_decoding": 60, "kv_cache_usage": 0.5}),
        (full, {"num_running": 20, "num_decoding": 20, "num_waiting": 30, "kv_cache_usage": 1.0}),
    )
    candidates = []
    for requests, numbers in states:
        for at_s in (2.0, 3.0):
            requests.renew(replace(report, **numbers), at_s)
        report_now = replace(report, **numbers)
        candidates.append(Candidate("a", open_requests=requests, report=report_now))
    score = GoodputScore(Objective(2.0, 0.04), lambda: 6.0)
    costs = score(candidates, PickRequest(RoutingHint((), 100, 256)))
    assert costs[0] < costs[1] - 0.5
    assert load_of(candidates[1], CURVE, 6.0).num_seats == 20


@pytest.mark.parametrize(("num_tokens", "is_first"), [(100, True), (5000, False)])
def test_tokens_that_have_to_leave_the_cache_cost_goodput(num_tokens, is_first):
    half = replace(REPORT, cache_tokens=4000, kv_cache_usage=0.5, num_running=2, num_decoding=2)
    candidates = [
        Candidate("a", report=half),
        Candidate("b", report=replace(half, cache_tokens=40_000)),
    ]
    small, large = GoodputScore(Objective(60.0, 0.04), lambda: 0.0)(
        candidates, PickRequest(RoutingHint((), num_tokens, 10))
    )
    assert (small == large) == is_first
    assert small >= large


def test_without_any_curve_queue_and_prefix_decide():
    report = replace(REPORT, curve=None)
    queue = OpenRequests()
    queue.renew(replace(report, num_waiting=3), 0.0)
    idle, busy, cached = (
        Candidate("a", report=report),
        Candidate("b", open_requests=queue, report=report),
        Candidate("c", matched_tokens=1900, report=report),
    )
    score, request = GoodputScore(Objective(2.0, 0.04), lambda: 0.0), RoutingHint((), 2000, 10)
    costs = score([idle, busy, cached], PickRequest(request))
    assert costs[2] < costs[0] < costs[1]


def test_an_adapter_that_is_not_in_use_costs_goodput():
    candidates = [
        Candidate("a", report=replace(REPORT, max_adapters=2)),
        Candidate("b", report=replace(REPORT, max_adapters=2, adapters=frozenset({"sql"}))),
    ]
    score = GoodputScore(Objective(2.0, 0.04), lambda: 0.0)
    other, using = score(candidates, PickRequest(RoutingHint((), 100, 10), "sql", is_adapter=True))
    assert using < other
    other, using = score(candidates, PickRequest(RoutingHint((), 100, 10), "m"))
    assert using == other
