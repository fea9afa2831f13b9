"""Commands to the engine's thread: when their results are returned, and errors beside the steps."""

import asyncio
import threading
import time
from unittest.mock import Mock

import pytest

from specdec.engine.commands import Command, CommandQueue
from specdec.engine.engine_thread import EngineThread
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.types.deadline import Deadline
from specdec.types.errors import (
    AbortedError,
    DeadlineExceededError,
    DetokenizeError,
    TargetFailedError,
)
from tests.specdec.engine.test_engine_thread import PROMPT, tokens_of
from tests.specdec.engines import HashTarget, engine_config, make_engine, request


@pytest.fixture
def engine(tiny_model_dir):
    target = HashTarget(block_size=4, vocab_size=383)
    return make_engine(tiny_model_dir, engine_config(3), target)


@pytest.fixture
async def loop(engine):
    loop = EngineThread(engine)
    yield loop
    await loop.close()


class Held:
    """Context in which the engine's thread begins no command."""

    def __init__(self, loop):
        self.loop, self.is_over = loop, threading.Event()

    async def __aenter__(self):
        self.loop.post(lambda: self.is_over.wait(10), is_brief=True)

    async def __aexit__(self, *_):
        await asyncio.sleep(0)  # calls that are tasks have begun
        self.is_over.set()


def brief_call(loop, function):
    return asyncio.ensure_future(loop.call(function, is_brief=True))


