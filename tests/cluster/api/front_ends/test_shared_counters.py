# Modules: cluster.api.front_ends.shared_counters, cluster.api.base.counters
"""Limits that hold for several processes together."""

import multiprocessing
import os

import pytest

from cluster.api.base.authentication import ApiKey, ApiKeys
from cluster.api.base.byte_budget import SMALL_BYTES, ByteBudget
from cluster.api.front_ends.shared_counters import SharedCounters
from specdec.types.errors import OverloadedError
from tests.clock import Clock

KEY = "a-key-of-tests"
AUTHORIZATION = f"Bearer {KEY}"


@pytest.fixture
def counters():
    made = SharedCounters.create(num_rows=2, num_keys=1)
    yield made
    made.close()


def keys_of(counters, row, clock, **limits):
    key = ApiKey("ann", KEY, **limits)
    return ApiKeys([key], clock, counters=lambda number: counters.key(row, number))


def test_concurrent_requests_count_wherever_they_are(counters):
    one, other = (keys_of(counters, row, Clock(), max_concurrent_requests=2) for row in range(2))
    first, _ = one.admit(AUTHORIZATION), other.admit(AUTHORIZATION)
    for keys in (one, other):
        with pytest.raises(OverloadedError, match="concurrent"):
            keys.admit(AUTHORIZATION)
    first.release()
    other.admit(AUTHORIZATION)


def test_the_rate_of_a_key_is_one_rate(counters):
    clock = Clock()
    clock.now_s = 5.0
    one, other = (keys_of(counters, row, clock, requests_per_s=1) for row in range(2))
    one.admit(AUTHORIZATION)
    with pytest.raises(OverloadedError, match="limited to 1 requests per second"):
        other.admit(AUTHORIZATION)
    clock.now_s += 1.1
    other.admit(AUTHORIZATION)
    later = keys_of(counters, 0, clock, requests_per_s=1)  # a replaced front end
    with pytest.raises(OverloadedError):
        later.admit(AUTHORIZATION)


def test_bytes_are_counted_together_until_their_process_has_ended(counters):
    one, other = (ByteBudget(3 * SMALL_BYTES, counters.bytes_of(row)) for row in range(2))
    one.hold(2 * SMALL_BYTES)
    with pytest.raises(OverloadedError):
        other.hold(2 * SMALL_BYTES)
    counters.clear(0)
    other.hold(2 * SMALL_BYTES)


def take_in_a_process(descriptor, row):
    keys = keys_of(SharedCounters(descriptor, 2, 1), row, lambda: 1.0, max_concurrent_requests=50)
    for _ in range(25):
        keys.admit(AUTHORIZATION)


def test_processes_lose_no_count(counters):
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=take_in_a_process, args=(os.dup(counters.descriptor), row))
        for row in range(2)
    ]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0, 0]
    assert counters.key(0, 0).running.total == 50
