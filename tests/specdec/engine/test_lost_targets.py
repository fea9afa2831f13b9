"""Loss of the target under an engine's thread: streams pause and continue, or fail."""

import asyncio
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest

from specdec.engine.engine_thread import EngineThread
from specdec.engine.metrics.metrics import QUEUE_TIME, Metrics
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.types.errors import (
    CrashingRequestError,
    NotReadyError,
    OverloadedError,
    TargetFailedError,
)
from tests.specdec.engine.test_engine_thread import PROMPT, GatedTarget, tokens_of
from tests.specdec.engines import HashTarget, engine_config, make_engine, request
from tests.waiting import eventually


@pytest.fixture
def target():
    return GatedTarget()


@pytest.fixture
async def loop(tiny_model_dir, target):
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target))
    yield loop
    target.gate.release(10_000)
    await loop.close()


async def test_streams_pause_while_the_target_restarts(tiny_model_dir, target):
    made = threading.Event()
    successor = HashTarget(block_size=4, vocab_size=383)

    def restart():
        made.wait(30)
        return successor

    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target), restart)
    target.gate = threading.Semaphore(5)
    received = []

    async def receive():
        async for output in loop.generate(request("running", PROMPT, max_tokens=60)):
            received.extend(output.token_ids)

    running = asyncio.create_task(receive())
    await eventually(lambda: received)
    target.error = TargetFailedError("lost")
    target.gate.release()
    await eventually(lambda: loop.is_recovering)
    late = replace(request("late", PROMPT), queue_deadline_s=time.monotonic() + 0.2)
    with pytest.raises(OverloadedError, match="past its deadline"):
        await tokens_of(loop, late)
    waiting = asyncio.create_task(tokens_of(loop, request("waiting", PROMPT)))
    await asyncio.sleep(0.05)
    made.set()
    await running
    assert received == successor.continuation(PROMPT, 60)
    assert await waiting == successor.continuation(PROMPT, 24)
    await loop.close()


async def test_stats_include_requests_that_arrive_while_the_target_restarts(tiny_model_dir, target):
    made = threading.Event()

    def restart():
        made.wait(30)
        return HashTarget(block_size=4, vocab_size=383)

    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target), restart)
    target.error = TargetFailedError("lost")
    streams = [asyncio.create_task(tokens_of(loop, request("running", PROMPT)))]
    await eventually(lambda: loop.is_recovering)
    for index in range(5):
        streams.append(asyncio.create_task(tokens_of(loop, request(f"r{index}", PROMPT))))
    await eventually(lambda: loop.last_stats.num_waiting == 5)
    made.set()
    await asyncio.gather(*streams)
    await loop.close()


class StuckTarget(HashTarget):
    """Fails when it is sent its step number `num_begun`, after it has returned the one before."""

    def __init__(self, num_begun):
        super().__init__(block_size=4, vocab_size=383)
        self.num_begun = num_begun

    def begin(self, step):
        if len(self.steps) == self.num_begun:
            raise TargetFailedError("rank 0 of the target does not read its messages")
        super().begin(step)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stream_that_ended_before_the_loss_of_the_target_gets_its_end(
    tiny_model_dir, is_async
):
    """Its last token is delivered before the restart, which lasts until it has arrived.

    The lost step is the first one of the next request, or the second one where the first has begun
    before that token was known.
    """
    has_ended = threading.Event()

    def restart():
        assert has_ended.wait(10)
        return HashTarget(block_size=4, vocab_size=383)

    config = engine_config(max_num_seqs=1, async_scheduling=is_async)
    engine = make_engine(tiny_model_dir, config, StuckTarget(3 + is_async))
    loop, metrics = EngineThread(engine, restart), Metrics()

    async def timed(each):
        stream = loop.generate(each, RequestMetrics(each.request_id, metrics))
        return [token async for output in stream for token in output.token_ids]

    short = asyncio.create_task(timed(request("short", PROMPT, max_tokens=3)))
    next_one = asyncio.create_task(timed(request("next", PROMPT, max_tokens=20)))
    expected = HashTarget(block_size=4, vocab_size=383).continuation(PROMPT, 20)
    assert await asyncio.wait_for(short, 10) == expected[:3]
    has_ended.set()
    assert await asyncio.wait_for(next_one, 10) == expected
    assert sum(metrics[QUEUE_TIME].read().counts) == 2
    await loop.close()


async def test_a_request_that_is_lost_in_its_first_step_is_timed_once(tiny_model_dir):
    engine = make_engine(tiny_model_dir, engine_config(), StuckTarget(0))
    loop = EngineThread(engine, lambda: HashTarget(block_size=4, vocab_size=383))
    metrics = Metrics()
    stream = loop.generate(request("r", PROMPT), RequestMetrics("r", metrics))
    assert sum([len(output.token_ids) async for output in stream]) == 24
    assert sum(metrics[QUEUE_TIME].read().counts) == 1
    await loop.close()


class KilledBySecond(HashTarget):
    """Is lost in each step of the second request."""

    def __init__(self):
        super().__init__(block_size=4, vocab_size=383)

    def collect(self):
        if any(row.seq_id == 1 for row in self._in_flight[0].rows):
            raise TargetFailedError("the process was killed")
        return super().collect()


