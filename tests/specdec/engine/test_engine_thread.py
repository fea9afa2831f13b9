"""The bridge between the engine's thread and asyncio."""

import asyncio
import sys
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from unittest.mock import Mock

import pytest

from specdec.engine.engine_thread import EngineThread
from specdec.engine.metrics.metrics import QUEUE_TIME, Metrics
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.errors import (
    BadLogitsError,
    CrashingRequestError,
    InvalidValueError,
    NotReadyError,
    OverloadedError,
    TargetFailedError,
)
from specdec.types.messages import VerifiedRow
from tests.specdec.engines import HashTarget, engine_config, make_engine, request

PROMPT = [11, 12, 13, 11, 12]


class GatedTarget(HashTarget):
    """Waits at a semaphore in each step, and may then fail."""

    def __init__(self) -> None:
        super().__init__(block_size=4, vocab_size=383)
        self.gate = threading.Semaphore(10_000)
        self.step_s = 0.0
        self.error: Exception | None = None

    def collect(self):
        self.gate.acquire()
        time.sleep(self.step_s)
        if self.error is not None:
            raise self.error
        return super().collect()


class NanTarget(HashTarget):
    """Reports NaN logits for the second request."""

    def __init__(self) -> None:
        super().__init__(block_size=4, vocab_size=383)

    def collect(self):
        output = super().collect()
        rows = (
            VerifiedRow(1, (), has_bad_logits=True) if r.seq_id == 1 else r for r in output.rows
        )
        return replace(output, rows=tuple(rows))


@pytest.fixture
def target():
    return GatedTarget()


@pytest.fixture
async def loop(tiny_model_dir, target):
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target))
    yield loop
    target.gate.release(10_000)
    await loop.close()


async def tokens_of(loop, each):
    return [token async for output in loop.generate(each) for token in output.token_ids]


async def test_stats_include_ended_requests_immediately(loop, target):
    target.step_s = 0.002
    others = asyncio.create_task(tokens_of(loop, request("others", [1, 2], max_tokens=100)))
    for index in range(5):
        before = loop.last_stats.counts.num_generated_tokens
        await tokens_of(loop, request("one", [3, 4], max_tokens=3 + index))
        assert loop.last_stats.counts.num_generated_tokens >= before + 3 + index
    assert not others.done()
    await others
    assert loop.last_stats.counts.num_generated_tokens == 100 + sum(range(3, 8))


async def test_a_call_after_stop_is_rejected_instead_of_blocking(loop, target):
    """The call is queued after the stop command, before the thread receives that."""
    target.gate = threading.Semaphore(0)
    stream = asyncio.create_task(tokens_of(loop, request("long", PROMPT)))
    await asyncio.sleep(0.05)  # the step is in flight
    loop._commands.put(None)
    late = asyncio.create_task(loop.stats())
    await asyncio.sleep(0)
    target.gate.release(10_000)
    with pytest.raises(NotReadyError, match="shutting down"):
        await asyncio.wait_for(late, 10)
    with pytest.raises(NotReadyError, match="shutting down"):
        await asyncio.wait_for(loop.stats(), 10)
    await loop.close()
    with pytest.raises(NotReadyError):
        await stream


async def test_streams_of_many_requests_at_once(loop, target):
    requests = [request(f"r{i}", [11 + i % 4] * (i + 1)) for i in range(20)]
    generated = await asyncio.gather(*(tokens_of(loop, each) for each in requests))
    for each, tokens in zip(requests, generated, strict=True):
        assert tokens == target.continuation(each.prompt_token_ids, 24)


async def test_outputs_have_the_callers_id_even_if_two_requests_share_it(loop):
    async def ids(prompt):
        return {output.request_id async for output in loop.generate(request("same", prompt))}

    assert await asyncio.gather(ids([11]), ids([12])) == [{"same"}, {"same"}]


