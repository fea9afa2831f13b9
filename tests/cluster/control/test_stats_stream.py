"""Streams of statistics."""

import asyncio

import pytest

from cluster.control import stats_stream
from cluster.control.stats_stream import StatsStreams
from specdec.types.errors import NotReadyError, OverloadedError


async def fleet():
    return "statistics"


async def test_a_stream_ends_when_the_replica_drains_and_no_other_begins():
    streams = StatsStreams(fleet)
    stream = streams.watch(60)
    assert await anext(stream) == "statistics"
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    streams.drain()
    with pytest.raises(NotReadyError, match="draining"):
        await asyncio.wait_for(waiting, 1)
    with pytest.raises(NotReadyError):
        await anext(streams.watch(1))
    assert streams.num_watchers == 0


async def test_the_number_of_watchers_is_limited(monkeypatch):
    monkeypatch.setattr(stats_stream, "MAX_WATCHERS", 2)
    streams = StatsStreams(fleet)
    open_streams = [streams.watch(1) for _ in range(2)]
    for stream in open_streams:
        await anext(stream)
    with pytest.raises(OverloadedError):
        await anext(streams.watch(1))
    await open_streams[0].aclose()
    assert await anext(streams.watch(1)) == "statistics"


async def test_an_unavailable_control_plane_ends_a_stream():
    async def fail():
        raise NotReadyError("unavailable")

    streams = StatsStreams(fail)
    with pytest.raises(NotReadyError, match="unavailable"):
        await anext(streams.watch(1))
    assert streams.num_watchers == 0
