# Modules: cluster.api.endpoint_picker.endpoint
"""Picks from a pool: failures, ejection, drain, subsets, and what is open where."""

import pytest

from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.choice import PickRequest
from cluster.api.endpoint_picker.endpoint import (
    MAX_FAILED_RESPONSES,
    MAX_FAILED_SCRAPES,
    NUM_RESPONSES,
)
from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from specdec.types.errors import NotReadyError, OverloadedError
from specdec.types.reports.service_curve import ServiceCurve


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def request_of(text, model="m"):
    return PickRequest(RoutingHint.of((model,), text.encode(), 10), model)


LONG = "Once there was a river that met a mountain. " * 40


@pytest.fixture
def clock():
    return Clock()


def goodput_pool(clock, *addresses):
    return pool_of(clock, *addresses, objective=Objective(2.0, 0.04))


def pool_of(clock, *addresses, **settings):
    pool = Pool(clock, **settings)
    pool.set_addresses(addresses)
    for each in pool.endpoints:
        report(pool, each.address)
    return pool


def report(pool, address, *, is_ready=True, **values):
    pool.get(address).apply(EndpointReport(**values), is_ready=is_ready, now_s=pool.clock())


def respond(pool, address, has_failed, count=1):
    for _ in range(count):
        pool.get(address).respond(has_failed=has_failed, now_s=pool.clock())


def chosen(pool, request=None, subset=None, count=1):
    """Return the addresses of picks that remain open."""
    requests = [request or request_of(f"{i} {LONG}") for i in range(count)]
    return [pool.pick(each, subset).endpoint.address for each in requests]


def test_open_requests_spread_and_their_ends_are_counted(clock):
    pool = pool_of(clock, "a", "b")
    picks = [pool.pick(request_of(f"{i} {LONG}")) for i in range(10)]
    assert sorted(each.endpoint.address for each in picks) == ["a"] * 5 + ["b"] * 5
    for pick in picks:
        pick.end()
        pick.end()
    assert [each.num_open for each in pool.endpoints] == [0, 0]
    assert pool.get("a").open_requests.tokens == 0


def test_idle_endpoints_take_turns(clock):
    pool = pool_of(clock, *"abc")
    found = []
    for _ in range(6):
        pick = pool.pick(request_of("short"))
        found.append(pick.endpoint.address)
        pick.end()
    assert found == [*"abcabc"]


def test_a_conversation_returns_to_its_endpoint(clock):
    pool = pool_of(clock, *"abcd")
    text = LONG
    first = pool.pick(request_of(text))
    first.end()
    for turn in range(5):
        text += f"{turn} and then it met another one. "
        pick = pool.pick(request_of(text))
        assert pick.endpoint is first.endpoint
        pick.end()
    assert first.endpoint.choices == {"load": 1, "prefix": 5}


def test_requests_of_other_senders_count_once(clock):
    pool = pool_of(clock, "a", "b")
    mine = [pool.pick(request_of(f"{i} {LONG}"), {"a"}) for i in range(3)]
    report(pool, "a", num_running=4, num_waiting=1)
    assert pool.get("a").candidate(request_of("")).num_others == 2
    mine[0].end()
    assert pool.get("a").candidate(request_of("")).num_others == 2


def test_a_report_counts_however_old_it_is(clock):
    """An endpoint that is too busy to be scraped is no idle one, and its queue is no shorter."""
    pool = pool_of(clock, "a", "b", max_waiting=60)
    report(pool, "a", num_running=50, num_waiting=50)
    clock.now_s += 60.0
    assert chosen(pool, count=6) == ["b"] * 6
    assert pool.get("a").report_age_s(clock()) == pytest.approx(60.0)
    report(pool, "a", num_waiting=60)
    report(pool, "b", num_waiting=60)
    clock.now_s += 60.0
    with pytest.raises(OverloadedError):
        pool.pick(request_of(LONG))


def test_an_endpoint_where_nothing_listened_is_down_until_a_report(clock):
    pool = pool_of(clock, "a")
    pool.get("a").fail_scrape(is_refused=True)
    pool.get("a").fail_scrape(is_refused=False)
    assert not pool.get("a").may_be_up


def test_a_refused_scrape_and_several_failed_ones_take_an_endpoint_out(clock):
    pool = pool_of(clock, "a", "b")
    pool.get("a").fail_scrape(is_refused=True)
    assert set(chosen(pool, count=6)) == {"b"}
    report(pool, "a")
    assert chosen(pool) == ["a"]
    for number in range(MAX_FAILED_SCRAPES):
        assert pool.get("b").is_up, number
        pool.get("b").fail_scrape(is_refused=False)
    assert set(chosen(pool, count=20)) == {"a"}