async def test_the_stream_of_a_request_that_ends_the_target_fails_before_the_restart(
    tiny_model_dir,
):
    """Otherwise it would get the error of a target that cannot start, and be sent again."""
    has_failed = threading.Event()
    losses, explained = [], []

    def restart():
        losses.append(len(losses))
        if len(losses) == 3:
            assert has_failed.wait(10)
        return KilledBySecond()

    engine = make_engine(tiny_model_dir, engine_config(), KilledBySecond())
    loop = EngineThread(engine, restart, on_loss_explained=lambda: explained.append(len(losses)))
    streams = [asyncio.create_task(tokens_of(loop, request(f"r{i}", PROMPT))) for i in range(4)]
    with pytest.raises(CrashingRequestError):
        await asyncio.wait_for(streams[1], 10)
    has_failed.set()
    for index in (0, 2, 3):
        assert await streams[index] == KilledBySecond().continuation(PROMPT, 24)
    assert (len(losses), explained) == (3, [3]), "once the third target has generated tokens"
    await loop.close()


async def test_losses_of_a_target_that_generates_nothing_are_not_explained(tiny_model_dir):
    """A broken target would otherwise end one request after the other, and never be given up."""
    num_restarts, explained = 0, []

    def broken():
        made = GatedTarget()
        made.error = TargetFailedError("lost")
        return made

    def restart():
        nonlocal num_restarts
        num_restarts += 1
        if num_restarts == 6:
            raise TargetFailedError("it failed 5 times in a row")
        return broken()

    engine = make_engine(tiny_model_dir, engine_config(), broken())
    loop = EngineThread(engine, restart, on_loss_explained=lambda: explained.append(True))
    streams = [tokens_of(loop, request(f"r{i}", PROMPT)) for i in range(8)]
    async with asyncio.timeout(10):
        results = await asyncio.gather(*streams, return_exceptions=True)
    assert explained == []
    assert {type(each) for each in results} == {CrashingRequestError, TargetFailedError}
    await loop.close()


async def test_a_command_that_loses_the_target_restarts_it(tiny_model_dir, target):
    """As the order for a profile, which a rank does not read."""
    restarted = threading.Event()

    def restart():
        restarted.set()
        return HashTarget(block_size=4, vocab_size=383)

    def order():
        raise TargetFailedError("rank 0 of the target does not read its messages")

    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target), restart)
    with pytest.raises(TargetFailedError, match="does not read"):
        await loop.call(order)
    assert await asyncio.to_thread(restarted.wait, 10)
    assert await tokens_of(loop, request("r", PROMPT)) == target.continuation(PROMPT, 24)
    await loop.close()


async def test_streams_continue_where_the_lost_target_cannot_be_ended(tiny_model_dir, target):
    def end():
        raise RuntimeError("Ray cannot kill an actor")

    engine = make_engine(tiny_model_dir, engine_config(3), target)
    loop = EngineThread(engine, lambda: HashTarget(block_size=4, vocab_size=383), end)
    target.error = TargetFailedError("lost")
    generated = await asyncio.wait_for(tokens_of(loop, request("r", PROMPT)), 10)
    assert generated == target.continuation(PROMPT, 24)
    await loop.close()


async def test_streams_fail_if_the_engine_thread_ends_by_an_error(
    tiny_model_dir, target, monkeypatch
):
    """Such as one of `expire`, which also runs while the target restarts."""
    restarted = threading.Event()
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    loop = EngineThread(engine, lambda: restarted.wait(10))
    target.error = TargetFailedError("lost")
    stream = asyncio.create_task(tokens_of(loop, request("r", PROMPT)))
    await eventually(lambda: loop.is_recovering)
    monkeypatch.setattr(engine, "expire", Mock(side_effect=KeyError("a bug of ours")))
    with pytest.raises(TargetFailedError, match="engine error"):
        await asyncio.wait_for(stream, 10)
    restarted.set()
    with pytest.raises((TargetFailedError, NotReadyError)):
        await asyncio.wait_for(loop.stats(), 10)
    await loop.close()


async def test_on_target_lost_runs_on_the_engine_thread_before_the_restart(tiny_model_dir, target):
    recorded = []

    def record(event):
        recorded.append((event, threading.current_thread().name))

    def restart():
        record("restart")
        return HashTarget(block_size=4, vocab_size=383)

    engine = make_engine(tiny_model_dir, engine_config(3), target)
    loop = EngineThread(engine, restart, on_target_lost=lambda: record("lost"))
    target.error = TargetFailedError("lost")
    assert len(await tokens_of(loop, request("r", PROMPT))) == 24
    assert recorded == [("lost", "engine"), ("restart", "recovery")]
    await loop.close()


@pytest.mark.parametrize("kind", [TargetFailedError, BaseException])
async def test_streams_fail_if_the_target_cannot_restart(tiny_model_dir, target, kind):
    def restart():
        raise kind("it failed 5 times in a row")

    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target), restart)
    target.error = TargetFailedError("lost")
    with pytest.raises(TargetFailedError, match="could not be started again: it failed 5 times"):
        await asyncio.wait_for(tokens_of(loop, request("r", PROMPT)), 60)
    assert not loop.is_recovering
    await loop.close()
