"""Streams that begin before their first output: bytes that keep the connection open."""

import asyncio
import copy
import gc
import threading
import weakref
from contextlib import aclosing

import pytest

from cluster.api.base.sse import COMMENT, EMPTY_LINE
from cluster.api.openai import generation
from cluster.api.openai.streams import PendingOutputs
from specdec.types.errors import OverloadedError
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
USER = [{"role": "user", "content": "Ask the baker"}]
DOORS = [
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 2}, COMMENT),
    ("/v1/completions", {"prompt": ["The river", "The rain"], "max_tokens": 2}, COMMENT),
    ("/v1/responses", {"input": "Ask the baker", "max_output_tokens": 2}, COMMENT),
    ("/v1/messages", {"messages": USER, "max_tokens": 2}, PING),
    ("/generate", {"text": "The river", "sampling_params": {"max_new_tokens": 2}}, COMMENT),
]


class Gated:
    """Outputs that begin once `gate` is set. error: raised before the admission."""

    def __init__(self, error=None):
        self.gate, self.error, self.is_open = asyncio.Event(), error, False

    async def generate(self, on_admitted):
        if self.error is not None:
            raise self.error
        on_admitted()
        on_admitted()  # by a second call of the same request
        self.is_open = True
        try:
            await self.gate.wait()
            yield "first"
            yield "second"
        finally:
            self.is_open = False


async def test_outputs_wait_for_the_first_one_after_the_admission():
    gated = Gated()
    outputs = PendingOutputs(gated.generate)
    await outputs.wait_until_admitted()
    async with aclosing(outputs):
        assert not outputs.has_first
        gated.gate.set()
        await outputs.wait_for_first()
        assert outputs.has_first
        assert [each async for each in outputs] == ["first", "second"]


@pytest.mark.parametrize("wait", ["wait_until_admitted", "wait_for_first"])
async def test_a_request_that_is_not_admitted_raises_its_error(wait):
    outputs = PendingOutputs(Gated(OverloadedError("full")).generate)
    with pytest.raises(OverloadedError):
        await getattr(outputs, wait)()


@pytest.mark.parametrize("wait", ["wait_until_admitted", "wait_for_first"])
async def test_closing_ends_the_requests(wait):
    gated = Gated()
    outputs = PendingOutputs(gated.generate)
    if wait == "wait_for_first":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outputs.wait_for_first(), 0.01)
    else:
        await outputs.wait_until_admitted()
        assert gated.is_open
        await outputs.aclose()
    assert not gated.is_open


async def test_closed_requests_are_freed_without_a_collection():
    """Their prompts may be large, and clients leave in numbers where the service is overloaded."""
    gated = Gated()
    alive = weakref.ref(gated)
    outputs = PendingOutputs(gated.generate)
    await outputs.wait_until_admitted()
    gc.disable()
    try:
        await outputs.aclose()
        del gated, outputs
        await asyncio.sleep(0)
        assert alive() is None
    finally:
        gc.enable()


@pytest.fixture
def held(router, monkeypatch):
    """Let no step run until the event is set."""
    gate, engine = threading.Event(), router.running_engine().thread._engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (gate.wait(30), step())[1])
    yield gate
    gate.set()


@pytest.fixture
def sent(http, monkeypatch):
    """Return the messages of the responses so far."""
    app, messages = http._transport.app, []

    async def recording(scope, receive, send):
        async def record(message):
            messages.append(message)
            await send(message)

        await app(scope, receive, record)

    monkeypatch.setattr(http._transport, "app", recording)
    return messages


def content_of(messages):
    return b"".join(message.get("body", b"") for message in messages)


def with_interval(router, monkeypatch, seconds):
    config = copy.copy(router.config)
    object.__setattr__(config, "sse_keep_alive_s", seconds)
    monkeypatch.setattr(router, "config", config)


@pytest.mark.parametrize(("path", "body", "comment"), DOORS)
async def test_an_error_before_the_response_begins_ends_its_requests(
    http, router, held, monkeypatch, path, body, comment
):
    def fail(*_):
        raise KeyError("a bug of ours")

    monkeypatch.setattr(generation, "warning_headers", fail)
    tasks = asyncio.all_tasks()
    assert (await http.post(path, json={**body, "stream": True})).status_code == 500
    await asyncio.sleep(0)  # tasks that are cancelled end
    assert asyncio.all_tasks() <= tasks
    assert router.running_engine().thread.num_streams == 0
    held.set()
    engine = router.running_engine().thread._engine
    await eventually(lambda: not engine.has_work)  # the next test would hold its step


@pytest.mark.parametrize(("path", "body", "comment"), DOORS)
async def test_every_stream_sends_bytes_before_its_first_token(
    http, router, held, sent, monkeypatch, path, body, comment
):
    with_interval(router, monkeypatch, 0.02)
    posted = asyncio.create_task(http.post(path, json={**body, "stream": True}))
    await eventually(lambda: content_of(sent).count(comment) > 1)
    held.set()
    response = await posted
    assert response.status_code == 200
    opening, _, rest = response.content.partition(EMPTY_LINE + comment)
    assert opening.count(b"event: ") == (2 if path == "/v1/responses" else 0)
    assert rest.startswith(comment), "more than one interval has passed"
    assert b"data: " in rest.replace(comment, b"")


@pytest.mark.parametrize(("path", "body", "comment"), DOORS)
async def test_the_end_is_sent_with_the_events_of_the_last_output(http, sent, path, body, comment):
    assert (await http.post(path, json={**body, "stream": True})).status_code == 200
    assert [each["more_body"] for each in sent[1:]] == [*[True] * (len(sent) - 2), False]
    is_alone = path != "/v1/completions"  # another prompt may still have outputs
    assert (sent[-1]["body"].count(b"data: ") > 1) == is_alone


@pytest.mark.parametrize(("path", "body", "comment"), DOORS)
async def test_every_stream_sends_bytes_in_a_silence_between_outputs(
    http, router, sent, monkeypatch, path, body, comment
):
    """The step after the first output waits until the comment has been sent."""
    engine, has_output, is_silent = router.running_engine().thread._engine, False, threading.Event()
    step = engine.step

    def step_after_silence():
        nonlocal has_output
        if has_output:
            assert is_silent.wait(30)
        outputs = step()
        has_output |= any(output.token_ids for output in outputs)
        return outputs

    monkeypatch.setattr(engine, "step", step_after_silence)
    with_interval(router, monkeypatch, 0.05)
    posted = asyncio.create_task(http.post(path, json={**body, "stream": True}))
    await eventually(lambda: comment in content_of(sent).partition(b"data: {")[2])
    is_silent.set()
    response = await posted
    after_first = response.content.partition(b"data: {")[2]
    assert comment in after_first
    assert b"data: " in after_first.rpartition(comment)[2]


@pytest.mark.parametrize(("path", "body", "comment"), DOORS)
async def test_streams_without_keep_alive_send_nothing_before(
    http, router, held, monkeypatch, path, body, comment
):
    with_interval(router, monkeypatch, 0)
    asyncio.get_running_loop().call_later(0.02, held.set)
    response = await http.post(path, json={**body, "stream": True})
    assert response.content.startswith((b"data: ", b"event: "))
    assert comment not in response.content
    assert EMPTY_LINE * 3 not in response.content