def test_endpoints_that_are_all_too_slow_to_be_scraped_are_used(clock):
    pool = pool_of(clock, "a", "b", "c")
    for address in "ab":
        for _ in range(MAX_FAILED_SCRAPES):
            pool.get(address).fail_scrape(is_refused=False)
    assert set(chosen(pool, count=6)) == {"c"}
    pool.get("c").fail_scrape(is_refused=True)
    assert set(chosen(pool, count=6)) == {"a", "b"}


def test_an_endpoint_that_is_not_ready_is_not_chosen(clock):
    pool = pool_of(clock, "a", "b")
    report(pool, "a", is_ready=False)
    assert set(chosen(pool, count=6)) == {"b"}
    report(pool, "b", is_ready=False)
    with pytest.raises(NotReadyError):
        pool.pick(request_of(LONG))
    assert pool.refusals == {503: 1}


def test_failed_responses_eject_for_longer_each_time(clock):
    pool = pool_of(clock, "a", "b")
    respond(pool, "a", True, MAX_FAILED_RESPONSES - 1)
    respond(pool, "a", False, NUM_RESPONSES - 1)
    respond(pool, "a", True, MAX_FAILED_RESPONSES - 1)
    assert not pool.get("a").is_ejected(clock())
    respond(pool, "a", True)
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        assert set(chosen(pool, count=3)) == {"b"}
        respond(pool, "a", True)  # of a request from before
        clock.now_s += seconds - 0.01
        assert pool.get("a").is_ejected(clock())
        clock.now_s += 0.02
        assert not pool.get("a").is_ejected(clock())
        respond(pool, "a", True)
    assert pool.get("a").response_errors == 2 * MAX_FAILED_RESPONSES - 2 + 15


def test_an_endpoint_that_fails_every_other_time_is_ejected(clock):
    pool = pool_of(clock, "a", "b")
    for _ in range(MAX_FAILED_RESPONSES):
        respond(pool, "a", False)
        respond(pool, "a", True)
    assert set(chosen(pool, count=3)) == {"b"}


def test_endpoints_that_are_all_ejected_are_used(clock):
    pool = pool_of(clock, "a", "b")
    for address in "ab":
        respond(pool, address, True, MAX_FAILED_RESPONSES)
    assert set(chosen(pool, count=4)) == {"a", "b"}


def test_only_addresses_of_the_subset_are_chosen(clock):
    pool = pool_of(clock, *"abc")
    assert set(chosen(pool, subset={"b", "z"}, count=5)) == {"b"}
    for subset in ({"z"}, set()):
        with pytest.raises(NotReadyError):
            pool.pick(request_of(LONG), subset)


def test_requests_are_shed_once_every_queue_is_long(clock):
    pool = pool_of(clock, "a", "b", max_waiting=4)
    report(pool, "a", num_waiting=4)
    assert set(chosen(pool, count=20)) == {"b"}
    report(pool, "b", num_waiting=5)
    with pytest.raises(OverloadedError):
        pool.pick(request_of(LONG))
    assert pool.refusals == {429: 1}
    for endpoint in pool.endpoints:
        for _ in range(3):
            endpoint.fail_scrape(is_refused=False)
    assert set(chosen(pool)) <= {"a", "b"}, "queues of endpoints that are lost are not known"
    unlimited = pool_of(clock, "a")
    report(unlimited, "a", num_waiting=10_000)
    assert chosen(unlimited) == ["a"]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fallbacks_are_the_next_best_endpoints(clock, count):
    pool = pool_of(clock, *"abc", num_fallbacks=count)
    report(pool, "a", num_waiting=1)
    report(pool, "b", num_waiting=2)
    report(pool, "c", num_waiting=3)
    pick = pool.pick(request_of(LONG))
    assert (pick.endpoint.address, pick.fallbacks) == ("a", ("b", "c")[:count])


def test_a_request_moves_to_the_endpoint_that_served_it(clock):
    pool = pool_of(clock, "a", "b")
    pick = pool.pick(request_of(LONG), {"a"})
    pick.move(pool.get("b"))
    assert (pool.get("a").num_open, pool.get("b").num_open) == (0, 1)
    assert pool.get("b").record.matched_tokens(pick.request.hint) > 0
    pick.end()
    pick.move(pool.get("a"))
    assert (pool.get("a").num_open, pool.get("b").num_open) == (0, 0)


def test_an_adapter_in_use_is_preferred_and_one_that_is_only_loaded_is_found(clock):
    pool = pool_of(clock, "a", "b")
    report(pool, "a", max_adapters=2)
    report(pool, "b", max_adapters=2, adapters=frozenset({"sql"}))
    assert set(chosen(pool, request_of("short", "sql"), count=8)) == {"b"}
    assert pool.get("b").choices == {"adapter": 8}
    pool.get("a").models = frozenset({"m", "chat"})
    pool.get("a").adapters = frozenset({"chat"})
    pool.get("b").models = frozenset({"m"})
    assert set(chosen(pool, request_of("short", "chat"), count=8)) == {"a"}
    assert "adapter" not in pool.get("a").choices, "loaded, but in use by no request"


