"""The budget of bytes that all calls share."""

import pytest

from cluster.api.base.byte_budget import SMALL_BYTES, ByteBudget
from specdec.types.errors import OverloadedError

MIB = 2**20


def test_bytes_are_held_until_the_end_of_a_call():
    budget = ByteBudget(10 * MIB)
    with budget.hold(6 * MIB):
        with pytest.raises(OverloadedError, match="limit 10 MiB, max_inflight_mib"):
            budget.hold(5 * MIB)
        with budget.hold(4 * MIB):
            assert budget.num_bytes == 10 * MIB
    assert budget.num_bytes == 0


def test_a_request_that_grows_is_counted_once():
    budget = ByteBudget(10 * MIB)
    with budget.hold(MIB) as held, budget.hold(MIB):
        for size in range(2, 10):
            held.grow_to(size * MIB)
        with pytest.raises(OverloadedError):
            held.grow_to(10 * MIB)
        assert budget.num_bytes == 10 * MIB
    assert budget.num_bytes == 0
    held.__exit__()
    assert budget.num_bytes == 0, "a second release returned bytes of others"


def test_a_request_alone_may_grow_beyond_the_budget():
    """A larger body than max_inflight_mib would otherwise be refused at each attempt."""
    budget = ByteBudget(MIB)
    with budget.hold() as held:
        for size in range(1, 5):
            held.grow_to(size * MIB)
        with pytest.raises(OverloadedError):
            budget.hold(MIB)
    assert budget.num_bytes == 0


def test_small_requests_are_accepted_beside_large_ones():
    budget = ByteBudget(MIB)
    with budget.hold(MIB):
        for _ in range(1000):
            budget.hold(SMALL_BYTES)
        with pytest.raises(OverloadedError):
            budget.hold(SMALL_BYTES + 1)


def test_a_request_alone_may_exceed_the_budget():
    with ByteBudget(MIB).hold(16 * MIB):
        pass
