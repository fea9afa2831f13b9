"""Aborts of requests that have no stream yet."""

import asyncio
import gc

import pytest

from specdec.engine.requests.preparations import Preparations
from specdec.types.errors import AbortedError
from specdec.types.request import Caller

ANN, BOB = Caller("ann"), Caller("bob")


async def test_an_abort_ends_what_is_awaited():
    preparations = Preparations()
    mine, other = preparations.begin("r", ANN), preparations.begin("r", BOB)

    async def prepare(preparation):
        with preparation:
            await asyncio.sleep(0.1 if preparation is other else 60)
        preparation.require_alive()

    running = [asyncio.create_task(prepare(each)) for each in (mine, other)]
    await asyncio.sleep(0)
    preparations.abort(lambda request_id, caller: (request_id, caller) == ("r", ANN))
    with pytest.raises(AbortedError):
        await running[0]
    await running[1]


async def test_an_abort_between_two_waits_is_kept():
    preparations = Preparations()
    preparation = preparations.begin("r")
    with preparation:
        await asyncio.sleep(0)
    preparation.require_alive()
    preparations.abort(lambda *_: True)
    with pytest.raises(AbortedError):
        preparation.require_alive()


def test_requests_that_have_ended_are_forgotten():
    preparations = Preparations()
    preparations.begin("r")
    gc.collect()
    assert not preparations.open