async def test_choices_share_one_stream_that_ends_with_the_last_of_them(loop, target):
    outputs = [output async for output in loop.generate(request("r", PROMPT, n=3))]
    for choice in range(3):
        generated = [token for each in outputs if each.choice == choice for token in each.token_ids]
        assert generated == target.continuation(PROMPT, 24)
    assert [each.is_last for each in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (loop.num_streams, loop.num_sequences) == (0, 0)


async def test_each_choice_counts_towards_the_limit_until_it_ends(loop, target):
    target.gate = threading.Semaphore(0)
    config = engine_config(3)
    most = config.max_num_seqs + config.max_queue_len
    with pytest.raises(InvalidValueError, match=f"n is {most + 1}; it must be at most {most}"):
        loop.require_room(most + 1)
    stream = asyncio.create_task(tokens_of(loop, request("r", PROMPT, n=4)))
    await asyncio.sleep(0.05)
    assert (loop.num_streams, loop.num_sequences) == (1, 4)
    loop.require_room(most - 4)
    with pytest.raises(OverloadedError, match=f"4 of {most} requests run or wait"):
        loop.require_room(most - 3)
    target.gate.release(10_000)
    assert len(await stream) == 4 * 24
    loop.require_room(most)


async def test_leaving_a_stream_aborts_all_its_choices(loop, target):
    target.step_s = 0.01
    async with aclosing(loop.generate(request("r", PROMPT, n=3, max_tokens=100))) as outputs:
        await anext(outputs)
    stats = await loop.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


async def test_a_rejected_request_raises_and_the_thread_continues(loop, target):
    with pytest.raises(InvalidValueError, match="prompt"):
        await tokens_of(loop, request("bad", []))
    assert await tokens_of(loop, request("good", PROMPT)) == target.continuation(PROMPT, 24)


async def test_an_error_of_one_request_ends_only_its_stream(tiny_model_dir):
    target = NanTarget()
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(), target))
    generated = await asyncio.gather(
        *(tokens_of(loop, request(f"r{i}", [11 + i, 12])) for i in range(3)), return_exceptions=True
    )
    assert isinstance(generated[1], BadLogitsError)
    assert [generated[0], generated[2]] == [target.continuation([11 + i, 12], 24) for i in (0, 2)]
    assert loop.num_streams == 0
    stats = await loop.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
    await loop.close()


async def test_leaving_a_stream_aborts_its_request(loop, target):
    target.step_s = 0.01  # so that it still runs when the stats are read
    async with aclosing(loop.generate(request("r", PROMPT, max_tokens=100))) as outputs:
        await anext(outputs)
        assert (await loop.stats()).num_running == 1
    stats = await loop.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


async def test_cancellation_while_a_request_is_added_aborts_it(loop, target):
    target.gate = threading.Semaphore(0)
    holding = asyncio.create_task(tokens_of(loop, request("holding", PROMPT)))
    await asyncio.sleep(0.05)  # the engine's thread now waits in a step
    leaving = asyncio.create_task(tokens_of(loop, request("leaving", PROMPT)))
    await asyncio.sleep(0.05)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    target.gate.release(10_000)
    assert await holding == target.continuation(PROMPT, 24)
    stats = await loop.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_a_lost_target_fails_every_stream_and_every_call(loop, target):
    streams = [asyncio.create_task(tokens_of(loop, request(f"r{i}", PROMPT))) for i in range(4)]
    target.error = TargetFailedError("rank 1 failed")
    for error in await asyncio.gather(*streams, return_exceptions=True):
        assert isinstance(error, TargetFailedError)
    assert isinstance(loop.failure, TargetFailedError)
    with pytest.raises(TargetFailedError):
        await loop.stats()
    with pytest.raises(TargetFailedError):
        await tokens_of(loop, request("late", PROMPT))


async def test_close_ends_open_streams_and_rejects_new_ones(tiny_model_dir, target):
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(), target))
    target.gate = threading.Semaphore(2)
    stream = asyncio.create_task(tokens_of(loop, request("r", PROMPT)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(loop.close())
    await asyncio.sleep(0.05)
    target.gate.release(10_000)  # only now, so that the request is still open
    await closing
    with pytest.raises(NotReadyError, match="shutting down"):
        await stream
    with pytest.raises(NotReadyError, match="shutting down"):
        await loop.stats()


async def test_speculation_is_set_between_two_steps(tiny_model_dir, target):
    off, on = (SpeculationControl(mode, 32, num_speculative_tokens=3) for mode in ("off", "on"))
    policy = SpeculationPolicy(off, clock=lambda: 0.0)
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target, policy=policy))
    assert await tokens_of(loop, request("a", PROMPT)) == target.continuation(PROMPT, 24)
    assert (await loop.stats()).counts.speculation.num_drafts == 0
    await loop.set_speculation(on)
    assert (await loop.stats()).is_speculation_on
    assert await tokens_of(loop, request("b", PROMPT)) == target.continuation(PROMPT, 24)
    assert (await loop.stats()).counts.speculation.num_drafts > 0
    await loop.close()


async def test_drain_completes_running_requests_and_rejects_new_ones(loop, target):
    target.gate = threading.Semaphore(0)
    stream = asyncio.create_task(tokens_of(loop, request("r", PROMPT)))
    await asyncio.sleep(0.05)
    assert (loop.num_streams, loop.is_draining) == (1, False)
    drain = asyncio.create_task(loop.drain(30))
    await asyncio.sleep(0.05)
    assert loop.is_draining
    assert not drain.done()
    with pytest.raises(NotReadyError, match="draining"):
        await tokens_of(loop, request("late", PROMPT))
    target.gate.release(10_000)
    await asyncio.wait_for(drain, 10)
    assert await stream == target.continuation(PROMPT, 24)


