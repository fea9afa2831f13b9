"""Waiting for a condition of another thread, process or task."""

import asyncio
import time

DEADLINE_S = 30.0


def wait_until(condition, deadline_s=DEADLINE_S):
    """Block until a condition holds. Raises AssertionError after `deadline_s`."""
    ends_at_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at_s, "it did not happen"
        time.sleep(0.005)


async def eventually(condition):
    """Let the event loop run until a condition holds. Raises TimeoutError after 30 s."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
