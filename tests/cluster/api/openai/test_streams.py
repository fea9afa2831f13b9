# Modules: cluster.api.base.sse
"""Streams of outputs: several prompts, deadlines, disconnected clients."""

import asyncio
import json
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from cluster.api.base.authentication import Lease
from cluster.api.base.sse import TextEvents, event
from cluster.api.http.connection import CONNECTION_LOST
from cluster.api.openai.generation import generate_outputs
from cluster.api.openai.streams import (
    ClientDisconnectedError,
    DisconnectWatch,
    EventStream,
    PromptOutput,
    cancel_on_disconnect,
    chained,
)
from cluster.replica.router import Generation
from specdec.types.deadline import Deadline
from specdec.types.errors import OverloadedError
from specdec.types.request import GenerateRequest
from specdec.types.sampling.sampling_params import SamplingParams


class Counting:
    """A router that counts to three for each prompt and records the open requests."""

    def __init__(self, pause_s=0.0, failing=()):
        self.pause_s = pause_s
        self.failing = failing
        self.open = set()

    async def generate(self, call, arrival, deadline, on_admitted):
        if call.prompt in self.failing:
            raise OverloadedError("full")
        return Generation("r", 0, self._count(call.prompt, on_admitted))

    async def _count(self, prompt, on_admitted):
        self.open.add(prompt)
        if on_admitted is not None:
            on_admitted()
        try:
            for number in range(3):
                await asyncio.sleep(self.pause_s)
                yield f"{prompt}{number}"
        finally:
            self.open.discard(prompt)


def calls(*prompts):
    return [GenerateRequest(prompt, SamplingParams()) for prompt in prompts]


ARRIVAL = SimpleNamespace(part=lambda *_, **__: ARRIVAL)


def started(router, *prompts):
    return generate_outputs(router, calls(*prompts), ARRIVAL, Deadline.after(10))


@pytest.mark.parametrize("prompts", [("a",), ("a", "b", "c")])
async def test_outputs_of_each_prompt_are_in_order(prompts):
    router = Counting()
    found = [each async for each in started(router, *prompts)]
    for index, prompt in enumerate(prompts):
        outputs = [each.output for each in found if each.prompt == index]
        assert outputs == [f"{prompt}{number}" for number in range(3)]
    assert len(found) == 3 * len(prompts)


@pytest.mark.parametrize("prompts", [("a",), ("a", "b")])
async def test_closing_aborts_all(prompts):
    router = Counting()
    async with aclosing(started(router, *prompts)) as outputs:
        await anext(outputs)
        assert router.open
    assert router.open == set()


async def test_the_first_error_ends_all():
    router = Counting(pause_s=0.01, failing=("b",))
    with pytest.raises(OverloadedError):
        [each async for each in started(router, "a", "b")]
    assert router.open == set()


async def test_chained_closes_its_source():
    router = Counting()
    outputs = started(router, "a")
    first = await anext(outputs)
    async with aclosing(chained(first, outputs)) as chain:
        assert await anext(chain) == PromptOutput(0, "a0")
        assert await anext(chain) == PromptOutput(0, "a1")
    assert router.open == set()


class Connection:
    """An ASGI connection whose client disconnects after a while."""

    def __init__(self, disconnects_after_s):
        self.disconnects_after_s = disconnects_after_s
        self.scope, self.sent = {}, []

    async def receive(self):
        await asyncio.sleep(self.disconnects_after_s)
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)


async def test_work_is_cancelled_when_the_client_disconnects():
    was_cancelled = False

    async def work():
        nonlocal was_cancelled
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    with pytest.raises(ClientDisconnectedError):
        await cancel_on_disconnect(Connection(0.01), work())
    assert was_cancelled


async def test_a_watch_cancels_each_body_that_it_is_entered_for():
    watch = DisconnectWatch({}, Connection(0.02).receive)
    with watch:
        await asyncio.sleep(0)
    for _ in range(2):  # at the disconnect, and after it
        with pytest.raises(ClientDisconnectedError), watch:
            await asyncio.sleep(10)
    await asyncio.sleep(0)  # nothing is left to cancel


