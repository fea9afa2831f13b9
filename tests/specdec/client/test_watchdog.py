"""Calls that gRPC never ends: stand-ins for its calls that wait as it has been seen to."""

import asyncio
import threading
import time

import grpc
import pytest

from specdec.client import AsyncClient, Client, ClientError, attempts, watchdog
from specdec.client.attempts import Attempts
from specdec.client.watchdog import receive
from tests.specdec.client.fake_service import CHUNKS

TIMEOUT_S = 0.1


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(attempts, "GRACE_S", 0.05)


class Stuck:
    """A call of `grpc` that yields messages and then waits, whatever its deadline."""

    def __init__(self, messages=()):
        self._messages = messages
        self.is_cancelled = threading.Event()

    def __iter__(self):
        yield from self._messages
        threading.Event().wait(60)

    def result(self, timeout):
        time.sleep(timeout)
        raise grpc.FutureTimeoutError

    def is_active(self):
        return not self.is_cancelled.is_set()

    def cancel(self):
        self.is_cancelled.set()


class StuckAsync:
    """A call of `grpc.aio` that yields chunks and then waits, whatever its deadline."""

    def __init__(self, messages=()):
        self._messages = messages
        self.is_cancelled = False

    async def __aiter__(self):
        for each in self._messages:
            yield each
        await asyncio.Event().wait()

    def __await__(self):
        return asyncio.Event().wait().__await__()

    def cancel(self):
        self.is_cancelled = True


class Method:
    """A method of a stub that makes one call, over and over."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *_, **__):
        return self._call

    future = __call__


def with_calls(client, call):
    client._stub.Generate = client._stub.GenerateStream = Method(call)
    return client


@pytest.mark.parametrize("messages", [(), CHUNKS[:1]])
def test_a_blocking_stream_ends_after_its_deadline(messages, monkeypatch):
    monkeypatch.setattr(attempts, "GRACE_S", 30.0)  # for the thread that receives
    call, began_at = Stuck(messages), time.monotonic()
    client = with_calls(Client("127.0.0.1:1", timeout_s=TIMEOUT_S), call)
    chunks = client.generate_stream("Why?")
    received = [next(chunks) for _ in messages]
    monkeypatch.setattr(attempts, "GRACE_S", 0.05)
    with client, pytest.raises(ClientError, match=r"within 0\.1 s") as caught:
        next(chunks)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began_at < 30, "gRPC would wait for a minute"
    assert [each.text for each in received] == [each.text for each in messages]
    assert call.is_cancelled.is_set()


def test_a_blocking_call_ends_after_its_deadline():
    call = Stuck()
    client = with_calls(Client("127.0.0.1:1", timeout_s=TIMEOUT_S), call)
    with client, pytest.raises(ClientError, match=r"within 0\.1 s"):
        client.generate("Why?")
    assert call.is_cancelled.is_set()


@pytest.mark.parametrize("messages", [(), CHUNKS[:1]])
async def test_an_asynchronous_stream_ends_after_its_deadline(messages):
    call = StuckAsync(messages)
    async with with_calls(AsyncClient("127.0.0.1:1", timeout_s=TIMEOUT_S), call) as client:
        chunks = client.generate_stream("Why?")
        for _ in messages:
            assert (await anext(chunks)).text == "Blue"
        with pytest.raises(ClientError, match=r"within 0\.1 s"):
            await anext(chunks)
    assert call.is_cancelled
    assert asyncio.current_task().cancelling() == 0


async def test_a_consumer_is_not_cancelled_between_two_chunks():
    call = StuckAsync(CHUNKS[:1])
    async with with_calls(AsyncClient("127.0.0.1:1", timeout_s=TIMEOUT_S), call) as client:
        chunks = client.generate_stream("Why?")
        await anext(chunks)
        await asyncio.sleep(2 * TIMEOUT_S)
        with pytest.raises(ClientError, match=r"within 0\.1 s"):
            await anext(chunks)


async def test_an_asynchronous_call_ends_after_its_deadline():
    async with with_calls(AsyncClient("127.0.0.1:1", timeout_s=TIMEOUT_S), StuckAsync()) as client:
        with pytest.raises(ClientError, match=r"within 0\.1 s"):
            await client.generate("Why?")


def test_a_stream_without_a_deadline_ends_after_a_stall():
    with pytest.raises(TimeoutError):
        list(receive(Stuck(), Attempts(None, ()), stall_s=0.05))


def test_messages_that_are_not_read_stay_limited(monkeypatch):
    monkeypatch.setattr(watchdog, "_MAX_WAITING", 5)
    taken = []
    call = Stuck(taken.append(each) or each for each in range(100))
    messages = receive(call, Attempts(10, ()))
    assert next(messages) == 0
    time.sleep(0.1)
    assert len(taken) <= 7
    messages.close()
