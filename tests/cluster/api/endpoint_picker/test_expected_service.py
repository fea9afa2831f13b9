"""The expected service of a request, and the scores of endpoints, by hand."""

import math

import pytest

from cluster.api.endpoint_picker.expected_service import (
    EndpointLoad,
    ExpectedService,
    added_goodput,
    expected_service,
    scores,
)
from cluster.config.objective import Objective
from specdec.types.reports.service_curve import ServiceCurve

CURVE = ServiceCurve((1, 8), (100.0, 50.0), 1000.0)
SLOW = ServiceCurve((1, 8), (20.0, 10.0), 200.0)
OBJECTIVE = Objective(2.0, 0.04)
IDLE = EndpointLoad(CURVE, 0, 8, 0, 0, 0.0, 100.0)


def best(loads, prompt_tokens):
    """Return the name of the best endpoint."""
    found = scores([*loads.values()], [prompt_tokens[name] for name in loads], OBJECTIVE)
    return max(zip(found, loads, strict=True))[1]


def test_an_idle_endpoint():
    service = expected_service(IDLE, 500)
    assert service.first_token_s == pytest.approx(0.5)
    assert service.output_token_s == pytest.approx(0.01)


def test_prompts_before_it_a_seat_and_its_prompt():
    load = IDLE._replace(num_streams=9, num_in_time=8, backlog_tokens=300, prompt_share=0.5)
    service = expected_service(load, 500)
    assert service.first_token_s == pytest.approx(0.3 + 2 / 8 * 100 / 50 + 0.5)
    assert service.output_token_s == pytest.approx(2 * 0.02)
    assert service.prompt_token_s == pytest.approx(0.5 / 100)


def test_prompts_never_take_all_of_the_time():
    service = expected_service(IDLE._replace(prompt_share=7.0), 1)
    assert service.output_token_s == pytest.approx(0.01 / 0.2)


def test_the_prefix_counts_unless_its_endpoint_is_too_busy():
    tokens = {"a": 100, "b": 1000}
    few = IDLE._replace(num_streams=1, num_in_time=1)
    assert best({"a": few, "b": IDLE}, tokens) == "a"
    busy = IDLE._replace(num_streams=8, num_in_time=4, backlog_tokens=4000)
    assert best({"a": busy, "b": IDLE}, tokens) == "b"


def test_the_streams_that_it_would_delay_count():
    """Both endpoints give the request the same; one has streams that are near their limit."""
    loads = {
        "a": IDLE._replace(num_streams=6, num_in_time=6, backlog_tokens=2000),
        "b": IDLE._replace(num_streams=6, num_in_time=0, backlog_tokens=2000),
    }
    assert best(loads, {"a": 1500, "b": 1500}) == "b"


@pytest.mark.parametrize("prompt_token_s", [0.0, 0.02, 0.04])
def test_a_prompt_pushes_the_streams_with_too_short_outputs(prompt_token_s):
    """They have 20 ms a token left; lengths are exponentially distributed."""
    service = ExpectedService(0.5, 0.02, 0.02, prompt_s=1.0, prompt_token_s=prompt_token_s)
    alone, beside = (added_goodput(service, number, OBJECTIVE, 0.5) for number in (0, 10))
    in_time = 10 * 0.5 * math.erfc(-0.5 / 0.4 / math.sqrt(2))
    assert alone - beside == pytest.approx(in_time * (1 - math.exp(-prompt_token_s / 0.02)))


def test_late_prompts_go_where_others_are_late_but_not_all_of_them():
    def choice(backlog_tokens):
        late = IDLE._replace(num_streams=8, num_in_time=4, backlog_tokens=backlog_tokens)
        near = IDLE._replace(num_streams=8, num_in_time=6, backlog_tokens=1500)
        return best({"late": late, "near": near}, {"late": 1900, "near": 1900})

    assert choice(5000) == "late"
    assert choice(20_000) == "near"


def test_an_endpoint_that_hardly_works_excuses_no_long_wait_elsewhere():
    late = IDLE._replace(num_streams=8, num_in_time=4, backlog_tokens=20_000)
    slow = ServiceCurve((1,), (1e-3,), 1e-3)
    bad = IDLE._replace(curve=slow, num_streams=9, backlog_tokens=500)
    without = scores([late, IDLE], [500, 500], OBJECTIVE)
    *with_it, worst = scores([late, IDLE, bad], [500, 500, 500], OBJECTIVE)
    assert with_it[0] < 0.7 * without[0] < 0
    assert with_it[1] == pytest.approx(without[1])
    assert worst < min(with_it)


def test_a_wait_for_a_seat_in_the_kv_cache():
    load = IDLE._replace(num_streams=5, num_seats=4)
    assert expected_service(load, 500).first_token_s == pytest.approx(
        2 / 4 * 100 * CURVE.token_s(4) + 0.5
    )


def test_where_no_endpoint_meets_the_objective_the_least_wait_decides():
    out_of_reach = Objective(2.0, 0.003)
    long = IDLE._replace(num_streams=1, backlog_tokens=1000)
    short = IDLE._replace(num_streams=4, num_in_time=4)
    of_long, of_short = scores([long, short], [100, 100], out_of_reach)
    assert of_long < of_short < 0


def test_the_faster_endpoint_is_better():
    assert best({"a": IDLE._replace(curve=SLOW), "b": IDLE}, {"a": 50, "b": 50}) == "b"
