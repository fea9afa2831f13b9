"""The bridge between the engine's thread and asyncio."""

import asyncio
import sys
import threading
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import pytest

from specdec.engine.engine_thread import EngineThread
from specdec.engine.requests.outputs import StepOutputs
from specdec.engine.requests.preparations import Preparations
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.errors import (
    BadLogitsError,
    InvalidValueError,
    NotReadyError,
    OverloadedError,
    TargetFailedError,
)
from specdec.types.messages import VerifiedRow
from tests.specdec.engine.requests.test_remote_streams import Sink
from tests.specdec.engines import HashTarget, engine_config, make_engine, request
from tests.waiting import eventually

PROMPT = [11, 12, 13, 11, 12]


class GatedTarget(HashTarget):
    """Waits at a semaphore in each step, and may then fail. has_arrived: at the semaphore."""

    def __init__(self) -> None:
        super().__init__(block_size=4, vocab_size=383)
        self.gate = threading.Semaphore(10_000)
        self.has_arrived = False
        self.error: Exception | None = None

    def collect(self):
        self.has_arrived = True
        self.gate.acquire()
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


async def stepping(target, awaitable):
    """Release a closed gate step by step until an awaitable has its result, and return that."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        if target.has_arrived:
            target.has_arrived = False
            target.gate.release()
        await asyncio.sleep(0.001)
    return await task


async def test_stats_include_ended_requests_immediately(loop, target):
    target.gate = threading.Semaphore(0)
    others = asyncio.create_task(tokens_of(loop, request("others", [1, 2], max_tokens=150)))
    for index in range(5):
        before = loop.last_stats.counts.num_generated_tokens
        await stepping(target, tokens_of(loop, request("one", [3, 4], max_tokens=3 + index)))
        assert loop.last_stats.counts.num_generated_tokens >= before + 3 + index
    assert not others.done()
    target.gate.release(10_000)
    await others
    assert loop.last_stats.counts.num_generated_tokens == 150 + sum(range(3, 8))


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


async def test_two_requests_may_have_the_same_id(loop, target):
    async def tokens(prompt):
        outputs = [output async for output in loop.generate(request("same", prompt))]
        return [token for output in outputs for token in output.token_ids]

    prompts = ([11], [12])
    expected = [target.continuation(prompt, 24) for prompt in prompts]
    assert await asyncio.gather(*map(tokens, prompts)) == expected


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
    await eventually(lambda: loop.num_streams)
    assert (loop.num_streams, loop.num_sequences) == (1, 4)
    loop.require_room(most - 4)
    with pytest.raises(OverloadedError, match=f"4 of {most} requests run or wait"):
        loop.require_room(most - 3)
    target.gate.release(10_000)
    assert len(await stream) == 4 * 24
    loop.require_room(most)


async def test_leaving_a_stream_aborts_all_its_choices(loop, target):
    target.gate = threading.Semaphore(0)
    async with aclosing(loop.generate(request("r", PROMPT, n=3, max_tokens=100))) as outputs:
        await stepping(target, anext(outputs))
        assert (await stepping(target, loop.stats())).num_running == 3
    stats = await stepping(target, loop.stats())
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
    target.gate = threading.Semaphore(0)
    async with aclosing(loop.generate(request("r", PROMPT, max_tokens=100))) as outputs:
        await stepping(target, anext(outputs))
        assert (await stepping(target, loop.stats())).num_running == 1
    stats = await stepping(target, loop.stats())
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


async def test_an_open_stream_has_no_preparation(loop):
    preparations = Preparations()
    preparation = preparations.begin("r")
    async with aclosing(loop.generate(request("r", PROMPT), None, preparation)) as outputs:
        await anext(outputs)
        assert not preparations.open
        preparations.abort(lambda *_: True)
        assert not preparation.is_aborted


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
    await eventually(lambda: target.has_arrived)
    closing = asyncio.create_task(loop.close())
    await eventually(lambda: loop._commands)
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
    await eventually(lambda: loop.num_streams)
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


async def test_requests_of_all_processes_are_refused_by_a_full_queue(tiny_model_dir, target):
    config = engine_config(max_num_seqs=1, max_queue_len=0)
    loop = EngineThread(make_engine(tiny_model_dir, config, target))
    refused = loop.event_loop.create_future()
    target.gate = threading.Semaphore(1)
    async with aclosing(loop.generate(request("other", PROMPT))) as others:
        await anext(others)
        with pytest.raises(OverloadedError, match="1 of 1 requests run or wait"):
            await tokens_of(loop, request("new", PROMPT))
        settle = partial(loop.event_loop.call_soon_threadsafe, refused.set_result)
        loop.submit(request("far", PROMPT), Sink(), lambda error: settle(error))
        target.gate.release(10_000)
        assert isinstance(await asyncio.wait_for(refused, 10), OverloadedError)
    await loop.close()


async def test_a_drain_without_requests_returns_immediately(loop):
    await asyncio.wait_for(loop.drain(3600), 30)
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


async def test_no_step_runs_when_the_only_request_has_expired(loop, monkeypatch):
    steps = []
    monkeypatch.setattr(loop._engine, "step", lambda: steps.append("step") or StepOutputs())
    with pytest.raises(OverloadedError):
        await tokens_of(loop, replace(request("late", PROMPT), queue_deadline_s=0.0))
    await loop.stats()
    assert steps == []


async def test_an_unread_ended_request_does_not_count_towards_the_limit(loop, unjoined):
    outputs = loop.generate(request("r", PROMPT))
    await anext(outputs)
    await eventually(lambda: not loop.num_streams)
    loop.require_room()
    assert len([output async for output in outputs]) > 0


async def test_an_unread_failed_request_does_not_count_towards_the_limit(tiny_model_dir):
    loop = EngineThread(make_engine(tiny_model_dir, engine_config(), NanTarget()))
    outputs = loop.generate(request("r", [11, 12], n=3))
    await anext(outputs)
    await eventually(lambda: not loop.num_sequences)
    assert loop.num_streams == 0
    with pytest.raises(BadLogitsError):
        _ = [each async for each in outputs]
    await loop.close()


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