async def test_a_watch_of_our_connection_receives_nothing_and_leaves_its_future():
    lost = asyncio.get_running_loop().create_future()
    watch = DisconnectWatch({"state": {CONNECTION_LOST: lost}}, None)
    with watch:
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, lost.set_result, None)
    for _ in range(2):  # at the disconnect, and after it
        with pytest.raises(ClientDisconnectedError), watch:
            await asyncio.sleep(10)
    watch.close()
    assert not lost.cancelled()


async def test_another_cancellation_is_not_a_disconnect():
    watch = DisconnectWatch({}, Connection(10).receive)

    async def work():
        with watch:
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    watch.close()


async def test_the_result_of_finished_work_is_returned():
    async def work():
        return 7

    assert await cancel_on_disconnect(Connection(10), work()) == 7


async def test_an_error_of_the_work_is_raised():
    async def work():
        raise OverloadedError("full")

    with pytest.raises(OverloadedError):
        await cancel_on_disconnect(Connection(10), work())


@pytest.mark.parametrize(("disconnects_after_s", "pause_s"), [(0.02, 3), (10, 0)])
async def test_a_stream_releases_its_lease_and_closes_its_source(disconnects_after_s, pause_s):
    router, released = Counting(), []
    outputs = started(router, "a")
    first = await anext(outputs)
    router.pause_s = pause_s  # twice, which ends after the disconnect and before the deadline

    async def events():
        async for each in chained(first, outputs):
            yield event(each.output)

    response = EventStream(events(), outputs, Deadline.after(10))
    response.lease = Lease(SimpleNamespace(release=lambda: released.append(1)))
    connection = Connection(disconnects_after_s)
    await response({"type": "http", "asgi": {}}, connection.receive, connection.send)
    assert router.open == set()
    assert released == [1]
    body = b"".join(each.get("body", b"") for each in connection.sent)
    assert body.startswith(b"data: a0\n\n")
    assert body.endswith(b"data: a2\n\n") == (pause_s == 0)


async def test_a_stream_that_never_started_is_closed_too():
    router = Counting(pause_s=0.02)
    outputs = started(router, "a")
    first = await anext(outputs)

    async def events():
        async for each in chained(first, outputs):
            yield event(each.output)

    async def fail(message):
        raise OSError("connection lost")

    response, connection = EventStream(events(), outputs, Deadline.after(10)), Connection(10)
    with pytest.raises(OSError, match="connection lost"):
        await response({"type": "http", "asgi": {}}, connection.receive, fail)
    assert router.open == set()


async def test_a_stream_ends_when_the_client_stops_reading():
    router, released = Counting(), []
    deadline = Deadline.after(0.02)
    outputs = generate_outputs(router, calls("a"), ARRIVAL, deadline)
    first = await anext(outputs)

    async def events():
        async for each in chained(first, outputs):
            yield event(each.output)

    async def never(message):
        await asyncio.sleep(10)

    response = EventStream(events(), outputs, deadline, grace_s=0.02)
    response.lease = Lease(SimpleNamespace(release=lambda: released.append(1)))
    async with asyncio.timeout(5):
        await response({"type": "http", "asgi": {}}, Connection(10).receive, never)
    assert router.open == set()
    assert released == [1]


def test_an_event_may_have_a_name():
    assert event("{}") == b"data: {}\n\n"
    assert event("{}", "done") == b"event: done\ndata: {}\n\n"


@pytest.mark.parametrize(
    "text", ["", "plain", 'a "quote" \\', "\x00\x1f\x7f\n", "é € 🙂", "</script>"]
)
def test_text_events_spell_a_text_as_json_does(text):
    events = TextEvents(lambda each: event(json.dumps({"a": each, "b": [1, each]})))
    [data] = [events.encode(text)]
    assert json.loads(data.removeprefix(b"data: ")) == {"a": text, "b": [1, text]}
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
