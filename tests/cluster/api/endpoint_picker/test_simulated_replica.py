"""The events of a simulated replica against its steps, by hand."""

import math

import pytest

from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.reports import expected_output_tokens
from tests.cluster.api.endpoint_picker.simulated_replica import (
    CHUNK_TOKENS,
    COSTS,
    MAX_NUM_SEQS,
    Replica,
    Request,
    decode_step,
)

SLOW = COSTS["slow"]


def request(name, at_s, num_tokens=101, num_prompt_tokens=CHUNK_TOKENS):
    return Request(name, at_s, RoutingHint((), num_prompt_tokens, 256), num_tokens, kind=0)


def served(*requests, **settings):
    """Return a replica that has got requests, of which the last one has just arrived."""
    replica = Replica(SLOW, **settings)
    for each in requests:
        replica.add(each, each.at_s)
    return replica


def steps(number, sizes=(1,), prompt_tokens=0):
    """Return the seconds of steps."""
    if prompt_tokens:
        return number * SLOW.step_s(sizes[0], 0, num_rows=prompt_tokens)
    return number * decode_step(SLOW, (sizes[0], 0, 0))[0]


def test_a_request_has_its_prompt_and_then_its_steps():
    first = request("a", 1.0)
    replica = served(first)
    report = replica.report(1.0)
    assert (report.num_running, report.num_decoding) == (1, 0)
    replica.run_until(math.inf)
    assert first.first_at_s == pytest.approx(1.0 + steps(1, (0,), CHUNK_TOKENS))
    number = math.ceil(100 / decode_step(SLOW, (1, 0, 0))[1][0])
    assert first.ended_at_s == pytest.approx(first.first_at_s + steps(number))
    report = replica.report(9.0)
    assert report.num_running == 0
    gain = decode_step(SLOW, (1, 0, 0))[1][0]
    assert report.output_tokens == pytest.approx(expected_output_tokens(1 + number * gain, 1))


def test_a_request_that_arrives_between_steps_begins_with_the_next_one():
    first = request("a", 0.0)
    begin_s = steps(1, (0,), CHUNK_TOKENS)
    second = request("b", begin_s + steps(2.5))
    replica = served(first, second)
    replica.run_until(math.inf)
    assert second.first_at_s == pytest.approx(begin_s + steps(3) + steps(1, (1,), CHUNK_TOKENS))
    gains = decode_step(SLOW, (1, 0, 0))[1][0], decode_step(SLOW, (2, 0, 0))[1][0]
    number = math.ceil((100 - 3 * gains[0] - 1) / gains[1])
    assert first.ended_at_s == pytest.approx(second.first_at_s + steps(number, (2,)))


@pytest.mark.parametrize("cache_tokens", [700, 200_000])
def test_a_request_that_does_not_fit_the_cache_waits_for_an_end(cache_tokens):
    first, second = request("a", 0.0), request("b", 0.2)
    replica = served(first, second, cache_tokens=cache_tokens)
    replica.run_until(0.3)
    assert replica.report(0.3).num_waiting == (cache_tokens == 700)
    replica.run_until(math.inf)
    assert (second.first_at_s > first.ended_at_s) == (cache_tokens == 700)


def test_the_batch_has_a_limit():
    replica = served(*(request(str(each), 0.0, num_prompt_tokens=1) for each in range(100)))
    replica.run_until(1.0)
    assert replica.report(1.0).num_running == MAX_NUM_SEQS
    assert replica.report(1.0).num_waiting == 100 - MAX_NUM_SEQS
    replica.run_until(math.inf)
    assert len(replica.ended) == 100
