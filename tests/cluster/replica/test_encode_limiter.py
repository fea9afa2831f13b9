"""Who gets in, who waits and who is refused."""

import asyncio

import pytest

from cluster.replica.encode_limiter import EncodingRoom
from specdec.types.errors import OverloadedError

SIZE = 5_000


class Work:
    """Counts how many run at once, until it is let go."""

    def __init__(self):
        self.num_running = 0
        self.may_end = asyncio.Event()

    async def __call__(self):
        self.num_running += 1
        await self.may_end.wait()
        self.num_running -= 1
        return 7


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_some_run_some_wait_and_the_others_are_refused():
    room, work = EncodingRoom(max_running=2, max_chars=3 * SIZE), Work()
    tasks = [asyncio.create_task(room.run(work, SIZE)) for _ in range(3)]
    await settle()
    assert (room.num_chars, work.num_running) == (3 * SIZE, 2)
    with pytest.raises(OverloadedError, match="15000 characters"):
        await room.run(work, 1)
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [7, 7, 7]
    await settle()
    assert room.num_chars == 0


async def test_small_prompts_count_little_but_not_nothing():
    room, work = EncodingRoom(max_running=1, max_chars=100_000), Work()
    tasks = [asyncio.create_task(room.run(work, 0)) for _ in range(100)]
    await settle()
    with pytest.raises(OverloadedError):
        await room.run(work, 0)
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [7] * 100


async def test_what_is_alone_has_room_whatever_its_size():
    room, work = EncodingRoom(max_chars=SIZE), Work()
    work.may_end.set()
    assert await room.run(work, 2 * SIZE) == 7


async def test_work_that_is_left_keeps_its_place_until_it_is_done():
    room, work = EncodingRoom(max_running=1), Work()
    begun, waiting = (asyncio.create_task(room.run(work, SIZE)) for _ in range(2))
    await settle()
    begun.cancel()
    waiting.cancel()
    await asyncio.gather(begun, waiting, return_exceptions=True)
    assert (room.num_chars, work.num_running) == (SIZE, 1)
    work.may_end.set()
    await settle()
    assert room.num_chars == 0


async def test_an_error_is_raised_and_gives_the_place_back():
    room = EncodingRoom()

    async def fail():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await room.run(fail, SIZE)
    await settle()
    assert room.num_chars == 0