async def test_brief_commands_that_wait_together_are_answered_together(loop, monkeypatch):
    """The stats that include them are made once."""
    made, stats = [], loop._engine.stats
    monkeypatch.setattr(loop._engine, "stats", lambda: made.append(stats()) or made[-1])
    async with Held(loop):
        calls = [brief_call(loop, lambda each=each: 1 // each) for each in (1, 0)]
    values = await asyncio.gather(*calls, return_exceptions=True)
    assert values[0] == 1
    assert isinstance(values[1], ZeroDivisionError)
    assert len(made) == 1
    assert loop.last_stats is made[0]


@pytest.mark.parametrize("error", [StopIteration(), BaseException("panic")], ids=repr)
async def test_no_error_of_a_command_keeps_others_from_their_results(loop, error):
    def fail():
        raise error

    async with Held(loop):
        calls = [brief_call(loop, each) for each in (fail, lambda: 7)]
    async with asyncio.timeout(30):
        found, other = await asyncio.gather(*calls, return_exceptions=True)
    assert (type(found), found.__cause__, other) == (RuntimeError, error, 7)


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("error", [ValueError("broken"), BaseException("panic")], ids=repr)
async def test_a_text_that_cannot_be_made_ends_its_request_alone(
    loop, monkeypatch, error, num_choices
):
    """The engine makes the text of requests with stop strings."""
    append = IncrementalDetokenizer.append

    def fail(self, token_id):
        if "faulty" in self._stop and self._num_tokens == 3:
            raise error
        return append(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "append", fail)
    stops = (("faulty",), ("never",), ())
    generated = await asyncio.gather(
        *(tokens_of(loop, request("r", PROMPT, stop=each, n=num_choices)) for each in stops),
        return_exceptions=True,
    )
    assert isinstance(generated[0], DetokenizeError)
    assert "after 3 output tokens" in str(generated[0])
    assert [len(each) for each in generated[1:]] == [24 * num_choices] * 2
    stats = await loop.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


async def test_an_error_that_is_no_exception_ends_all_streams(loop, monkeypatch):
    monkeypatch.setattr(loop._engine, "step", Mock(side_effect=BaseException("panic")))
    with pytest.raises(TargetFailedError, match="engine error"):
        await asyncio.wait_for(tokens_of(loop, request("r", PROMPT)), 30)
    assert loop.failure is not None


async def test_a_silent_command_returns_only_an_error(loop):
    async with Held(loop):
        done, failed = loop.event_loop.create_future(), loop.event_loop.create_future()
        for function, result in ((int, done), (lambda: 1 // 0, failed)):
            loop._commands.put(Command(function, result, is_brief=True, is_silent=True))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(failed, 10)
    assert not done.done()


async def test_no_result_waits_for_a_command_that_may_take_long(loop):
    """Such as the load of an adapter, or the exchange of a lost target."""
    is_over = threading.Event()
    async with Held(loop):
        before = brief_call(loop, lambda: "before")
        await asyncio.sleep(0)
        loop.post(lambda: is_over.wait(10))
        after = brief_call(loop, lambda: "after")
    assert await asyncio.wait_for(before, 5) == "before"
    assert not after.done()
    is_over.set()
    assert await after == "after"


async def test_a_result_that_may_have_taken_long_waits_for_no_command_after_it(loop):
    is_over = threading.Event()
    async with Held(loop):
        long = asyncio.ensure_future(loop.call(lambda: "long"))
        brief = brief_call(loop, lambda: is_over.wait(10))
    assert await asyncio.wait_for(long, 5) == "long"
    is_over.set()
    assert await brief


async def test_the_error_that_loses_the_target_is_returned_before_the_recovery(engine):
    is_over = threading.Event()
    loop = EngineThread(engine, lambda: HashTarget(4, 383), lambda: is_over.wait(10))

    def lose():
        raise TargetFailedError("lost")

    with pytest.raises(TargetFailedError, match="lost"):
        await asyncio.wait_for(loop.call(lose, is_brief=True), 5)
    is_over.set()
    await loop.close()


@pytest.mark.parametrize("timeout_s", [None, 0.05])
async def test_a_request_ends_before_the_engine_has_it(loop, timeout_s):
    """By an abort, or at its deadline; the engine then drops it."""
    deadline = None if timeout_s is None else Deadline.after(timeout_s)
    stream = loop.generate(request("r", [1, 2, 3]), deadline=deadline)
    async with Held(loop):
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        if deadline is None:
            loop.abort("r")
        with pytest.raises(AbortedError if deadline is None else DeadlineExceededError):
            await asyncio.wait_for(first, 5)
    await loop.call(lambda: loop._engine.check_integrity())
    assert not loop._engine.has_work


async def test_stats_that_cannot_be_made_end_the_engine_and_settle_every_command(loop, monkeypatch):
    def stats():
        raise KeyError("a bug of ours")

    async def first_of_a_stream():
        return await anext(loop.generate(request("r", [1, 2, 3])))

    monkeypatch.setattr(loop._engine, "stats", stats)
    async with Held(loop):
        stream = asyncio.ensure_future(first_of_a_stream())
        value = brief_call(loop, lambda: 1)
    async with asyncio.timeout(10):
        assert await value == 1
        for each in (stream, loop.call(int)):
            with pytest.raises(TargetFailedError, match="engine error"):
                await each
    assert isinstance(loop.failure, TargetFailedError)


async def test_commands_after_an_error_of_the_thread_are_refused_with_the_failure(loop):
    async with Held(loop):
        loop._commands.put(Command(int, on_end=lambda error: 1 // 0))
        queued = brief_call(loop, int)
    for each in (queued, loop.call(int)):
        with pytest.raises(TargetFailedError, match="engine error"):
            await asyncio.wait_for(each, 10)


async def test_commands_of_one_iteration_of_the_event_loop_wake_the_thread_once():
    commands = CommandQueue(asyncio.get_running_loop())

    def take():
        commands.wait(10)
        return len([*commands.drain()])

    taken = asyncio.ensure_future(asyncio.to_thread(take))
    while not commands._is_waiting:
        await asyncio.sleep(0.001)
    for _ in range(3):
        commands.put_with_others(Command(int))
        time.sleep(0.01)  # in which the thread would take the first one alone
    assert await asyncio.wait_for(taken, 5) == 3


async def test_a_command_of_another_thread_wakes_the_thread_at_once():
    commands = CommandQueue(asyncio.get_running_loop())
    waiting = asyncio.ensure_future(asyncio.to_thread(commands.wait, 10))
    while not commands._is_waiting:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(commands.put, Command(int))
    await asyncio.wait_for(waiting, 5)
    assert commands


async def test_a_burst_wakes_the_thread_once():
    """Also where the thread has not had the interpreter since the first of them."""
    commands = CommandQueue(asyncio.get_running_loop())
    commands._is_waiting = True  # as the thread leaves it until it runs again
    for _ in range(100):
        commands.put(Command(int))
    assert commands._wakes.qsize() == 1