def test_only_endpoints_that_may_serve_the_model_are_chosen(clock):
    pool = pool_of(clock, "lacks it", "has it", "unknown")
    pool.get("lacks it").models = frozenset({"n"})
    pool.get("has it").models = frozenset({"m"})
    assert set(chosen(pool, request_of("short"), count=8)) == {"has it", "unknown"}
    assert set(chosen(pool, request_of("short", ""), count=9)) == {"lacks it", "has it", "unknown"}
    assert chosen(pool, request_of("short"), {"lacks it"}) == ["lacks it"], "it answers with 404"
    report(pool, "unknown", is_ready=False)
    assert chosen(pool, request_of("short", "no such"), {"lacks it", "unknown"}) == ["lacks it"]


def test_a_request_waits_for_the_endpoint_that_has_its_adapter(clock):
    pool, request = pool_of(clock, "a", "b", max_waiting=10), request_of("short", "sql")
    pool.get("a").models, pool.get("b").models = frozenset({"m", "sql"}), frozenset({"m"})
    respond(pool, "a", has_failed=True, count=6)
    assert chosen(pool, request) == ["a"], "an ejected one rather than one that lacks it"
    report(pool, "a", num_waiting=10)
    with pytest.raises(OverloadedError):
        pool.pick(request)
    report(pool, "a", is_ready=False)
    with pytest.raises(NotReadyError):
        pool.pick(request)
    assert chosen(pool, request_of("short")) == ["b"]


def test_endpoints_that_stay_keep_their_state(clock):
    pool = Pool(clock)
    assert not pool.is_synced
    pool.set_addresses(["a"])
    assert not pool.is_synced
    report(pool, "a")
    pick = pool.pick(request_of(LONG))
    pool.set_addresses(["b", "a"])
    assert not pool.is_synced
    assert pool.get("a").num_open == 1
    pool.set_addresses([])
    assert pool.is_synced
    pick.end()
    with pytest.raises(NotReadyError):
        pool.pick(request_of(LONG))


CURVE = ServiceCurve((1, 16), (100.0, 50.0), 2000.0)


def test_under_an_objective_the_endpoint_with_the_best_service_is_chosen(clock):
    """Requests that are open here count before the next report, and no more after their end."""
    pool = goodput_pool(clock, "a", "b")
    report(pool, "a", curve=ServiceCurve((1, 16), (25.0, 12.5), 500.0))
    report(pool, "b", curve=CURVE)
    assert chosen(pool) == ["b"]
    picks = [pool.pick(request_of(f"{number} {LONG}")) for number in range(40)]
    assert {each.endpoint.address for each in picks} == {"a", "b"}
    for each in picks:
        each.end()
    assert chosen(pool) == ["b"]


@pytest.mark.parametrize(
    "curve",
    [ServiceCurve((1,), (50.0,), 1000.0), ServiceCurve((1, 8), (1e-3,) * 2, 1e-3), None],
)
def test_no_curve_stops_the_pool(clock, curve, caplog):
    """One of a replica with one seat, one of a replica that hardly works, and none."""
    pool = goodput_pool(clock, "a", "b")
    report(pool, "a", curve=curve, output_tokens=1e300)
    report(pool, "b", curve=curve)
    caplog.clear()
    assert len(chosen(pool, count=200)) == 200
    assert len(caplog.messages) == (curve is None)


def test_an_endpoint_without_a_curve_gets_no_more_than_its_share(clock):
    pool, open_ = goodput_pool(clock, "curve", "none"), []
    for number in range(600):
        clock.now_s += 0.1
        while open_ and open_[0][0] <= clock.now_s:
            open_.pop(0)[1].end()
        for each in pool.endpoints:
            curve = CURVE if each.address == "curve" else None
            load = {"num_running": each.num_open, "num_decoding": each.num_open}
            report(pool, each.address, curve=curve, output_tokens=50.0, **load)
        open_.append((clock.now_s + 1.0, pool.pick(request_of(f"{number} {LONG[:400]}"))))
    shares = [each.choices.total() for each in pool.endpoints]
    assert max(shares) < 1.1 * min(shares)


def test_a_request_without_a_readable_prompt_counts_for_no_rate(clock):
    pool = goodput_pool(clock, "a")
    pool.pick(PickRequest())
    assert pool.get("a").open_requests.prompt_tokens_per_s(clock()) == 0


def test_a_request_that_has_moved_leaves_nothing_where_it_was(clock):
    pool = goodput_pool(clock, "a", "b")
    pick = pool.pick(request_of(LONG), {"a"})
    clock.now_s += 1.0
    pick.move(pool.get("b"))
    rates = [pool.get(each).open_requests.prompt_tokens_per_s(clock()) for each in "ab"]
    assert rates[0] == pytest.approx(0)
    assert rates[1] > 0
