"""Deadlines, and timeouts that are not theirs."""

import asyncio

import pytest

from cluster.api.openai.deadline import Deadline
from cluster.api.openai.errors import ApiError


async def test_work_is_cancelled_at_the_deadline():
    with pytest.raises(ApiError, match=r"within 0\.02 s") as caught:
        async with Deadline.after(0.02).enforce():
            await asyncio.sleep(10)
    assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")


async def test_work_that_ends_in_time_is_not_cancelled():
    deadline = Deadline.after(10)
    async with deadline.enforce():
        await asyncio.sleep(0)
    assert 9 < deadline.remaining_s < 10


async def test_another_timeout_is_not_converted():
    with pytest.raises(TimeoutError):
        async with Deadline.after(10).enforce():
            raise TimeoutError


async def test_the_remaining_time_is_never_negative():
    deadline = Deadline(1.0, at_s=0.0)
    assert deadline.remaining_s == 0
    with pytest.raises(ApiError):
        async with deadline.enforce():
            await asyncio.sleep(10)
