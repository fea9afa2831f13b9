"""Time that is up, and errors that only look so."""

import asyncio

import pytest

from cluster.api.openai.deadline import Deadline
from cluster.api.openai.errors import ApiError


async def test_what_takes_too_long_is_cancelled():
    with pytest.raises(ApiError, match=r"within 0\.02 s") as caught:
        async with Deadline.after(0.02).held():
            await asyncio.sleep(10)
    assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")


async def test_what_is_done_in_time_is_left_alone():
    deadline = Deadline.after(10)
    async with deadline.held():
        await asyncio.sleep(0)
    assert 9 < deadline.left_s < 10


async def test_another_timeout_is_an_error_of_its_own():
    with pytest.raises(TimeoutError):
        async with Deadline.after(10).held():
            raise TimeoutError


async def test_time_that_is_up_does_not_run_on():
    deadline = Deadline(1.0, at_s=0.0)
    assert deadline.left_s == 0
    with pytest.raises(ApiError):
        async with deadline.held():
            await asyncio.sleep(10)
