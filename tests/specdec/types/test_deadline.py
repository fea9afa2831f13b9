"""Time limits of requests."""

import asyncio

import pytest

from specdec.types.deadline import Deadline, TimeLimit
from specdec.types.errors import DeadlineExceededError


async def test_work_is_cancelled_at_the_deadline():
    with (
        pytest.raises(DeadlineExceededError, match=r"within 0\.02 s"),
        Deadline.after(0.02).enforce(),
    ):
        await asyncio.sleep(10)


async def test_work_that_ends_in_time_is_not_cancelled():
    deadline = Deadline.after(100)
    with deadline.enforce():
        await asyncio.sleep(0)
    assert 50 < deadline.remaining_s < 100


async def test_another_timeout_is_not_converted():
    with pytest.raises(TimeoutError), Deadline.after(10).enforce():
        raise TimeoutError


async def test_the_remaining_time_is_never_negative():
    deadline = Deadline(1.0, at_s=0.0)
    assert deadline.remaining_s == 0
    with pytest.raises(DeadlineExceededError), deadline.enforce():
        await asyncio.sleep(10)


async def test_work_that_others_cancel_has_no_error_of_the_deadline():
    async def work():
        with Deadline.after(10).enforce():
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_limit_within_another_leaves_its_cancellation_to_that():
    inner = TimeLimit(10, ValueError)
    with pytest.raises(DeadlineExceededError), Deadline.after(0.02).enforce(), inner:
        await asyncio.sleep(10)
