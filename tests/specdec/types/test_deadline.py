"""Time limits of requests."""

import asyncio

import pytest

from specdec.types.deadline import Deadline
from specdec.types.errors import DeadlineExceededError


async def test_work_is_cancelled_at_the_deadline():
    with pytest.raises(DeadlineExceededError, match=r"within 0\.02 s"):
        async with Deadline.after(0.02).enforce():
            await asyncio.sleep(10)


async def test_work_that_ends_in_time_is_not_cancelled():
    deadline = Deadline.after(100)
    async with deadline.enforce():
        await asyncio.sleep(0)
    assert 50 < deadline.remaining_s < 100


async def test_another_timeout_is_not_converted():
    with pytest.raises(TimeoutError):
        async with Deadline.after(10).enforce():
            raise TimeoutError


async def test_the_remaining_time_is_never_negative():
    deadline = Deadline(1.0, at_s=0.0)
    assert deadline.remaining_s == 0
    with pytest.raises(DeadlineExceededError):
        async with deadline.enforce():
            await asyncio.sleep(10)