async def test_a_later_part_of_a_request_is_admitted_in_a_drain_and_by_a_full_queue(
    loop, target, monkeypatch
):
    first = loop.generate(request("r", PROMPT))
    await anext(first)
    drain = asyncio.create_task(loop.drain(30))
    await asyncio.sleep(0)

    def refuse(num_choices):
        raise OverloadedError("full")

    monkeypatch.setattr(loop, "require_room", refuse)
    outputs = [each async for each in loop.generate(request("r", PROMPT), is_admitted=True)]
    assert outputs[-1].is_last
    assert not drain.done()
    await first.aclose()
    await asyncio.wait_for(drain, 10)


async def test_a_drain_without_requests_returns_immediately(loop):
    await asyncio.wait_for(loop.drain(3600), 1)
    assert loop.is_draining


async def test_requests_that_outlast_the_drain_end_with_an_error(loop, target):
    target.gate = threading.Semaphore(0)
    stream = asyncio.create_task(tokens_of(loop, request("r", PROMPT)))
    await asyncio.sleep(0.05)
    await loop.drain(0.05)
    with pytest.raises(NotReadyError, match="before the answer was complete"):
        await stream
    assert loop.num_streams == 0


async def test_a_stalled_reader_does_not_delay_the_drain(loop):
    outputs = loop.generate(request("r", PROMPT, max_tokens=100))
    await anext(outputs)
    await asyncio.wait_for(loop.drain(0.05), 5)
    assert loop.num_streams == 0
    await outputs.aclose()


async def test_the_thread_blocks_while_it_has_no_work(loop, target):
    await tokens_of(loop, request("r", PROMPT))
    num_steps = (await loop.stats()).counts.num_steps
    await asyncio.sleep(0.2)
    assert (await loop.stats()).counts.num_steps == num_steps


async def test_streams_pause_while_the_target_restarts(tiny_model_dir, target):
    made = threading.Event()
    successor = HashTarget(block_size=4, vocab_size=383)

    def restart():
        made.wait(10)
        return successor

    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target), restart)
    target.step_s = 0.01
    running = asyncio.create_task(tokens_of(loop, request("running", PROMPT, max_tokens=60)))
    await asyncio.sleep(0.1)
    target.error = TargetFailedError("lost")
    while not loop.is_recovering:
        await asyncio.sleep(0.01)
    late = replace(request("late", PROMPT), queue_deadline_s=time.monotonic() + 0.2)
    with pytest.raises(OverloadedError, match="past its deadline"):
        await tokens_of(loop, late)
    waiting = asyncio.create_task(tokens_of(loop, request("waiting", PROMPT)))
    await asyncio.sleep(0.05)
    made.set()
    assert await running == successor.continuation(PROMPT, 60)
    assert await waiting == successor.continuation(PROMPT, 24)
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

    The lost step is the first one of the next request.
    """
    has_ended = threading.Event()

    def restart():
        assert has_ended.wait(10)
        return HashTarget(block_size=4, vocab_size=383)

    config = engine_config(max_num_seqs=1, async_scheduling=is_async)
    engine = make_engine(tiny_model_dir, config, StuckTarget(3))
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
    assert len([output async for output in stream]) == 24
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
    while not loop.is_recovering:
        await asyncio.sleep(0.01)
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


async def test_streams_fail_if_the_target_cannot_restart(tiny_model_dir, target):
    def restart():
        raise TargetFailedError("it failed 5 times in a row")

    loop = EngineThread(make_engine(tiny_model_dir, engine_config(3), target), restart)
    target.error = TargetFailedError("lost")
    with pytest.raises(TargetFailedError, match="could not be started again: it failed 5 times"):
        await tokens_of(loop, request("r", PROMPT))
    assert not loop.is_recovering
    await loop.close()


async def test_an_unread_ended_request_does_not_count_towards_the_limit(loop):
    outputs = loop.generate(request("r", PROMPT))
    await anext(outputs)
    while loop.num_streams:
        await asyncio.sleep(0.01)
    loop.require_room()
    assert len([output async for output in outputs]) > 0


async def test_a_busy_thread_does_not_delay_steps(loop, target):
    """Each step acquires the interpreter lock a few times, each within a switch interval."""
    stop = threading.Event()

    def be_busy():
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=be_busy)
    busy.start()
    try:
        assert sys.getswitchinterval() <= 0.001
        assert await tokens_of(loop, request("r", PROMPT)) == target.continuation(PROMPT, 24)
    finally:
        stop.set()
        busy.join()
